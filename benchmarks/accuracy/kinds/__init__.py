"""Test images that are not photos, by kind and number; the same seed gives the same images.

``draw("invoices", 7)`` is one image. Image ``n`` has look ``n % LOOKS``: 300 invoices are ten each
of thirty companies. The drawings share no code, faces, words or seeds with those of the shipped
background (``release/nonphotos.py``); ``puzzles`` and ``music`` are kinds it never saw.
"""

import random
from collections.abc import Callable

from PIL import Image

from accuracy.kinds import plotted, printed, shown
from accuracy.kinds.frame import Look

LOOKS = 30
Drawer = Callable[[Look, random.Random], Image.Image]
# The kind and how often it is light on dark.
KINDS: dict[str, tuple[Drawer, float]] = {
    "documents": (printed.document, 0.0),
    "scans": (printed.scanned, 0.0),
    "invoices": (printed.invoice, 0.0),
    "receipts": (printed.receipt, 0.0),
    "forms": (printed.form, 0.0),
    "spreadsheets": (printed.spreadsheet, 0.1),
    "slides": (shown.slide, 0.25),
    "code": (shown.code, 0.6),
    "chats": (shown.chat, 0.3),
    "dashboards": (shown.dashboard, 0.35),
    "bar charts": (plotted.bar_chart, 0.15),
    "line charts": (plotted.line_chart, 0.15),
    "scatter plots": (plotted.scatter_plot, 0.15),
    "pie charts": (plotted.pie_chart, 0.15),
    "histograms": (plotted.histogram, 0.15),
    "words": (plotted.word, 0.2),
    "QR codes": (plotted.qr_code, 0.0),
    "maps": (plotted.street_map, 0.0),
    "drawings": (plotted.drawing, 0.05),
    "logos": (plotted.logo, 0.1),
    "memes": (shown.meme, 0.0),
    "puzzles": (printed.puzzle, 0.0),
    "music": (printed.music, 0.0),
}


def draw(kind: str, number: int, seed: int = 0) -> Image.Image:
    """One image.

    Args:
        kind: A name of ``KINDS``.
        number: Which image of the kind; those that are equal modulo ``LOOKS`` look alike.
        seed: Of all of them.
    """
    drawer, night = KINDS[kind]
    dice = random.Random(f"look {seed} {kind} {number % LOOKS}")
    look = Look(dice, night=dice.random() < night)
    return drawer(look, random.Random(f"content {seed} {kind} {number}"))
