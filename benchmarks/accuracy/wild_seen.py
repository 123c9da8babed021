"""Edits of the families that training has augmentations for, written without its code.

Each takes an RGB image, a generator that decides everything random, and a function that gives
another image; strengths are those seen where images are shared.
"""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont, ImageOps

from accuracy.families import SEEN

Other = Callable[[], Image.Image]
Edit = Callable[[Image.Image, np.random.Generator, Other], Image.Image]
Colour = tuple[int, int, int]
LAYOUTS = ((1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 3))
SYLLABLES = "ka to ri ben sol ma lu ta ver no qui da pro fen al os".split()


def crop(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """20 to 70 % of the area."""
    part = rng.uniform(0.2, 0.7) ** 0.5
    bend = float(np.exp(rng.uniform(-0.2, 0.2)))
    wide, high = (
        round(s * min(1, part * b)) for s, b in zip(image.size, (bend, 1 / bend), strict=True)
    )
    left, top = (
        int(rng.integers(image.width - wide + 1)),
        int(rng.integers(image.height - high + 1)),
    )
    return image.crop((left, top, left + wide, top + high))


def flip(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Left to right, or upside down."""
    return ImageOps.mirror(image) if rng.random() < 0.6 else ImageOps.flip(image)


def turn(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """By a quarter, by half, or by any angle on a plain ground."""
    if rng.random() < 0.4:
        return image.rotate(int(rng.choice([90, 180, 270])), expand=True)
    degrees = rng.uniform(8, 45) * rng.choice([-1, 1])
    return image.rotate(degrees, Image.Resampling.BICUBIC, True, fillcolor=colour(rng))


def perspective(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """As photographed from the side."""
    w, h = image.size
    corners = np.array([[0, 0], [w, 0], [w, h], [0, h]], dtype=float)
    moved = corners + rng.uniform(-0.22, 0.22, (4, 2)) * [w, h]
    rows = []
    for (x, y), (u, v) in zip(corners, moved, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    terms = np.linalg.solve(np.array(rows), moved.ravel())
    return image.transform(
        image.size,
        Image.Transform.PERSPECTIVE,
        tuple(terms.tolist()),
        Image.Resampling.BICUBIC,
        fillcolor=colour(rng),
    )


def light(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Brighter or darker, with more or less contrast and saturation."""
    for kind in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        image = kind(image).enhance(float(np.exp(rng.uniform(-0.8, 0.8))))
    return image


def gray(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Without colour, contrast changed."""
    return ImageEnhance.Contrast(image.convert("L").convert("RGB")).enhance(rng.uniform(0.6, 1.8))


def channels(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Red, green and blue swapped."""
    orders = [(2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)]
    bands = image.split()
    return Image.merge("RGB", [bands[band] for band in orders[int(rng.integers(5))]])


def posterize(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Two to eight levels of each colour."""
    return ImageOps.posterize(image, int(rng.integers(1, 4)))


def solarize(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Bright parts inverted, or all."""
    return ImageOps.solarize(image, int(rng.choice([0, 64, 96, 128, 160, 192])))


def emboss(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Lit from the side."""
    return Image.blend(image, image.filter(ImageFilter.EMBOSS), float(rng.uniform(0.5, 1)))


def blur(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Gaussian."""
    return image.filter(ImageFilter.GaussianBlur(rng.uniform(0.012, 0.03) * min(image.size)))


def noise(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Gaussian, or salt and pepper."""
    pixels = np.asarray(image, np.float32)
    if rng.random() < 0.5:
        return as_image(pixels + rng.normal(0, rng.uniform(20, 75), pixels.shape))
    draw, share = rng.random(pixels.shape[:2]), rng.uniform(0.03, 0.15)
    pixels = np.where((draw < share)[..., None], 0, pixels)
    return as_image(np.where((draw > 1 - share)[..., None], 255, pixels))


def pixelize(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Squares of one colour, 16 to 40 along the short side."""
    scale = int(rng.integers(16, 41)) / min(image.size)
    small = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BOX
    )
    return small.resize(image.size, Image.Resampling.NEAREST)


def jpeg(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Quality 2 to 12."""
    return saved(image, int(rng.integers(2, 13)))


def text(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """One to four lines of words over it."""
    image = image.copy()
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(1, 5))):
        size = round(image.height * rng.uniform(0.07, 0.18))
        place = (rng.uniform(0, 0.4) * image.width, rng.uniform(0, 0.85) * image.height)
        edge = int(rng.integers(0, 3))
        pen.text(
            place,
            words(rng, 4),
            colour(rng),
            ImageFont.load_default(size),
            stroke_width=edge,
            stroke_fill=colour(rng),
        )
    return image


def stickers(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Two to six faces, hearts, stars or bubbles."""
    image = image.copy()
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(2, 7))):
        x, y = rng.uniform(0, image.width), rng.uniform(0, image.height)
        r = rng.uniform(0.05, 0.14) * min(image.size)
        kind = int(rng.integers(3))
        if kind == 0:
            pen.ellipse((x - r, y - r, x + r, y + r), colour(rng), (0, 0, 0), 2)
            pen.arc((x - r / 2, y - r / 2, x + r / 2, y + r / 2), 20, 160, (0, 0, 0), 3)
        elif kind == 1:
            points = [
                (
                    x + r * (1 - 0.55 * (i % 2)) * np.sin(i * np.pi / 5),
                    y - r * (1 - 0.55 * (i % 2)) * np.cos(i * np.pi / 5),
                )
                for i in range(10)
            ]
            pen.polygon(points, colour(rng))
        else:
            pen.rounded_rectangle((x - r, y - r / 2, x + r, y + r / 2), round(r / 3), colour(rng))
            pen.text(
                (x - r * 0.8, y - r * 0.4),
                words(rng, 1),
                colour(rng),
                ImageFont.load_default(max(6, round(r * 0.6))),
            )
    return image


def stripes(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Bars of one colour across it."""
    y, x = np.mgrid[0 : image.height, 0 : image.width] / min(image.size)
    angle = rng.choice([0.0, np.pi / 2, rng.uniform(0, np.pi)])
    on = ((x * np.cos(angle) + y * np.sin(angle)) * rng.uniform(4, 18)) % 1 < rng.uniform(0.15, 0.4)
    pixels = np.asarray(image, np.float32)
    share = rng.uniform(0.5, 1)
    covered = (1 - share) * pixels + share * np.array(colour(rng))
    return as_image(np.where(on[..., None], covered, pixels))


def occlusion(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Boxes over up to half of it."""
    image = image.copy()
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(1, 4))):
        wide, high = rng.uniform(0.2, 0.5, 2) * image.size
        left, top = rng.uniform(0, 1, 2) * (np.array(image.size) - [wide, high])
        pen.rectangle((left, top, left + wide, top + high), colour(rng))
    return image


def border(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """A frame or bands that leave 40 to 80 % of the side to the image."""
    wide, high = (
        rng.uniform(0.4, 0.8, 2)
        if rng.random() < 0.6
        else rng.permutation([rng.uniform(0.4, 0.7), 1.0])
    )
    page = Image.new("RGB", (round(image.width / wide), round(image.height / high)), colour(rng))
    page.paste(image, _somewhere(image, page, rng))
    return page


def collage(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """One cell of two to nine."""
    rows, columns = LAYOUTS[int(rng.integers(len(LAYOUTS)))]
    wide, high = image.size
    gap = int(rng.integers(0, 12))
    page = Image.new("RGB", (columns * (wide + gap) + gap, rows * (high + gap) + gap), colour(rng))
    own = int(rng.integers(rows * columns))
    for cell in range(rows * columns):
        shown = image if cell == own else ImageOps.fit(other(), image.size)
        page.paste(
            shown, (gap + cell % columns * (wide + gap), gap + cell // columns * (high + gap))
        )
    return page


def backdrop(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Pasted onto another image, 45 to 80 % of its side."""
    part = rng.uniform(0.45, 0.8)
    page = ImageOps.fit(other(), (round(image.width / part), round(image.height / part)))
    page.paste(image, _somewhere(image, page, rng))
    return page


def interface(image: Image.Image, rng: np.random.Generator, other: Other) -> Image.Image:
    """Shown small by a phone or on a web page."""
    phone = rng.random() < 0.6
    width, height = (
        (360, int(rng.integers(560, 760))) if phone else (760, int(rng.integers(420, 520)))
    )
    dark = rng.random() < 0.4
    paper, ink = ((22, 24, 28), (220, 222, 226)) if dark else ((255, 255, 255), (30, 32, 36))
    page = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(page)
    pen.rectangle((0, 0, width, 44), colour(rng))
    pen.text((12, 12), words(rng, 2), ink, ImageFont.load_default(18))
    for row in range(int(rng.integers(8, 24))):
        pen.text(
            (12 if phone else width // 2, 56 + row * 24),
            words(rng, 6),
            ink,
            ImageFont.load_default(15),
        )
    side = rng.uniform(0.6, 1.0) * 360 if phone else rng.uniform(0.35, 0.5) * width
    shown = ImageOps.contain(image, (round(side), round(side)))
    room = np.array([width - shown.width, max(height - 44 - shown.height, 1)])
    left, top = rng.random(2) * room
    page.paste(shown, (int(left), 44 + int(top)))
    pen.ellipse((width - 60, height - 60, width - 16, height - 16), colour(rng))
    return page


EDITS: dict[str, Edit] = {
    edit.__name__: edit
    for edit in (
        *(crop, flip, turn, perspective, light, gray, channels, posterize, solarize, emboss),
        *(blur, noise, pixelize, jpeg, text, stickers, stripes, occlusion),
        *(border, collage, backdrop, interface),
    )
}


def colour(rng: np.random.Generator) -> Colour:
    """Black, white or any colour."""
    kind = int(rng.integers(3))
    red, green, blue = (int(c) for c in rng.integers(0, 256, 3)) if kind == 2 else (255 * kind,) * 3
    return red, green, blue


def _somewhere(image: Image.Image, page: Image.Image, rng: np.random.Generator) -> tuple[int, int]:
    """Where to paste the image so that it lies within the page."""
    left, top = rng.random(2) * (np.array(page.size) - image.size)
    return int(left), int(top)


def words(rng: np.random.Generator, count: int) -> str:
    """Invented words."""
    return " ".join("".join(rng.choice(SYLLABLES, int(rng.integers(1, 4)))) for _ in range(count))


def as_image(pixels: np.ndarray) -> Image.Image:
    """Levels 0 to 255 as an image."""
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def saved(image: Image.Image, quality: int) -> Image.Image:
    """The image after it was saved as JPEG."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    with Image.open(file) as again:
        return again.convert("RGB")


if tuple(EDITS) != SEEN:
    raise RuntimeError(f"expected the edits of {SEEN}, got {tuple(EDITS)}")
