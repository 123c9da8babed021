"""What every drawn image starts from: a style (fonts, script, colours) and a sheet to draw on.

Fonts come from matplotlib and, where installed, from the assets of ``augly`` and ``mplfonts``
(``pip install --no-deps augly mplfonts``: hundreds of faces and most scripts). Only their font
files are used. Without them a few faces and scripts remain, and the images vary less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
WHITE, BLACK, GREY = (255, 255, 255), (20, 20, 20), (128, 128, 128)

FONT_PLACES = (
    ("matplotlib", "mpl-data/fonts/ttf"),
    ("augly", "assets/fonts"),
    ("mplfonts", "fonts"),
)
FACES = {
    "sans": ("DejaVuSans", "OpenSans-Regular", "SourceSansPro-Regular", "Ubuntu-R"),
    "bold": ("DejaVuSans-Bold", "OpenSans-Bold", "SourceSansPro-Bold", "Montserrat-Bold"),
    "serif": ("DejaVuSerif", "STIXGeneral", "PlayfairDisplay-Regular", "Elsie-Regular"),
    "mono": ("DejaVuSansMono", "DejaVuSansMono-Bold", "NotoSansMono-Regular"),
    "hand": ("DancingScript-Regular", "KaushanScript-Regular", "Pacifico", "Allura-Regular"),
    "heavy": ("Impact", "Montserrat-Black", "Chunkfive", "DejaVuSans-Bold"),
}  # fmt: skip
LATIN = (
    "account after again agreement amount annual before between board branch budget business call "
    "change city claim clear client company contract copy cost country credit current daily data "
    "date delivery detail early east effect energy every figure final first follow garden general "
    "give group growth half house however income increase interest issue item journey keep later "
    "letter level light local machine made market member method month more morning never new north "
    "note number offer office only open order other paper part payment people period place plan "
    "point price product project public quarter question rate reach receive record region report "
    "result return right river room sale second section service seven share ship side small south "
    "staff state station still street summer supply system table tax team term that the their then "
    "this three through time total town trade train transport under until user value volume wait "
    "water week west which with work year und der die nicht für über Straße Rechnung Lieferung "
    "Betrag Monat le les une avec pour société facture montant été où déjà à del para los factura "
    "año número señor più perché quanto città ve bir için çok güzel"
).split()
# Letters words are made of, and faces that have them.
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cyrillic": ("абвгдежзийклмнопрстуфхцчшщыьэюя", ("DejaVuSans", "OpenSans-Regular")),
    "greek": ("αβγδεζηθικλμνξοπρστυφχψωάέήίόύώ", ("DejaVuSerif", "DejaVuSans")),
    "arabic": ("ابتثجحخدذرزسشصضطظعغفقكلمنهوي", ("NotoSansArabic-Regular", "DejaVuSans")),
    "hebrew": ("אבגדהוזחטיכלמנסעפצקרשת", ("NotoSansHebrew-Regular", "DejaVuSans")),
    "devanagari": ("अआइईउएकखगघचजटडतथदनपबभमयरलवशसह", ("NotoSansDevanagari-Regular",)),
    "thai": ("กขคงจชซญดตถทนบปผพมยรลวสหอ", ("NotoSansThai-Regular",)),
    "han": (
        "".join(map(chr, range(0x4E00, 0x5E00, 7))),
        ("NotoSansCJKsc-Regular", "SourceHanSerifSC-Regular"),
    ),
    "kana": ("あいうえおかきくけこさしすせそたちつカキクケコサシ", ("NotoSansCJKsc-Regular",)),
    "hangul": ("".join(map(chr, range(0xAC00, 0xD000, 37))), ("NotoSansCJKsc-Regular",)),
}  # fmt: skip


@cache
def font_files() -> dict[str, Path]:
    """Installed font files by the name of their face."""
    found: dict[str, Path] = {}
    for package, folder in FONT_PLACES:
        spec = find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(place, folder).glob("*.[to]tf")):
                found.setdefault(file.stem, file)
    return found


@cache
def load_font(face: str, size: int) -> Font:
    """A face at a size in pixels; Pillow's own where the face is not installed."""
    file = font_files().get(face)
    return ImageFont.truetype(file, size) if file else ImageFont.load_default(size)


@dataclass(frozen=True)
class Style:
    """How images of one origin look: one company's invoices, one phone's chats.

    Attributes:
        rng: Draws everything that belongs to the style; spent when the layout is decided.
        ground: Colour of the paper or screen.
        ink: Colour of text on it.
        accent: A second colour.
        script: ``latin`` or a name of ``SCRIPTS``.
        faces: Face for each role of ``FACES``.
        letters: Face that has the letters of the script; the role decides for latin.
    """

    rng: Generator
    ground: Colour
    ink: Colour
    accent: Colour
    script: str
    faces: dict[str, str]
    letters: str | None = None

    @classmethod
    def draw(cls, rng: Generator, dark: float = 0.0, latin: float = 0.6) -> "Style":
        """A random style, dark with the given probability."""
        ground, ink = paper_and_ink(rng, bool(rng.random() < dark))
        names = [name for name, (_, faces) in SCRIPTS.items() if set(faces) & set(font_files())]
        script = "latin" if rng.random() < latin or not names else str(rng.choice(names))
        faces = {role: str(rng.choice(options)) for role, options in FACES.items()}
        known = (
            [face for face in SCRIPTS[script][1] if face in font_files()]
            if script in SCRIPTS
            else []
        )
        letters = str(rng.choice(known)) if known else None
        return cls(rng, ground, ink, vivid(rng), script, faces, letters)

    def font(self, role: str, size: float, string: str = "") -> Font:
        """The face of a role; that of the script where the string is not plain ASCII."""
        face = self.faces[role] if self.letters is None or string.isascii() else self.letters
        return load_font(face, max(4, round(size)))

    def words(self, rng: Generator, count: int) -> str:
        """``count`` words of the style's script."""
        if self.script == "latin":
            return " ".join(rng.choice(LATIN, count))
        letters = SCRIPTS[self.script][0]
        spaced = self.script not in ("han", "kana", "thai")
        made = ["".join(rng.choice(list(letters), rng.integers(2, 9))) for _ in range(count)]
        return (" " if spaced else "").join(made)

    def title(self, rng: Generator, count: int = 3) -> str:
        """Words that begin with a capital letter."""
        return self.words(rng, count).title()


class Sheet:
    """An RGB image to draw on; lengths are pixels, sizes of text too."""

    def __init__(self, style: Style, width: int, height: int, ground: Colour | None = None) -> None:
        """A sheet in the style's ground, or another."""
        self.style = style
        self.width, self.height = width, height
        self.image = Image.new("RGB", (width, height), ground or style.ground)
        self.pen = ImageDraw.Draw(self.image)

    def text(
        self, x: float, y: float, string: str, size: float,
        role: str = "sans", fill: Colour | None = None, anchor: str = "la",
    ) -> float:  # fmt: skip
        """Write one line; returns its width."""
        face = self.style.font(role, size, string)
        self.pen.text((x, y), string, fill=fill or self.style.ink, font=face, anchor=anchor)
        return float(face.getlength(string))

    def paragraph(
        self, rng: Generator, box: Box, size: float,
        role: str = "sans", leading: float = 1.4, fill: Colour | None = None,
        justified: bool = False,
    ) -> float:  # fmt: skip
        """Fill a box with running text; returns where it ends."""
        left, top, right, bottom = box
        y = top
        while y + size <= bottom:
            last = y + size * (1 + leading) > bottom
            reach = (right - left) * (rng.uniform(0.3, 0.9) if last else 1)
            words, length = self._fitting(rng, role, size, reach)
            spare = (reach - length) / max(len(words) - 1, 1) if justified and not last else 0
            x = left
            for word in words:
                x += self.text(x, y, word, size, role, fill) + spare
            y += size * leading
        return y

    def _fitting(
        self, rng: Generator, role: str, size: float, reach: float
    ) -> tuple[list[str], float]:
        """Words of one line, and how long they are together."""
        words: list[str] = []
        length = 0.0
        while True:
            word = self.style.words(rng, 1) + " "
            more = float(self.style.font(role, size, word).getlength(word))
            if length + more > reach:
                return words, length
            words.append(word)
            length += more

    def box(
        self, box: Box, fill: Colour | None = None,
        edge: Colour | None = None, radius: float = 0, width: int = 1,
    ) -> None:  # fmt: skip
        """A rectangle, with round corners if asked for."""
        left, top, right, bottom = box
        if right - left >= 1 and bottom - top >= 1:
            reach = min(radius, (right - left) / 2, (bottom - top) / 2)
            self.pen.rounded_rectangle(box, reach, fill, edge, width)

    def line(self, points: Sequence[tuple[float, float]], fill: Colour, width: float = 1) -> None:
        """A line through points."""
        self.pen.line(list(points), fill=fill, width=max(1, round(width)), joint="curve")

    def dot(
        self, x: float, y: float, radius: float, fill: Colour | None, edge: Colour | None = None
    ) -> None:
        """A disc."""
        self.pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill, edge)


def paper_and_ink(rng: Generator, dark: bool) -> tuple[Colour, Colour]:
    """A light ground with dark text, or the other way round."""
    light, deep = rng.integers(236, 256), rng.integers(10, 60)
    tint = rng.integers(-8, 9, 3) * (rng.random() < 0.5)
    pale = as_colour(np.minimum(light + tint, 255))
    if rng.random() < 0.4:
        pale = WHITE
    strong = as_colour(deep + rng.integers(0, 25, 3))
    return (strong, pale) if dark else (pale, strong)


def vivid(rng: Generator) -> Colour:
    """A saturated colour."""
    hue, low = rng.random() * 6, rng.uniform(0, 0.4)
    ramp = np.clip(np.abs((hue + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)
    return as_colour(255 * rng.uniform(0.5, 1) * (low + (1 - low) * ramp))


def mix(a: Colour, b: Colour, share: float) -> Colour:
    """A colour between two."""
    return as_colour(np.array(a) * (1 - share) + np.array(b) * share)


def as_colour(values: Sequence[float] | np.ndarray) -> Colour:
    """Three numbers as a colour."""
    red, green, blue = (int(value) for value in np.clip(values, 0, 255))
    return red, green, blue


def money(rng: Generator, most: float = 5000) -> str:
    """An amount."""
    return f"{rng.uniform(1, most):,.2f}"


def date(rng: Generator) -> str:
    """A day."""
    return f"{rng.integers(1, 29):02d}.{rng.integers(1, 13):02d}.20{rng.integers(10, 27)}"
