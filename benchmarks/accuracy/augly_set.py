"""Make a set whose edits another library chose: AugLy (Papakipos & Bitton 2022).

    python -m venv augly && augly/bin/pip install augly==1.0.0 "Pillow<10" "numpy<1.24"
    augly/bin/python benchmarks/accuracy/augly_set.py SET OTHERS OUT

AugLy needs an old Pillow, so this script runs in an environment of its own and imports nothing of
this project. ``SET`` is made by ``make_wild.py``; ``OUT`` has the same references and training
split. Every query has one edit at a strength as in shared images; ``OTHERS``, a folder or a list of
images, gives the sources of queries without a match and images to compose with.
"""

import argparse
import csv
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import augly.image as augly
import numpy as np
from PIL import Image

BACKGROUNDS = 400
Other = Callable[[], Image.Image]


def edits(
    image: Image.Image, rng: random.Random, other: Other
) -> Mapping[str, Callable[[], Image.Image]]:
    """AugLy's image functions with strengths drawn for one image, by name."""
    side, pick = min(image.size), rng.uniform
    return {
        "blur": lambda: augly.blur(image, radius=pick(0.01, 0.025) * side),
        "brightness": lambda: augly.brightness(
            image, factor=rng.choice([pick(0.3, 0.6), pick(1.5, 2.5)])
        ),
        "change_aspect_ratio": lambda: augly.change_aspect_ratio(
            image, ratio=rng.choice([pick(0.45, 0.7), pick(1.4, 2.2)])
        ),
        "color_jitter": lambda: augly.color_jitter(
            image,
            brightness_factor=pick(0.5, 1.6),
            contrast_factor=pick(0.4, 2),
            saturation_factor=pick(0, 3),
        ),
        "contrast": lambda: augly.contrast(
            image, factor=rng.choice([pick(0.3, 0.6), pick(1.6, 3)])
        ),
        "crop": lambda: _cropped(image, rng),
        "encoding_quality": lambda: augly.encoding_quality(image, quality=rng.randint(2, 15)),
        "grayscale": lambda: augly.grayscale(image),
        "hflip": lambda: augly.hflip(image),
        "vflip": lambda: augly.vflip(image),
        "masked_composite": lambda: augly.masked_composite(
            image,
            transform_function=augly.transforms.Blur(radius=0.04 * side),
            mask=_mask(image, rng),
        ),
        "meme_format": lambda: augly.meme_format(
            image, text=_words(rng), caption_height=rng.randint(60, 160)
        ),
        "opacity": lambda: augly.opacity(image, level=pick(0.3, 0.7)),
        "overlay_emoji": lambda: augly.overlay_emoji(
            image, opacity=1.0, emoji_size=pick(0.25, 0.6), x_pos=pick(0, 0.6), y_pos=pick(0, 0.6)
        ),
        "overlay_image": lambda: augly.overlay_image(
            image,
            other(),
            opacity=pick(0.8, 1),
            overlay_size=pick(0.3, 0.6),
            x_pos=pick(0, 0.5),
            y_pos=pick(0, 0.5),
        ),
        "overlay_onto_background_image": lambda: _on_background(image, rng, other),
        "overlay_onto_screenshot": lambda: augly.overlay_onto_screenshot(
            image, crop_src_to_fit=rng.random() < 0.5
        ),
        "overlay_stripes": lambda: augly.overlay_stripes(
            image,
            line_width=pick(0.2, 0.5),
            line_angle=pick(0, 90),
            line_density=pick(0.3, 0.8),
            line_opacity=pick(0.6, 1),
        ),
        "overlay_text": lambda: augly.overlay_text(
            image,
            text=[rng.sample(range(1, 60), 8) for _ in range(2)],
            font_size=pick(0.1, 0.2),
            color=tuple(rng.randint(0, 255) for _ in range(3)),
            x_pos=pick(0, 0.3),
            y_pos=pick(0, 0.7),
        ),
        "pad": lambda: augly.pad(
            image,
            w_factor=pick(0.1, 0.5),
            h_factor=pick(0.1, 0.5),
            color=tuple(rng.randint(0, 255) for _ in range(3)),
        ),
        "pad_square": lambda: augly.pad_square(
            augly.change_aspect_ratio(image, ratio=rng.choice([0.5, 2.0]))
        ),
        "perspective_transform": lambda: augly.perspective_transform(
            image, sigma=pick(20, 60), seed=rng.randint(0, 10**6)
        ),
        "pixelization": lambda: augly.pixelization(image, ratio=pick(0.08, 0.2)),
        "random_noise": lambda: augly.random_noise(
            image, var=pick(0.02, 0.12), seed=rng.randint(0, 10**6)
        ),
        "rotate": lambda: augly.rotate(image, degrees=rng.choice([90, 180, 270, pick(10, 60)])),
        "saturation": lambda: augly.saturation(
            image, factor=rng.choice([pick(0, 0.3), pick(2.5, 5)])
        ),
        "scale": lambda: augly.scale(image, factor=pick(0.12, 0.3)),
        "sharpen": lambda: augly.sharpen(image, factor=pick(8, 30)),
        "shuffle_pixels": lambda: augly.shuffle_pixels(
            image, factor=pick(0.1, 0.35), seed=rng.randint(0, 10**6)
        ),
        "skew": lambda: augly.skew(image, skew_factor=pick(0.2, 0.6), axis=rng.randint(0, 1)),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path)
    parser.add_argument("others", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--matched", type=int, default=40, help="queries with a match, per edit")
    parser.add_argument("--unmatched", type=int, default=25, help="queries without, per edit")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    (options.out / "queries").mkdir(parents=True)
    for split in ("references", "training"):
        (options.out / split).symlink_to((options.set / split).resolve())
    references = sorted((options.set / "references").glob("*.jpg"))
    others = _others(options.others, references)
    random.Random(options.seed).shuffle(others)
    backgrounds, strangers = others[:BACKGROUNDS], others[BACKGROUNDS:]
    names = list(edits(Image.new("RGB", (64, 64)), random.Random(0), Image.Image))
    # From the end, so that other images are copied than in SET.
    copied = references[::-1]
    rows = [["query_id", "reference_id"]]
    records: list[dict[str, object]] = []
    for place, name in enumerate(names):
        for turn in range(options.matched + options.unmatched):
            query, is_copy = f"Q{len(records):05d}", turn < options.matched
            source = (
                copied[place * options.matched + turn]
                if is_copy
                else strangers[place * options.unmatched + turn - options.matched]
            )
            rng = random.Random(f"{options.seed} {query}")
            random.seed(f"{options.seed} {query}")
            np.random.seed(rng.randrange(2**32))  # noqa: NPY002  (AugLy draws from it)
            _edited(source, name, rng, backgrounds).save(
                options.out / "queries" / f"{query}.jpg", quality=rng.randint(60, 95)
            )
            rows.append([query, source.stem if is_copy else ""])
            records.append({"query_id": query, "family": name, "edits": [{"name": name}]})
    with (options.out / "dev_queries_groundtruth.csv").open("w", newline="") as table:
        csv.writer(table, lineterminator="\n").writerows(rows)
    (options.out / "query_edits.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )


def _edited(
    source: Path, name: str, rng: random.Random, backgrounds: Sequence[Path]
) -> Image.Image:
    image = Image.open(source).convert("RGB")

    def other() -> Image.Image:
        return Image.open(rng.choice(backgrounds)).convert("RGB")

    return edits(image, rng, other)[name]().convert("RGB")


def _others(place: Path, references: Sequence[Path]) -> list[Path]:
    """Images of a folder or a list that are none of the references."""
    paths = (
        sorted(place.glob("*.jpg"))
        if place.is_dir()
        else [Path(line) for line in place.read_text().split()]
    )
    known = {hashlib.sha256(path.read_bytes()).digest() for path in references}
    return [path for path in paths if hashlib.sha256(path.read_bytes()).digest() not in known]


def _on_background(image: Image.Image, rng: random.Random, other: Other) -> Image.Image:
    part = rng.uniform(0.45, 0.8)
    laid: Image.Image = augly.overlay_onto_background_image(
        image,
        other(),
        opacity=1.0,
        overlay_size=part,
        x_pos=rng.uniform(0, 1 - part),
        y_pos=rng.uniform(0, 1 - part),
    )
    return laid


def _cropped(image: Image.Image, rng: random.Random) -> Image.Image:
    part = rng.uniform(0.45, 0.8)
    x, y = rng.uniform(0, 1 - part), rng.uniform(0, 1 - part)
    kept: Image.Image = augly.crop(image, x1=x, y1=y, x2=x + part, y2=y + part)
    return kept


def _mask(image: Image.Image, rng: random.Random) -> Image.Image:
    mask = Image.new("L", image.size)
    side = rng.uniform(0.4, 0.7)
    box = [round(v) for v in (image.width * (1 - side) / 2, image.height * (1 - side) / 2)]
    mask.paste(255, (box[0], box[1], image.width - box[0], image.height - box[1]))
    return mask


def _words(rng: random.Random) -> str:
    return " ".join(
        "".join(rng.choice("abcdefghiklmnoprstuv") for _ in range(rng.randint(2, 8)))
        for _ in range(4)
    )


if __name__ == "__main__":
    main()
