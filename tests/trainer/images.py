"""Generated images: tiles and shapes, each in its own palette, all different, none real."""

import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter


def photo(seed: int, width: int = 96, height: int = 96) -> Image.Image:
    random = np.random.default_rng(seed)
    palette = random.integers(0, 256, (4, 3))
    cells = int(random.integers(2, 9))
    coarse = palette[random.integers(0, 4, (cells, cells))].astype(np.uint8)
    smooth = random.random() < 0.5
    resampling = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    image = Image.fromarray(coarse).resize((width, height), resampling)
    pen = ImageDraw.Draw(image)
    for _ in range(int(random.integers(1, 5))):
        colour = tuple(int(c) for c in palette[random.integers(4)])
        left, top = random.uniform(0, 0.8, 2) * (width, height)
        wide, high = random.uniform(0.1, 0.4, 2) * (width, height)
        draw = pen.ellipse if random.random() < 0.5 else pen.rectangle
        draw((left, top, left + wide, top + high), fill=colour)
    return image.filter(ImageFilter.GaussianBlur(0.5))


def pixels(count: int, side: int = 40) -> torch.Tensor:
    """Images as they are stored: uint8 ``(count, side, side, 3)``."""
    return torch.from_numpy(np.stack([np.asarray(photo(i, side, side)) for i in range(count)]))


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
