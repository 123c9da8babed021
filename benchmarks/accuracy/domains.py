"""Documents, charts, screenshots: how often strangers are called copies, and what copies are found.

    python benchmarks accuracy/domains PHOTOS --disc SET --name domains

For every kind of ``accuracy/kinds`` (drawn by code that neither training nor the shipped background
uses), with the thresholds alone (*before*) and with verdicts (*after*: images outside what the
normalizer knows are compared by their pixels):

- false copies among all pairs of 300 different images, by the symmetric score of ``dedup``;
- strangers called copy by ``search`` in a bank of these 300;
- copies found in that bank.

Then a phone folder of 1 000 photos, screenshots, documents and memes, 50 of them saved again; and
photos, a DISC-like set, whose figures must not change. Descriptors are kept under ``--cache``.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

import results
from accuracy import kinds
from accuracy.dataset import read_disc
from accuracy.kinds.copies import COPIES, Maker, resaved
from disc import CACHE
from photos import find_photos
from sscd_vec.bank.exact import ExactCopy, Pixels, compare, prepare
from sscd_vec.bank.judging import SECOND_LOOKS
from sscd_vec.encoder import Encoder
from sscd_vec.metrics import evaluate
from sscd_vec.normalize import Grade, Kind, Normalizer
from sscd_vec.predictions import Predictions

Float32 = NDArray[np.float32]
Flags = NDArray[np.bool_]
Draw = Callable[[int], Image.Image]
UNSEEN = ("music", "puzzles")  # kinds the shipped background does not have
PHONE = {"chats": 90, "dashboards": 40, "code": 40, "documents": 70, "invoices": 60,
         "receipts": 50, "memes": 60, "maps": 30, "QR codes": 20}  # fmt: skip
PHONE_PHOTOS, PHONE_COPIES = 490, 50


@dataclass(frozen=True)
class Ours:
    """The model under test, and where its descriptors are kept."""

    encoder: Encoder
    normalizer: Normalizer
    cache: Path

    def images(self, name: str, count: int, draw: Draw) -> "Described":
        """Describe images, or read what was described before."""
        file = self.cache / self.encoder.fingerprint[:16] / f"{name}-{count}.npy"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, self.encoder.encode(draw(row) for row in range(count)))
        z = self.normalizer.whiten(np.load(file))
        flags, shifts = self.normalizer.outside(z)
        return Described(z, self.normalizer.whitened_biases(z), shifts, flags, draw)


@dataclass(frozen=True)
class Described:
    """Images with all that verdicts need.

    Attributes:
        z: Whitened descriptors.
        biases: Of score normalization.
        shifts: What scores between two images outside are lowered by.
        outside: Which lie outside what the normalizer knows.
        draw: Makes an image again.
    """

    z: Float32
    biases: Float32
    shifts: Float32
    outside: Flags
    draw: Draw
    _pixels: dict[int, Pixels] = field(default_factory=dict)
    _compared: dict[tuple[int, int], ExactCopy] = field(default_factory=dict)

    def pixels(self, row: int) -> Pixels:
        """Pixels of one image, as they are compared."""
        if row not in self._pixels:
            self._pixels[row] = prepare(self.draw(row))
        return self._pixels[row]

    def compared(self, row: int, bank: "Described", other: int) -> ExactCopy:
        """What the exact-copy test says; two images of one folder are compared once."""
        if bank is not self:
            return compare(self.pixels(row), bank.pixels(other))
        pair = min(row, other), max(row, other)
        if pair not in self._compared:
            self._compared[pair] = compare(*map(self.pixels, pair))
        return self._compared[pair]

    def doubtful(self, others: "Described") -> Flags:
        """Which pairs lie outside, both of them."""
        both: Flags = self.outside[:, None] & others.outside[None]
        return both

    def directed_scores(self, bank: "Described") -> Float32:
        """Scores of a search."""
        scores: Float32 = self.z @ bank.z.T - self.biases[:, None]
        return scores

    def symmetric_scores(self) -> Float32:
        """Scores of all pairs; an image with itself scores nothing."""
        scores = self.z @ self.z.T - np.maximum(self.biases[:, None], self.biases[None])
        np.fill_diagonal(scores, -np.inf)
        return scores


def grades(
    rules: Normalizer, kind: Kind, queries: Described, bank: Described, scores: Float32
) -> list[dict[int, Grade]]:
    """For each query, the grades of all references that are not "no".

    Of the pairs in doubt, the best few of a query are compared by their pixels.
    """
    doubt, size = queries.doubtful(bank), len(bank.z)
    found = []
    for row in range(len(scores)):
        graded: dict[int, Grade] = {}
        looks = 0
        for other in np.argsort(-scores[row], kind="stable").tolist():
            judge = partial(rules.judge, float(scores[row, other]), size, kind)
            if judge().grade == "no":
                break
            proof = None
            if doubt[row, other] and looks < SECOND_LOOKS:
                proof, looks = queries.compared(row, bank, other).proof, looks + 1
            shift = float(queries.shifts[row])
            grade = judge(in_doubt=bool(doubt[row, other]), shift=shift, proof=proof).grade
            if grade != "no":
                graded[other] = grade
        found.append(graded)
    return found


def measure_kind(ours: Ours, kind: str, options: argparse.Namespace) -> dict[str, object]:
    """One row of the table."""
    draw = partial(kinds.draw, kind, seed=options.seed)
    count, strangers = options.images, options.strangers
    name = f"{kind}-{options.seed}".replace(" ", "_")
    bank = ours.images(name, count, draw)
    others = ours.images(f"{name}-strangers", strangers, lambda row: draw(count + row))
    rules, limit = ours.normalizer, ours.normalizer.threshold("search", count)
    scores = others.directed_scores(bank)
    called = grades(rules, "search", others, bank, scores)
    row: dict[str, object] = {
        "kind": kind,
        "outside": percent(bank.outside),
        **false_pairs(rules, bank),
        "strangers, before": percent((scores >= limit).any(axis=1)),
        "strangers": percent(["copy" in graded.values() for graded in called]),
    }
    for copy, maker in COPIES.items():
        chosen = np.linspace(0, count - 1, options.copies).astype(int).tolist()
        queries = ours.images(
            f"{name}-{copy}-{options.copies}", len(chosen), partial(copied, draw, maker, chosen)
        )
        scores = queries.directed_scores(bank)
        own = np.array([scores[place, source] for place, source in enumerate(chosen)])
        graded = grades(rules, "search", queries, bank, scores)
        known = [grade.get(source, "no") for grade, source in zip(graded, chosen, strict=True)]
        row[f"{copy}, before"] = percent(own >= limit)
        row[copy] = percent([grade == "copy" for grade in known])
        row[f"{copy}, unsure"] = percent([grade == "unsure" for grade in known])
    return row


def copied(draw: Draw, maker: Maker, chosen: Sequence[int], place: int) -> Image.Image:
    """A copy of the chosen image at this place, the same every time."""
    return maker(draw(chosen[place]), random.Random(f"{maker.__name__} {chosen[place]}"))


def false_pairs(rules: Normalizer, images: Described) -> dict[str, object]:
    """Share of all pairs called copies, before and after."""
    scores, count = images.symmetric_scores(), len(images.z)
    limit, pairs = rules.threshold("symmetric", count), count * (count - 1) / 2
    return {
        "false copies, before": round(100 * float((scores >= limit).sum()) / 2 / pairs, 2),
        "false copies": round(100 * len(copy_pairs(rules, images, scores)) / pairs, 4),
    }


def copy_pairs(rules: Normalizer, images: Described, scores: Float32) -> set[tuple[int, int]]:
    """All pairs that verdicts call copies."""
    graded = grades(rules, "symmetric", images, images, scores)
    return {
        (min(row, other), max(row, other))
        for row, found in enumerate(graded)
        for other, grade in found.items()
        if grade == "copy"
    }


def measure_phone(ours: Ours, options: argparse.Namespace) -> dict[str, object]:
    """Groups of copies in a mixed folder, before and after."""
    sources: list[Callable[[], Image.Image]] = [
        photo.image for photo in find_photos(options.photos)[:PHONE_PHOTOS]
    ]
    for kind, count in PHONE.items():
        sources += [partial(kinds.draw, kind, row, options.seed + 1) for row in range(count)]
    doubled = np.linspace(0, len(sources) - 1, PHONE_COPIES).astype(int).tolist()

    def draw(row: int) -> Image.Image:
        if row < len(sources):
            return sources[row]()
        return resaved(sources[doubled[row - len(sources)]](), random.Random(row))

    images = ours.images(f"phone-{options.seed}", len(sources) + PHONE_COPIES, draw)
    rules, scores = ours.normalizer, images.symmetric_scores()
    limit = rules.threshold("symmetric", len(images.z))
    true = {(source, len(sources) + place) for place, source in enumerate(doubled)}
    before = {(int(a), int(b)) for a, b in np.argwhere(scores >= limit) if a < b}
    after = copy_pairs(rules, images, scores)
    return {
        "images": len(images.z),
        "copies": PHONE_COPIES,
        **{f"{key}, before": value for key, value in groups(before, true).items()},
        **groups(after, true),
    }


def groups(pairs: set[tuple[int, int]], true: set[tuple[int, int]]) -> dict[str, int]:
    """What joining these pairs gives: false groups, images in the largest one, copies found."""
    parent: dict[int, int] = {}

    def root(row: int) -> int:
        while parent.setdefault(row, row) != row:
            row = parent[row]
        return row

    for a, b in sorted(pairs):
        parent[root(b)] = root(a)
    members: dict[int, set[int]] = {}
    for row in list(parent):
        members.setdefault(root(row), set()).add(row)
    false = [group for group in members.values() if tuple(sorted(group)) not in true]
    return {
        "false groups": len(false),
        "largest false group": max(map(len, false), default=0),
        "copies found": len(pairs & true),
    }


def measure_photos(ours: Ours, folder: Path) -> dict[str, object]:
    """A DISC-like set with all scores as they are, and with pairs in doubt lowered."""
    disc = read_disc(folder)

    def described(split: str, paths: Sequence[str]) -> Described:
        name = f"{folder.name}-{split}"
        return ours.images(name, len(paths), lambda row: Image.open(paths[row]).convert("RGB"))

    queries = described("queries", disc.queries.paths)
    references = described("references", disc.references.paths)
    plain = queries.directed_scores(references)
    doubt = queries.doubtful(references)
    limit = ours.normalizer.threshold("search", len(references.z))
    lowered = np.where(doubt, plain - queries.shifts[:, None], plain)
    copies = np.array(
        [[(q, r) in disc.matches for r in disc.references.ids] for q in disc.queries.ids]
    )
    figures: dict[str, object] = {
        "queries outside": percent(queries.outside),
        "references outside": percent(references.outside),
    }
    for name, scores, accepted in (
        (", before", plain, plain >= limit),
        ("", lowered, (plain >= limit) & ~doubt),
    ):
        best = np.argsort(-scores, axis=1)[:, :10]
        candidates = Predictions(
            np.repeat(disc.queries.ids, best.shape[1]).tolist(),
            [disc.references.ids[row] for row in best.ravel()],
            np.take_along_axis(scores, best, 1).ravel(),
        )
        figures[f"µAP{name}"] = round(100 * evaluate(candidates, disc.truth).micro_ap, 2)
        figures[f"recall{name}"] = round(
            100 * float((accepted & copies).sum()) / len(disc.matches), 2
        )
    return figures


def percent(flags: ArrayLike) -> float:
    """Share of what is true."""
    return round(100 * float(np.mean(np.asarray(flags))), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    encoder = Encoder.from_pretrained(options.model, backend=options.backend)
    ours = Ours(encoder, Normalizer.from_pretrained(options.model), options.cache)
    rows = []
    for kind in options.kinds:
        rows.append(measure_kind(ours, kind, options))
        print(rows[-1], flush=True)
    figures: dict[str, object] = {"kinds": rows, "unseen by the background": list(UNSEEN)}
    if options.photos:
        figures["phone folder"] = measure_phone(ours, options)
        print(figures["phone folder"], flush=True)
    if options.disc:
        figures["photos"] = measure_photos(ours, options.disc)
        print(figures["photos"], flush=True)
    if options.name:
        print(results.write(options.name, figures))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("photos", nargs="*", type=Path, help="of the phone folder; without them there is none")
    add("--model", help="name or folder; the shipped one by default")
    add("--backend", default="torch", choices=["torch", "openvino", "onnx"])
    add("--kinds", nargs="+", default=list(kinds.KINDS), choices=list(kinds.KINDS))
    add("--images", type=int, default=300, help="of each kind")
    add("--strangers", type=int, default=100, help="more of each kind, that search the first")
    add("--copies", type=int, default=30, help="of each kind and edit")
    add("--seed", type=int, default=0)
    add("--disc", type=Path, help="a DISC-like set")
    add("--cache", type=Path, default=CACHE / "domains", help="folder for descriptors")
    add("--name", help="write the figures to benchmarks/results/NAME.json")
    return parser


if __name__ == "__main__":
    main()
