"""A contact sheet: queries beside the references they are copies of, with their edits named."""

import csv
import json
import os
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

CELL, LABEL, COLUMNS, ROWS = 176, 30, 4, 8


def write(folder: Path, path: Path, first: int = 0) -> None:
    """Show the first queries with a match and some without, each pair as reference and query.

    Args:
        folder: A set made by ``make_disc_like.py``.
        path: The PNG to write.
        first: Matched queries to leave out before the first one shown.
    """
    with (folder / "dev_queries_groundtruth.csv").open() as file:
        truth = [(row["query_id"], row["reference_id"]) for row in csv.DictReader(file)]
    records = {}
    for line in (folder / "query_edits.jsonl").read_text().splitlines():
        record = json.loads(line)
        records[record["query_id"]] = " ".join(edit["name"] for edit in record["edits"])
    matched = [pair for pair in truth if pair[1]][first : first + COLUMNS * (ROWS - 1)]
    unmatched = [pair for pair in truth if not pair[1]][:COLUMNS]
    sheet = Image.new("RGB", (COLUMNS * 2 * CELL, ROWS * (CELL + LABEL)), "white")
    pen = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(11)
    for place, (query, reference) in enumerate(matched + unmatched):
        x, y = place % COLUMNS * 2 * CELL, place // COLUMNS * (CELL + LABEL)
        if reference:
            _paste(sheet, folder / "references" / f"{reference}.jpg", (x, y))
        else:
            pen.text((x + 50, y + 80), "no match", "gray", font)
        _paste(sheet, folder / "queries" / f"{query}.jpg", (x + CELL, y))
        pen.text((x + 4, y + CELL + 2), f"{query} {reference}", "black", font)
        pen.text((x + 4, y + CELL + 15), records[query][:60], "gray", font)
    partial = path.with_name(path.name + ".tmp")
    sheet.save(partial, "PNG")
    os.replace(partial, path)


def _paste(sheet: Image.Image, path: Path, place: tuple[int, int]) -> None:
    with Image.open(path) as image:
        small = ImageOps.contain(image.convert("RGB"), (CELL - 6, CELL - 6))
    x, y = place
    sheet.paste(small, (x + (CELL - small.width) // 2, y + (CELL - small.height) // 2))
