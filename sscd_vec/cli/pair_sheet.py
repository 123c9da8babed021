"""Pairs of images side by side in one PNG, each under a line of text."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont, ImageOps

from sscd_vec.encoder.images import load_pixels
from sscd_vec.files import writing

if TYPE_CHECKING:
    from sscd_vec.files import ImageFile

SIDE, TITLE, COLUMNS = 200, 20, 2


def draw(pairs: "Sequence[tuple[ImageFile, ImageFile]]", titles: Sequence[str], path: Path) -> None:
    """Draw pairs of images.

    Args:
        pairs: Image files.
        titles: A line of text for each pair.
        path: The PNG to write, whole or not at all.
    """
    rows = -(-len(pairs) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * 2 * SIDE, rows * (SIDE + TITLE)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (pair, title) in enumerate(zip(pairs, titles, strict=True)):
        x, y = number % COLUMNS * 2 * SIDE, number // COLUMNS * (SIDE + TITLE)
        pen.text((x + 4, y + 3), title, "black", font)
        for side, file in enumerate(pair):
            pixels = load_pixels(file, reduce_to=lambda height, width: (SIDE, SIDE))
            small = ImageOps.contain(Image.fromarray(pixels), (SIDE - 8, SIDE - 8))
            sheet.paste(small, (x + side * SIDE + 4, y + TITLE))
    with writing(path) as out:
        sheet.save(out, "PNG")
