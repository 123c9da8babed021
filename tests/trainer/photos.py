"""Generated photos: random patterns under random shapes, all different, none of them real."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter


def photo(seed: int, width: int = 96, height: int = 96) -> Image.Image:
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / min(width, height)
    pattern = np.zeros((height, width))
    for _ in range(2):
        frequency = random.uniform(2, 16)
        turn = random.uniform(0, np.pi)
        along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
        centre_x, centre_y = random.uniform(0, 1, 2)
        waves = (
            np.sin(2 * np.pi * frequency * along),
            np.sin(2 * np.pi * frequency * along) * np.sin(2 * np.pi * frequency * across),
            np.sin(2 * np.pi * frequency * np.hypot(x - centre_x, y - centre_y)),
        )[int(random.integers(3))]
        pattern += np.sign(waves) if random.random() < 0.5 else waves
    mix = (np.clip(pattern / 2, -1, 1)[..., None] + 1) / 2
    colours = random.uniform(0, 255, (2, 3))
    pixels = (mix * colours[0] + (1 - mix) * colours[1]).astype(np.uint8)
    image = Image.fromarray(pixels)
    pen = ImageDraw.Draw(image)
    for _ in range(int(random.integers(1, 5))):
        colour = tuple(int(c) for c in random.integers(0, 256, 3))
        left, top = random.uniform(0, 0.8, 2) * (width, height)
        wide, high = random.uniform(0.1, 0.4, 2) * (width, height)
        draw = pen.ellipse if random.random() < 0.5 else pen.rectangle
        draw((left, top, left + wide, top + high), fill=colour)
    return image.filter(ImageFilter.GaussianBlur(0.5))


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_folder(folder: Path, count: int, first: int = 0, side: int = 96) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(first, first + count):
        (folder / f"{i:05d}.png").write_bytes(encoded(photo(i, side, side)))
    return folder


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as shard:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return path
