"""How test images are laid out: a frame is split into regions, each filled with text or shapes.

Nothing here is shared with ``release/sheet.py``, which draws the shipped background: other code,
other faces, other words, other ways to place things.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

Region = tuple[float, float, float, float]
Ink = tuple[int, int, int]

PACKAGES = ("augly/assets/fonts", "mplfonts/fonts", "matplotlib/mpl-data/fonts/ttf")
TEXT_FACES = ("IBMPlexSans-Text", "IBMPlexSerif-Text", "NotoSans-Regular", "NotoSerif-Regular",
              "Titillium-Regular", "IBMPlexSans-Light")  # fmt: skip
HEAD_FACES = ("IBMPlexSans-Bold", "IBMPlexSerif-Bold", "Titillium-Bold", "IBMPlexSans-SemiBold")
# Faces for plain letters only.
ROMAN_FACES = ("SolveigText", "Prata-Regular", "LeagueSpartan-Bold", "Quicksand-Bold", "cmr10")
FIXED_FACES = ("IBMPlexMono-Regular", "IBMPlexMono-Medium", "NotoMono-Regular", "cmtt10")
# Syllables of made-up words, and the faces that have them; {} stands for the text and head faces.
TONGUES: dict[str, tuple[str, tuple[str, ...]]] = {
    "roman": ("ba be bo ca ce co da de di fa fe ga go ha hi is jo ka la le li ma me mi na no "
              "pe po ra re ri sa se so ta te ti to ur va vi za ing ent ion ard est", ()),
    "nordic": ("bjør sk ång ær ø tra hav vei går för äl lös nät hus strö må", ()),
    "slavic": ("při ško ži čes ný ště ową łód rze czyn ský dů mě", ()),
    "russian": ("ка ро ста ни за по де ло ми тра ве щу бы го ши лё",
                ("IBMPlexSans-Text", "NotoSans-Regular")),
    "bengali": ("কা খি গু চে জো টা নী পু মে রো লা", ("NotoSansBengali-Regular",)),
    "tamil": ("கா சி டு தெ நோ பா மீ யு ரெ லோ", ("NotoSansTamil-Regular",)),
    "urdu": ("کا بی جو سے مر ند پا لی", ("NotoNaskhArabic-Regular",)),
    "georgian": ("ბა გე დო ვა ზი კა ლო მე ნუ რი", ("NotoSansGeorgian-Regular",)),
    "chinese": (" ".join(map(chr, range(0x5F00, 0x6F00, 11))), ("NotoSerifCJKsc-Regular",)),
}  # fmt: skip
ROMAN_SHARE = 6  # times as likely as any other tongue


@cache
def faces() -> dict[str, str]:
    """Font files by stem."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        name, _, folder = package.partition("/")
        spec = find_spec(name)  # imports nothing: only the files are of use
        if spec is None or not spec.submodule_search_locations:
            continue
        place = Path(spec.submodule_search_locations[0]) / folder
        found |= {file.stem: str(file) for file in place.glob("*.?tf") if file.stem not in found}
    return found


@cache
def face_at(stem: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """A face of ``size`` pixels; Pillow's own if it is not installed."""
    path = faces().get(stem)
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(path, size)


@dataclass
class Look:
    """The origin of some images: their faces, tongue and colours, and a dice for their layout."""

    dice: random.Random
    night: bool = False
    tongue: str = "roman"
    body: str = ""
    head: str = ""
    fixed: str = ""
    paper: Ink = (255, 255, 255)
    pen: Ink = (0, 0, 0)
    tints: list[Ink] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Roll whatever was not given."""
        known = [t for t, (_, own) in TONGUES.items() if not own or own[0] in faces()]
        weights = [ROMAN_SHARE if tongue == "roman" else 1 for tongue in known]
        self.tongue = self.dice.choices(known, weights)[0]
        own = TONGUES[self.tongue][1]
        if self.tongue == "roman" and self.dice.random() < 0.3:
            own = ROMAN_FACES
        self.body = self.dice.choice(own or TEXT_FACES)
        self.head = self.dice.choice(own or HEAD_FACES)
        self.fixed = self.dice.choice(FIXED_FACES)
        tone = self.dice.choice([255, 255, 252, 247, 240])
        self.paper = (tone, tone, tone - self.dice.choice([0, 0, 6, 18]))
        shade = self.dice.randrange(70)
        self.pen = (shade, shade, shade + self.dice.choice([0, 0, 30]))
        if self.night:
            self.paper, self.pen = (shade // 2 + 8, shade // 2 + 8, shade // 2 + 14), self.paper
        self.tints = [self._tint() for _ in range(8)]

    def _tint(self) -> Ink:
        parts = [
            self.dice.randrange(20, 110),
            self.dice.randrange(60, 200),
            self.dice.randrange(150, 256),
        ]
        self.dice.shuffle(parts)
        return parts[0], parts[1], parts[2]

    def word(self, dice: random.Random) -> str:
        """A word."""
        syllables = TONGUES[self.tongue][0].split()
        return "".join(dice.choices(syllables, k=dice.choice([1, 2, 2, 3, 3, 4])))

    def phrase(self, dice: random.Random, count: int) -> str:
        """Some words; the first with a capital."""
        gap = "" if self.tongue == "chinese" else " "
        return gap.join(self.word(dice) for _ in range(count)).capitalize()

    def tint(self, share: float, which: int = 0) -> Ink:
        """One of the colours, thinned with paper."""
        return blend(self.tints[which % 8], self.paper, share)


class Frame:
    """An image with a look, drawn region by region."""

    def __init__(self, look: Look, width: int, height: int, paper: Ink | None = None) -> None:
        """An empty frame."""
        self.look = look
        self.image = Image.new("RGB", (width, height), look.paper if paper is None else paper)
        self.draw = ImageDraw.Draw(self.image)

    @property
    def whole(self) -> Region:
        """The region that is everything."""
        return 0.0, 0.0, float(self.image.width), float(self.image.height)

    def fill(
        self, region: Region, ink: Ink | None, edge: Ink | None = None, round_by: float = 0.0
    ) -> None:
        """Colour a region."""
        x0, y0, x1, y1 = region
        if x1 > x0 + 1 and y1 > y0 + 1:
            most = min(x1 - x0, y1 - y0) / 2
            self.draw.rounded_rectangle(region, most * round_by, ink, edge)

    def label(
        self, region: Region, string: str, share: float = 0.7, ink: Ink | None = None,
        face: str | None = None, align: str = "left",
    ) -> None:  # fmt: skip
        """One line as tall as ``share`` of the region; smaller if it would not fit."""
        x0, y0, x1, y1 = region
        stem = face or self.look.body
        if string.isascii() and self.look.tongue not in ("roman", "nordic", "slavic", "russian"):
            stem = "NotoSans-Regular" if stem == self.look.body else stem
        size = max(5, round((y1 - y0) * share))
        length = face_at(stem, size).getlength(string)
        if length > x1 - x0:
            size = max(5, int(size * (x1 - x0) / length))
        at, anchor = {"left": (x0, "lm"), "right": (x1, "rm"), "middle": ((x0 + x1) / 2, "mm")}[
            align
        ]
        ink = ink or self.look.pen
        self.draw.text((at, (y0 + y1) / 2), string, ink, face_at(stem, size), anchor)

    def prose(
        self, region: Region, dice: random.Random, pitch: float,
        ink: Ink | None = None, face: str | None = None, count: int | None = None,
    ) -> float:  # fmt: skip
        """Lines of sentences, ``pitch`` pixels apart; returns where they end."""
        x0, y0, x1, y1 = region
        stem = face or self.look.body
        font = face_at(stem, max(5, round(pitch * 0.68)))
        most = int((y1 - y0) / pitch) if count is None else min(count, int((y1 - y0) / pitch))
        for line in range(most):
            reach = x1 - x0 if line < most - 1 else (x1 - x0) * dice.uniform(0.15, 1)
            string = ""
            while font.getlength(string) < reach:
                string += self.look.word(dice) + dice.choice([" "] * 8 + [", ", ". "])
            while string and font.getlength(string) > reach:
                string = string[:-1]
            self.draw.text(
                (x0, y0 + (line + 0.5) * pitch), string, ink or self.look.pen, font, "lm"
            )
        return y0 + most * pitch


def split(region: Region, weights: Sequence[float], down: bool = True) -> Iterator[Region]:
    """Cut a region into parts, from top to bottom or from left to right."""
    x0, y0, x1, y1 = region
    total, seen = sum(weights), 0.0
    for weight in weights:
        a, b = seen / total, (seen + weight) / total
        seen += weight
        if down:
            yield x0, y0 + a * (y1 - y0), x1, y0 + b * (y1 - y0)
        else:
            yield x0 + a * (x1 - x0), y0, x0 + b * (x1 - x0), y1


def inset(region: Region, x: float, y: float | None = None) -> Region:
    """A region without a margin of some pixels."""
    y = x if y is None else y
    return region[0] + x, region[1] + y, region[2] - x, region[3] - y


def blend(a: Ink, b: Ink, share: float) -> Ink:
    """``share`` of the second colour."""
    red, green, blue = (round(p * (1 - share) + q * share) for p, q in zip(a, b, strict=True))
    return red, green, blue
