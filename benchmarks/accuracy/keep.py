"""Of an image and its copies, how often is the original kept?

Originals are photos: every second one as its file is, the others cut to another shape, made smaller
and saved as a camera would, at quality 80 to 95. Copies are made by twelve edits, alone, two after
the other (each saved), and all twelve of one photo in one folder. No file has EXIF, and names and
times are random: only what the images show can decide.

    python benchmarks accuracy/keep PHOTOS --groups 300
"""

import argparse
import io
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

import results
from sscd_vec.bank.lineage import Choice, choose_original
from sscd_vec.bank.quality import inspect_image
from sscd_vec.files import find_images

Edit = Callable[[Image.Image, np.random.Generator], Image.Image]
FOLDERS = 6  # one photo in so many also gets a folder with all twelve edits
SHAPES = (1.0, 4 / 3, 3 / 2, 16 / 9, 3 / 4, 2 / 3)
YEAR = 365 * 86_400
WORDS = "when you finally find the one photo that nobody has posted yet today".split()


def crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Keep 50 to 90 % of the area."""
    part = rng.uniform(0.5, 0.9) ** 0.5
    wide, high = round(image.width * part), round(image.height * part)
    left, top = rng.integers(image.width - wide + 1), rng.integers(image.height - high + 1)
    return image.crop((int(left), int(top), int(left) + wide, int(top) + high))


def half_size(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Half as wide and high."""
    return scaled(image, 0.5, Image.Resampling.LANCZOS)


def upscaled(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Twice as wide and high, by one of three filters."""
    filters = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS
    return scaled(image, 2, filters[int(rng.integers(3))])


def meme_bar(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A bar above, white or black, with a line or two of text."""
    white = rng.random() < 0.7
    bar = round(image.height * rng.uniform(0.15, 0.3))
    made = Image.new("RGB", (image.width, image.height + bar), "white" if white else "black")
    made.paste(image, (0, bar))
    pen = ImageDraw.Draw(made)
    font = ImageFont.load_default(bar * 0.3)
    for line in range(2):
        text = " ".join(rng.choice(WORDS, 4))
        pen.text((4, bar * (0.1 + 0.42 * line)), text, "black" if white else "white", font)
    return made


def screenshot_bars(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """As a phone shows it: a bar with a clock above, one with signs below."""
    ground = (18, 18, 18) if rng.random() < 0.5 else (250, 250, 250)
    ink = (230, 230, 230) if ground[0] < 100 else (30, 30, 30)
    top, bottom = (round(image.height * rng.uniform(0.08, 0.25)) for _ in range(2))
    made = Image.new("RGB", (image.width, image.height + top + bottom), ground)
    made.paste(image, (0, top))
    pen = ImageDraw.Draw(made)
    font = ImageFont.load_default(max(8, top * 0.3))
    pen.text((4, top * 0.2), f"{rng.integers(24):02}:{rng.integers(60):02}", ink, font)
    pen.rectangle((image.width - 24, top * 0.3, image.width - 8, top * 0.6), ink)
    for sign in range(3):
        x, y, r = image.width * (0.25 + 0.25 * sign), made.height - bottom / 2, bottom / 6
        pen.ellipse((x - r, y - r, x + r, y + r), ink)
    return made


def border(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A frame of one colour, 3 to 12 % of the short side."""
    colour = tuple(int(part) for part in rng.integers(0, 256, 3))
    if rng.random() < 0.6:
        colour = (255, 255, 255) if rng.random() < 0.5 else (0, 0, 0)
    return ImageOps.expand(image, round(min(image.size) * rng.uniform(0.03, 0.12)), colour)


def caption(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A line of text across the image."""
    made = image.copy()
    font = ImageFont.load_default(image.width * rng.uniform(0.07, 0.13))
    place = image.width * 0.05, image.height * rng.uniform(0.05, 0.8)
    text = " ".join(rng.choice(WORDS, int(rng.integers(2, 5))))
    outline = int(rng.random() < 0.7)
    ImageDraw.Draw(made).text(
        place, text, (255, 255, 255), font, stroke_width=outline, stroke_fill=0
    )
    return made


def mirrored(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Left to right."""
    return ImageOps.mirror(image)


def rotated(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """By one, two or three quarters."""
    turns = Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180, Image.Transpose.ROTATE_270
    return image.transpose(turns[int(rng.integers(3))])


def grayscale(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Without colour, saved in three channels or in one."""
    grey = ImageOps.grayscale(image)
    return grey.convert("RGB") if rng.random() < 0.5 else grey


def unchanged(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Only saved again."""
    return image


def scaled(image: Image.Image, factor: float, resampling: Image.Resampling) -> Image.Image:
    """Both sides times ``factor``."""
    return image.resize((round(image.width * factor), round(image.height * factor)), resampling)


# What is done, and the JPEG qualities it is saved at afterwards.
EDITS: dict[str, tuple[Edit, tuple[int, int]]] = {
    "meme bar above": (meme_bar, (75, 95)),
    "screenshot bars": (screenshot_bars, (75, 95)),
    "caption on it": (caption, (75, 95)),
    "resaved at 85-95": (unchanged, (85, 95)),
    "border": (border, (75, 95)),
    "rotated": (rotated, (75, 95)),
    "grayscale": (grayscale, (75, 95)),
    "mirrored": (mirrored, (75, 95)),
    "upscaled twice": (upscaled, (75, 95)),
    "resaved at 30-65": (unchanged, (30, 65)),
    "crop": (crop, (75, 95)),
    "half size": (half_size, (75, 95)),
}


def original_of(photo: Path, rng: np.random.Generator, fresh: bool) -> bytes:
    """A photo's file, or the photo in another shape and size, saved once."""
    if not fresh:
        return photo.read_bytes()
    with Image.open(photo) as opened:
        image = opened.convert("RGB")
    shape = float(rng.choice(SHAPES))
    wide, high = (image.width, image.width / shape) if shape > 1 else (image.height * shape, 0)
    image = ImageOps.fit(image, (round(wide), round(high or image.height)))
    image = scaled(image, rng.uniform(0.75, 0.95), Image.Resampling.LANCZOS)
    return saved(image, int(rng.integers(80, 96)), rng)


def edited(data: bytes, name: str, rng: np.random.Generator) -> bytes:
    """A copy of an encoded image, saved again."""
    edit, (low, high) = EDITS[name]
    with Image.open(io.BytesIO(data)) as image:
        made = edit(image.convert("RGB"), rng)
    return saved(made, int(rng.integers(low, high + 1)), rng)


def saved(image: Image.Image, quality: int, rng: np.random.Generator) -> bytes:
    """A JPEG, with or without full colour resolution."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=int(rng.choice([0, 2])))
    return file.getvalue()


@dataclass(frozen=True)
class Outcome:
    """What was chosen in one group."""

    edit: str
    is_sure: bool
    is_right: bool
    seconds: float
    reason: str
    number: int


def groups_of(number: int, data: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """The groups made of one original: what they are called, and the copies."""
    rng = np.random.default_rng((19, number))
    names = list(EDITS)
    yield names[number % len(names)], [edited(data, names[number % len(names)], rng)]
    pairs = list(combinations(names, 2))
    order = pairs[number % len(pairs)]
    first, second = order if rng.random() < 0.5 else order[::-1]
    yield "two edits", [edited(edited(data, first, rng), second, rng)]
    if number % FOLDERS == 0:
        yield "all twelve in one folder", [edited(data, name, rng) for name in names]


def measure(
    folder: Path, number: int, name: str, original: bytes, copies: Sequence[bytes]
) -> Outcome:
    """Write the files under random names and times, and choose."""
    rng = np.random.default_rng((23, number, len(copies)))
    paths = []
    for position, data in enumerate([original, *copies]):
        path = folder / f"{rng.integers(10**9)}-{position}.jpg"
        path.write_bytes(data)
        when = 1.7e9 - rng.random() * 5 * YEAR
        os.utime(path, (when, when))
        paths.append(path)
    order = rng.permutation(len(paths))
    start = time.perf_counter()
    inspected = [inspect_image(find_images(paths[row])[0]) for row in order]
    choice: Choice = choose_original(inspected)
    seconds = time.perf_counter() - start
    for path in paths:
        path.unlink()
    return Outcome(
        name, choice.is_sure, int(order[choice.keep]) == 0, seconds, choice.reason, number
    )


def table(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Per edit: how often it decides, and how often it is right where it does."""
    kinds = Counter(outcome.edit for outcome in outcomes)
    rows = []
    for name in [*EDITS, "two edits", "all twelve in one folder", "all groups"]:
        of = [one for one in outcomes if name in (one.edit, "all groups")]
        sure = [one for one in of if one.is_sure]
        if not of:
            continue
        rows.append(
            {
                "edit": name,
                "groups": kinds.get(name, len(of)),
                "decided_percent": round(100 * len(sure) / len(of), 1),
                "right_percent_of_decided": round(
                    100 * sum(one.is_right for one in sure) / max(1, len(sure)), 1
                ),
                "seconds_per_group": round(float(np.median([one.seconds for one in of])), 2),
            }
        )
    return rows


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("photos", type=Path, help="a folder or a list of photos")
    parser.add_argument("--groups", type=int, default=300, help="photos to use")
    parser.add_argument("--seed", type=int, default=0, help="which photos")
    parser.add_argument("--wrong", action="store_true", help="name the wrong and the undecided")
    parser.add_argument("--record", action="store_true", help="write the figures to results/")
    options = parser.parse_args()
    photos = [file.path for file in find_images(options.photos)]
    chosen = np.random.default_rng(options.seed).permutation(len(photos))[: options.groups]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, row in enumerate(chosen.tolist()):
            rng = np.random.default_rng((29, number))
            original = original_of(photos[row], rng, fresh=number // len(EDITS) % 2 == 1)
            for name, copies in groups_of(number, original):
                outcomes.append(measure(Path(folder), number, name, original, copies))
                last = outcomes[-1]
                if options.wrong and not (last.is_sure and last.is_right):
                    verdict = "unsure" if not last.is_sure else "WRONG"
                    print(verdict, number, photos[row].name, name, last.reason, flush=True)
    rows = table(outcomes)
    for line in rows:
        print(*line.values(), sep="\t")
    if options.record:
        print(results.write("keep", rows))


if __name__ == "__main__":
    main()
