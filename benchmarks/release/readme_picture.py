"""The README's picture, and what its first lines print.

    python benchmarks release/readme_picture

Draws an original, an edited copy, what matched, and the score, and runs the README's own code on
the same images. The original is matplotlib's sample portrait of Grace Hopper (James S. Davis, U.S.
Navy, public domain). The bank also holds drawn images, so that the match has rivals.
"""

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib.cbook
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageFont

from sscd_vec import Bank
from sscd_vec.cli.pictures import draw
from sscd_vec.encoder.heatmap import paint_heatmap

README = Path(__file__).parents[2] / "README.md"
TARGET = README.parent / "docs" / "images" / "copy.png"
PRINTED = re.compile(r"(```python\n(?P<code>.*?)```\n\n```text\n).*?(```\n)", re.DOTALL)
SHOWN = 3  # lines of output
HEIGHT, GAP, CAPTION = 360, 18, 44
INK, PAPER, FAINT = (27, 31, 36), (255, 255, 255), (102, 112, 128)
RIVALS = 200


def main() -> None:
    """Search for the edited copy and draw what was found."""
    portrait = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    original = Image.open(str(portrait)).convert("RGB")
    copy = edit(original)
    with Bank() as bank:
        rivals = [np.asarray(draw(seed)) for seed in range(RIVALS)]
        names = ["original.jpg", *(f"other-{seed}" for seed in range(RIVALS))]
        bank.add([np.asarray(original), *rivals], ids=names, show_progress=False)
        best, second = bank.search(copy, k=2)
        heat = bank.encoder.heatmap(np.asarray(copy), np.asarray(original))
    painted = paint_heatmap(np.asarray(copy), heat, top=float(heat.max()))
    verdict = "copy" if best.is_copy else "no copy"
    panels = [
        (original, "known: original.jpg"),
        (copy, "asked: upload.jpg"),
        (painted, "what matched"),
        (None, f"score {best.score:.2f}: {verdict}\nnext best {second.score:.2f}"),
    ]
    sheet(panels).save(TARGET, optimize=True)
    print(f"{TARGET.name}: {best.id} {best.score:.3f} ({verdict}), next best {second.score:.3f}")
    text = README.read_text()
    lines = run_block(
        text, {"original.jpg": original, **dict(zip(names[1:], rivals, strict=True))}, copy
    )
    README.write_text(PRINTED.sub(lambda match: f"{match[1]}{lines}{match[3]}", text, count=1))
    print(lines, end="")


def run_block(
    text: str, known: Mapping[str, Image.Image | NDArray[np.uint8]], upload: Image.Image
) -> str:
    """The first lines that the first Python block of a page prints, in a folder of these images."""
    block = PRINTED.search(text)
    assert block is not None, "the README has no Python block with its output below"
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        Path("photos").mkdir()
        for name, pixels in known.items():
            Image.fromarray(pixels).save(Path("photos", name).with_suffix(".jpg"), quality=95)
        upload.save("upload.jpg", quality=90)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block["code"], {})
        shown = printed.getvalue().replace(os.path.realpath(place), "/home/me")
    return "".join(line + "\n" for line in [*shown.splitlines()[:SHOWN], "..."])


def edit(image: Image.Image) -> Image.Image:
    """Crop, mirror, filter, caption and frame, as people do."""
    width, height = image.size
    cut = image.crop((round(0.1 * width), round(0.04 * height), width, round(0.72 * height)))
    cut = ImageEnhance.Color(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).enhance(0.2)
    cut = ImageEnhance.Contrast(cut.filter(ImageFilter.GaussianBlur(0.8))).enhance(1.25)
    tint = Image.new("RGB", cut.size, (150, 110, 60))
    cut = Image.blend(cut, tint, 0.25)
    framed = Image.new("RGB", (cut.width + 24, cut.height + 96), PAPER)
    framed.paste(cut, (12, 12))
    pen = ImageDraw.Draw(framed)
    font = ImageFont.load_default(46)
    pen.text((framed.width / 2, cut.height + 52), "ship it anyway", INK, font, "mm")
    return framed


def sheet(panels: list[tuple[Image.Image | None, str]]) -> Image.Image:
    """The panels side by side, each with its caption."""
    font, large = ImageFont.load_default(20), ImageFont.load_default(30)
    scaled = [
        None
        if image is None
        else image.resize((round(image.width * HEIGHT / image.height), HEIGHT))
        for image, _ in panels
    ]
    widths = [330 if image is None else image.width for image in scaled]
    page = Image.new("RGB", (sum(widths) + GAP * (len(widths) + 1), HEIGHT + CAPTION + GAP), PAPER)
    pen, left = ImageDraw.Draw(page), GAP
    for image, width, (_, text) in zip(scaled, widths, panels, strict=True):
        if image is None:
            pen.multiline_text((left + 8, HEIGHT / 2), text, INK, large, "lm", spacing=14)
        else:
            page.paste(image, (left, GAP))
            pen.text((left + width / 2, HEIGHT + GAP + CAPTION / 2), text, FAINT, font, "mm")
        left += width + GAP
    return page


if __name__ == "__main__":
    main()
