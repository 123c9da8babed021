"""Pictures drawn from a seed, and edited copies of them: what ``sscd-vec demo`` works on.

Four kinds of scene (mountains, a street at night, things on a table, cells under a microscope),
each with its own palette, light, fractal texture and grain, so that two seeds give two clearly
different pictures and the same seed always gives the same one. Nothing is downloaded and no
photograph is shipped.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

SIZE = (400, 300)  # width, height
GRAIN = 5.0  # standard deviation of the sensor noise, in grey levels

Pixels = NDArray[np.float32]  # (height, width, 3), 0–255
Edit = Callable[[Image.Image, np.random.Generator], Image.Image]


def draw(seed: int) -> Image.Image:
    """Draw the picture of ``seed``."""
    rng = np.random.default_rng((7, seed))
    scene = _SCENES[int(rng.integers(len(_SCENES)))]
    pixels = scene(rng)
    pixels = pixels + rng.normal(0, GRAIN, pixels.shape).astype(np.float32)
    image = _image(pixels)
    if rng.random() < 0.35:  # some pictures are upright
        image = ImageOps.fit(image, (270, 360))
    return image


def fractal(
    rng: np.random.Generator, shape: tuple[int, int], octaves: int = 5, persistence: float = 0.55
) -> NDArray[np.float32]:
    """Value noise summed over octaves, ``Σ_o persistence^o · noise_o``, scaled to 0–1."""
    height, width = shape
    total = np.zeros(shape, np.float32)
    for octave in range(octaves):
        cells = 3 * 2**octave
        grid = rng.random((cells, cells)).astype(np.float32)
        smooth = Image.fromarray(grid).resize((width, height), Image.Resampling.BICUBIC)
        total += np.asarray(smooth) * persistence**octave
    low, high = float(total.min()), float(total.max())
    scaled: NDArray[np.float32] = (total - low) / (high - low)
    return scaled


def _mountains(rng: np.random.Generator) -> Pixels:
    width, height = SIZE
    top, bottom = _colour(rng, 40, 200), _colour(rng, 120, 255)
    fade = np.linspace(0, 1, height, dtype=np.float32)[:, None, None]
    clouds = fractal(rng, (height, width))[..., None] ** 2
    pixels = top * (1 - fade) + bottom * fade
    pixels = pixels * (1 - 0.6 * clouds) + 255 * 0.6 * clouds
    x, y = rng.uniform(0.1, 0.9) * width, rng.uniform(0.05, 0.4) * height
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    glow = np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / (2 * rng.uniform(12, 40) ** 2))
    pixels = pixels + glow[..., None] * np.array([255, 230, 160], np.float32) * 0.8
    layers = int(rng.integers(2, 5))
    near = _colour(rng, 10, 110)
    for layer in range(layers):
        base = height * (0.4 + 0.5 * layer / layers)
        ridge = base - 90 * (fractal(rng, (1, width), 6)[0] - 0.4)
        inside = rows > ridge[None, :]
        mix = (layer + 1) / layers
        texture = 0.6 + 0.8 * fractal(rng, (height, width), 6)[inside][:, None]
        pixels[inside] = (near * mix + bottom * 0.6 * (1 - mix)) * texture
    scene: Pixels = pixels.astype(np.float32)
    return scene


def _street(rng: np.random.Generator) -> Pixels:
    width, height = SIZE
    image = Image.new("RGB", SIZE, _ink(_colour(rng, 5, 70)))
    pen = ImageDraw.Draw(image)
    lit = _ink(_colour(rng, 150, 255))
    x = -int(rng.integers(0, 40))
    while x < width:
        wide, high = int(rng.integers(45, 120)), int(rng.integers(90, 310))
        pen.rectangle((x, height - high, x + wide, height), _ink(_colour(rng, 30, 140)))
        step_x, step_y = int(rng.integers(13, 24)), int(rng.integers(16, 30))
        for left in range(x + 6, x + wide - step_x // 2, step_x):
            for top in range(height - high + 8, height - 24, step_y):
                if rng.random() < 0.6:
                    pen.rectangle((left, top, left + step_x // 2, top + step_y // 2), lit)
        x += wide + int(rng.integers(0, 14))
    for _ in range(int(rng.integers(4, 14))):  # lamps and cars
        x, y = int(rng.integers(width)), int(rng.integers(height * 2 // 3, height))
        radius = int(rng.integers(4, 16))
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), _ink(_colour(rng, 120, 255)))
    pixels = np.asarray(image.filter(ImageFilter.GaussianBlur(0.8)), np.float32)
    dusk: Pixels = pixels * (0.7 + 0.5 * fractal(rng, (height, width))[..., None])
    return dusk


def _table(rng: np.random.Generator) -> Pixels:
    width, height = SIZE
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    wall, wood = _colour(rng, 60, 230), _colour(rng, 40, 200)
    horizon = height * rng.uniform(0.25, 0.55)
    veins = np.sin(
        fractal(rng, (height, width), 4) * rng.uniform(20, 60) + columns * rng.uniform(0, 0.05)
    )
    pixels = np.where(
        (rows > horizon)[..., None], wood * (0.85 + 0.15 * veins[..., None]), wall * np.ones(3)
    ).astype(np.float32)
    pixels *= (0.75 + 0.4 * fractal(rng, (height, width), 3)[..., None]).astype(np.float32)
    light_x, light_y = rng.uniform(-1, 1), rng.uniform(-1, 1)
    for _ in range(int(rng.integers(3, 9))):
        radius = rng.uniform(22, 75)
        x, y = rng.uniform(0, width), rng.uniform(horizon, height)
        squash = rng.uniform(0.6, 1.4)
        dx, dy = (columns - x) / radius, (rows - y) / (radius * squash)
        pixels[(dx - 0.4) ** 2 + ((dy - 0.5) * 1.8) ** 2 < 1.1] *= 0.6  # the shadow
        if rng.random() < 0.6:
            inside = dx**2 + dy**2 < 1
        else:
            inside = np.maximum(np.abs(dx), np.abs(dy)) < 0.8
        shade = np.clip(0.65 + 0.45 * (dx * light_x + dy * light_y), 0.15, 1.2)
        stripes = 1 + 0.35 * np.sin(dx * rng.uniform(0, 14) + dy * rng.uniform(0, 14))
        body = _colour(rng, 30, 255) * (shade * stripes)[inside][:, None]
        pixels[inside] = body
    return pixels


def _cells(rng: np.random.Generator) -> Pixels:
    width, height = SIZE
    small = (height // 2, width // 2)  # nearest-site search at half size, then enlarged
    rows, columns = np.mgrid[0 : small[0], 0 : small[1]].astype(np.float32)
    count = int(rng.integers(12, 45))
    sites = rng.uniform(0, 1, (count, 2)) * small
    sway = fractal(rng, small, 4) * rng.uniform(10, 40)
    distance = (rows[..., None] + sway[..., None] - sites[:, 0]) ** 2
    distance = distance + (columns[..., None] - sites[:, 1]) ** 2
    nearest = np.partition(distance, 1, axis=2)[..., :2]
    edge = np.sqrt(nearest[..., 1]) - np.sqrt(nearest[..., 0])
    dark, light = _colour(rng, 10, 110), _colour(rng, 120, 255)
    palette = np.stack([dark + (light - dark) * rng.random() for _ in range(count)])
    pixels = palette[distance.argmin(axis=2)] * np.clip(0.4 + edge / 8, 0.3, 1.1)[..., None]
    pixels *= 0.7 + 0.5 * fractal(rng, small)[..., None]
    image = _image(pixels.astype(np.float32)).resize(SIZE, Image.Resampling.BICUBIC)
    return np.asarray(image, np.float32)


_SCENES = (_mountains, _street, _table, _cells)


def _resaved(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    small = image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)
    return small.quantize(48).convert("RGB")


def _cropped(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    part = rng.uniform(0.68, 0.8)
    wide, high = round(image.width * part), round(image.height * part)
    x, y = int(rng.integers(image.width - wide)), int(rng.integers(image.height - high))
    return image.crop((x, y, x + wide, y + high))


def _filtered(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    brighter = ImageEnhance.Brightness(image).enhance(rng.uniform(1.15, 1.35))
    return ImageEnhance.Color(brighter).enhance(rng.uniform(0.2, 0.6))


def _captioned(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    captioned = image.copy()
    pen = ImageDraw.Draw(captioned)
    font = ImageFont.load_default(image.width / 9)
    place = (image.width * 0.06, image.height * rng.uniform(0.08, 0.75))
    pen.text(place, "look at this!", (255, 255, 255), font, stroke_width=2, stroke_fill=(0, 0, 0))
    return captioned


def _framed(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    border = round(min(image.size) * 0.07)
    return ImageOps.expand(image, border, _ink(_colour(rng, 0, 255)))


def _mirrored(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return ImageOps.mirror(image)


EDITS: Mapping[str, Edit] = {
    "resaved": _resaved,
    "cropped": _cropped,
    "filtered": _filtered,
    "captioned": _captioned,
    "framed": _framed,
    "mirrored": _mirrored,
}


def _colour(rng: np.random.Generator, low: int, high: int) -> NDArray[np.float32]:
    return rng.uniform(low, high, 3).astype(np.float32)


def _ink(colour: NDArray[np.float32]) -> tuple[int, int, int]:
    red, green, blue = (int(part) for part in colour)
    return red, green, blue


def _image(pixels: NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
