"""Images that share something and are not copies: what a verification by geometry has to refuse.

Every kind makes sets of images on one template (a logo, a caption, an interface, a texture, a
form), each around another photo or with other content. Within a set all images are neighbours of
each other, and no two are copies.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from accuracy.verification import NEVER, Measurements, joined
from photos import Photo
from sscd_vec.bank import Bank
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
from sscd_vec.verify.evidence import best_alignment
from sscd_vec.verify.features import extract
from sscd_vec.verify.verifier import KEPT, KEYPOINTS, SIDE

Colour = tuple[int, int, int]
Maker = Callable[[Image.Image, np.random.Generator, np.random.Generator], Image.Image]

PAGE = 384  # pixels
WORDS = (
    "river window bright seven market under simple garden paper north winter silver open music "
    "travel little house green summer coffee final number people morning bridge yellow"
).split()


def make(kind: str, photos: Sequence[Photo], sets: int, seed: int) -> list[list[Image.Image]]:
    """Sets of images on one template each, that share the photos evenly.

    Args:
        kind: A key of ``KINDS``.
        photos: What the images are made around; each is used once.
        sets: How many templates.
        seed: Decides everything.
    """
    made = []
    for number in range(sets):
        share = photos[number::sets]
        made.append(
            [
                KINDS[kind](
                    ImageOps.fit(photo.image(), (PAGE, PAGE * 3 // 4)),
                    np.random.default_rng((seed, number)),  # the template: the same for all
                    np.random.default_rng((seed, number, place)),
                )
                for place, photo in enumerate(share)
            ]
        )
    return made


def measure_friends(
    encoder: Encoder,
    normalizer: Normalizer,
    photos: Sequence[Photo],
    sets: int,
    seed: int,
    k: int,
) -> dict[str, Measurements]:
    """Every image of a kind as a query, with its ``k`` nearest images on the same template.

    Queries and references are numbered through within a kind.
    """
    found = {}
    for kind in KINDS:
        parts, start = [], 0
        for images in make(kind, photos, sets, seed):
            parts.append(_measure_all(encoder, normalizer, images, k, start))
            start += len(images)
        found[kind] = joined(parts)
        print(f"false friends: {kind} measured", flush=True)
    return found


def judged_friends(
    photos: Sequence[Photo], sets: int, seed: int, k: int
) -> dict[str, dict[str, int]]:
    """Per kind, images that a bank calls a copy of another one of their template.

    Asked as a user asks: ``Bank.search`` in a bank of the template's images, plain and verified.
    """
    found = {}
    for kind in KINDS:
        called = {"queries": 0, "by a bank": 0, "by a bank, verified": 0}
        for images in make(kind, photos, sets, seed):
            with tempfile.TemporaryDirectory() as folder:
                for number, image in enumerate(images):
                    image.save(Path(folder, f"{number}.png"), compress_level=1)
                with Bank() as bank:
                    bank.add(folder)
                    for file in sorted(Path(folder).iterdir()):
                        called["queries"] += 1
                        called["by a bank"] += _called(bank, file, k, verify=False)
                        called["by a bank, verified"] += _called(bank, file, k, verify=True)
        found[kind] = called
        print(f"false friends: {kind} {called}", flush=True)
    return found


def _called(bank: Bank, file: Path, k: int, *, verify: bool) -> bool:
    """Whether an image of the bank is called a copy of another one."""
    matches = bank.search(file, k + 1, verify=k + 1 if verify else False)
    return any(match.is_copy and Path(match.id).name != file.name for match in matches)


def _measure_all(
    encoder: Encoder, normalizer: Normalizer, images: list[Image.Image], k: int, start: int
) -> Measurements:
    descriptors = encoder.encode(images)
    scores = normalizer.queries(descriptors) @ normalizer.references(descriptors).T
    np.fill_diagonal(scores, -np.inf)
    features = [extract(np.asarray(each), side=SIDE, keypoints=KEYPOINTS) for each in images]
    best = np.argsort(-scores, axis=1, kind="stable")[:, : min(k, len(images) - 1)]
    table = [
        astuple(best_alignment(features[row], features[other].best(KEPT)).support)
        for row, others in enumerate(best)
        for other in others
    ]
    return Measurements(
        query=start + np.repeat(np.arange(len(images)), best.shape[1]),
        reference=start + best.ravel(),
        rank=np.tile(np.arange(best.shape[1]), len(images)),
        further_rank=np.full(best.size, NEVER),
        descriptor=np.take_along_axis(scores, best, 1).ravel().astype(np.float32),
        support=np.array(table, np.float32),
    )


def logo(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One logo of 8 to 20 % of the width, in the same corner or anywhere."""
    side = round(photo.width * template.uniform(0.15, 0.3))
    mark = _mark(template, side)
    place = _place(photo.size, mark.size, own if template.random() < 0.5 else template)
    photo.paste(mark, place)
    return photo


def caption(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One text in large letters across different photos."""
    pen = ImageDraw.Draw(photo)
    size = int(template.integers(22, 40))
    top = int(template.integers(0, photo.height // 2))
    ink = _colour(template)
    for line in range(int(template.integers(1, 4))):
        place = (12, top + line * round(1.2 * size))
        pen.text(place, _phrase(template, 4), ink, ImageFont.load_default(size), stroke_width=1)
    return photo


def interface(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One application around different photos: bars, buttons and labels are the same."""
    dark = template.random() < 0.5
    paper, ink = ((24, 26, 30), (225, 225, 230)) if dark else ((250, 250, 252), (40, 42, 48))
    width, height = (PAGE, round(PAGE * 1.7)) if template.random() < 0.5 else (PAGE * 2, PAGE)
    page = Image.new("RGB", (width, height), paper)
    pen = ImageDraw.Draw(page)
    for bar in range(2):
        y = bar * (height - 60)
        pen.rectangle((0, y, width, y + 60), _colour(template))
        for place in range(5):
            x = round((place + 0.5) * width / 5)
            pen.ellipse((x - 14, y + 8, x + 14, y + 36), _colour(template), ink, 2)
            pen.text((x - 22, y + 40), _phrase(template, 1), ink, ImageFont.load_default(12))
    box = round(width * template.uniform(0.5, 0.8)), height - 200
    page.paste(ImageOps.fit(photo, box), (16, 80))
    for line in range(8):
        pen.text((box[0] + 24, 80 + 20 * line), _phrase(own, 3), ink, ImageFont.load_default(13))
    pen.text((16, height - 100), _phrase(own, 5), ink, ImageFont.load_default(16))
    return page


def meme(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One poster frame with its title, and a line of its own, around different photos."""
    frame = _colour(template)
    ink: Colour = (255, 255, 255) if sum(frame) < 380 else (0, 0, 0)
    page = Image.new("RGB", (photo.width + 60, photo.height + 130), frame)
    pen = ImageDraw.Draw(page)
    pen.rectangle((24, 24, photo.width + 35, photo.height + 35), None, ink, 3)
    page.paste(photo, (30, 30))
    title = _phrase(template, 2).upper()
    pen.text((40, photo.height + 46), title, ink, ImageFont.load_default(34))
    pen.text((40, photo.height + 94), _phrase(own, 4), ink, ImageFont.load_default(18))
    return page


def texture(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One tiled pattern as a wide frame around different photos."""
    tile = _mark(template, int(template.integers(24, 56)))
    page = Image.new("RGB", (PAGE, PAGE))
    shift = own.integers(0, tile.width, 2)
    for x in range(-int(shift[0]), PAGE, tile.width):
        for y in range(-int(shift[1]), PAGE, tile.height):
            page.paste(tile, (x, y))
    inner = ImageOps.fit(photo, (round(PAGE * 0.6), round(PAGE * 0.5)))
    page.paste(inner, _place(page.size, inner.size, own))
    return page


def pattern(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """Brick walls of one size of bricks, every brick another shade."""
    wide, high = int(template.integers(30, 60)), int(template.integers(14, 28))
    base, spread = np.array(_colour(template)), template.uniform(10, 40)
    page = Image.new("RGB", (PAGE, PAGE), _colour(template))
    pen = ImageDraw.Draw(page)
    for row, y in enumerate(range(0, PAGE, high)):
        for x in range(-wide, PAGE, wide):
            left = x + (wide // 2 if row % 2 else 0)
            shade = np.clip(base + own.normal(0, spread), 0, 255).astype(int)
            pen.rectangle((left + 1, y + 1, left + wide - 2, y + high - 2), _rgb(shade))
    return page


def form(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One form (letterhead, labels, table) filled in differently."""
    page = Image.new("RGB", (PAGE * 3 // 2, PAGE * 2), (252, 252, 250))
    pen = ImageDraw.Draw(page)
    page.paste(_mark(template, 60), (30, 24))
    pen.text((110, 36), _phrase(template, 3).title(), (20, 20, 40), ImageFont.load_default(26))
    for row in range(6):
        label, value = _phrase(template, 2), _phrase(own, 3)
        pen.text((30, 120 + 26 * row), label, (90, 90, 90), ImageFont.load_default(15))
        pen.text((220, 120 + 26 * row), value, (10, 10, 10), ImageFont.load_default(15))
    for row in range(12):
        y = 310 + 32 * row
        pen.line((30, y, page.width - 30, y), (120, 120, 120), 1)
        if row < int(own.integers(3, 12)):
            words = f"{_phrase(own, 3)}     {own.uniform(1, 900):.2f}"
            pen.text((36, y + 8), words, (10, 10, 10), ImageFont.load_default(15))
    return page


def chart(
    photo: Image.Image, template: np.random.Generator, own: np.random.Generator
) -> Image.Image:
    """One bar chart (axes, grid, title, colours) of different numbers."""
    page = Image.new("RGB", (PAGE * 4 // 3, PAGE), (255, 255, 255))
    pen = ImageDraw.Draw(page)
    pen.text((60, 12), _phrase(template, 4).title(), (0, 0, 0), ImageFont.load_default(22))
    bars, colour = int(template.integers(5, 12)), _colour(template)
    floor, left = PAGE - 50, 60
    for line in range(6):
        y = floor - line * 50
        pen.line((left, y, page.width - 20, y), (210, 210, 210), 1)
        pen.text((20, y - 8), str(line * 20), (60, 60, 60), ImageFont.load_default(13))
    step = (page.width - left - 30) / bars
    for bar in range(bars):
        x = left + 8 + bar * step
        pen.rectangle((x, floor - own.uniform(10, 250), x + 0.7 * step, floor), colour)
        pen.text((x, floor + 8), _phrase(template, 1)[:5], (60, 60, 60), ImageFont.load_default(12))
    return page


KINDS: dict[str, Maker] = {
    "logo": logo,
    "caption": caption,
    "interface": interface,
    "meme": meme,
    "texture": texture,
    "pattern": pattern,
    "form": form,
    "chart": chart,
}


def _mark(rng: np.random.Generator, side: int) -> Image.Image:
    """A small square of shapes and letters."""
    mark = Image.new("RGB", (side, side), _colour(rng))
    pen = ImageDraw.Draw(mark)
    for _ in range(5):
        x, y = rng.uniform(0, side, 2)
        reach = rng.uniform(0.1, 0.4) * side
        box = (x - reach, y - reach, x + reach, y + reach)
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)(box, _colour(rng), _colour(rng), 2)
    size = max(8, side // 3)
    pen.text((2, side // 3), _phrase(rng, 1)[:4], _colour(rng), ImageFont.load_default(size))
    return mark


def _place(
    page: tuple[int, int], inner: tuple[int, int], rng: np.random.Generator
) -> tuple[int, int]:
    return (
        int(rng.integers(0, page[0] - inner[0] + 1)),
        int(rng.integers(0, page[1] - inner[1] + 1)),
    )


def _phrase(rng: np.random.Generator, words: int) -> str:
    return " ".join(str(word) for word in rng.choice(WORDS, words))


def _colour(rng: np.random.Generator) -> Colour:
    return _rgb(rng.integers(0, 256, 3))


def _rgb(values: NDArray[np.integer]) -> Colour:
    return int(values[0]), int(values[1]), int(values[2])
