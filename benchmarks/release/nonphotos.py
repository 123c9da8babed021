"""Images that are not photos, by kind and seed: what the shipped background knows of them.

    python benchmarks release/nonphotos OUT --count 4        # look at some of each kind

``draw(kind, number, seed)`` is one image; the same arguments give the same pixels where the same
fonts are installed. Every ``PER_STYLE`` numbers share a style: the layout of one company's
invoices, one phone's chats. The benchmark of the domains draws its images with other code, other
layouts, fonts and seeds (``accuracy/kinds``).
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from numpy.random import Generator, SeedSequence, default_rng
from PIL import Image

from release import charts, graphics, paper, screens
from release.sheet import Style

Drawer = Callable[[Style, Generator], Image.Image]
PER_STYLE = 2
# How often a kind is light on dark; paper never is.
DARK = {"code": 0.6, "chat": 0.3, "dashboard": 0.35, "slide": 0.25, "listing": 0.35, "post": 0.3}
DARK |= dict.fromkeys(
    ("website", "words", "bars", "lines", "scatter", "pie", "drawing", "emblem"), 0.15
)
KINDS: dict[str, Drawer] = {
    "page": paper.page,
    "scan": paper.scan,
    "letter": paper.letter,
    "invoice": paper.invoice,
    "receipt": paper.receipt,
    "form": paper.form,
    "spreadsheet": paper.spreadsheet,
    "slide": paper.slide,
    "note": paper.note,
    "ticket": paper.ticket,
    "chat": screens.chat,
    "code": screens.code,
    "terminal": screens.terminal,
    "dashboard": screens.dashboard,
    "website": screens.website,
    "listing": screens.listing,
    "home": screens.home,
    "post": screens.post,
    "bars": charts.bars,
    "lines": charts.lines,
    "scatter": charts.scatter,
    "histogram": charts.histogram,
    "pie": charts.pie,
    "words": graphics.words,
    "qr": graphics.qr,
    "map": graphics.map_,
    "drawing": graphics.drawing,
    "emblem": graphics.emblem,
    "meme": graphics.meme,
    "diagram": graphics.diagram,
    "calendar": graphics.calendar,
    "pattern": graphics.pattern,
}


def draw(kind: str, number: int, seed: int = 0) -> Image.Image:
    """One image.

    Args:
        kind: A name of ``KINDS``.
        number: Which image of the kind.
        seed: Of the whole collection.
    """
    place = sorted(KINDS).index(kind)
    look = default_rng(SeedSequence((seed, place, number // PER_STYLE)))
    style = Style.draw(look, DARK.get(kind, 0.0))
    return KINDS[kind](style, default_rng(SeedSequence((seed, place, number, 1))))


def draw_all(count: int, seed: int = 0) -> Iterator[Image.Image]:
    """``count`` images of every kind, kind by kind."""
    for kind in KINDS:
        for number in range(count):
            yield draw(kind, number, seed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write some images of each kind into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=4, help="images of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        for number in range(options.count):
            draw(kind, number, options.seed).save(options.out / f"{kind}-{number}.png")
    print(f"{options.out}: {options.count} images of each of {len(KINDS)} kinds")


if __name__ == "__main__":
    main()
