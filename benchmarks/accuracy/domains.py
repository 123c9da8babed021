"""Documents, charts, screenshots: how often strangers are called copies, and what copies are found.

    python benchmarks accuracy/domains PHOTOS --disc SET --name domains

For every kind of ``accuracy/kinds`` (drawn by code that neither training nor the shipped background
uses), with the thresholds alone (*before*) and with verdicts (*after*: images outside what the
normalizer knows are compared by their pixels; *verified*: and by geometry, the second stage):

- false copies among all pairs of 300 different images, by the symmetric score of ``dedup``;
- strangers called copy by ``search`` in a bank of these 300;
- copies found in that bank.

Then a phone folder of 1 000 photos, screenshots, documents and memes, 50 of them saved again; and
photos, a DISC-like set, whose figures must not change. Descriptors and the figures of each kind are
kept under ``--cache``: a killed run goes on where it was.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

import results
import sscd_vec
from accuracy import kinds
from accuracy.dataset import read_disc
from accuracy.kinds.copies import COPIES, Maker, resaved
from disc import CACHE
from photos import find_photos
from sscd_vec.bank.exact import ExactCopy, Pixels, compare, prepare
from sscd_vec.bank.judging import SECOND_LOOKS, verified
from sscd_vec.encoder import Encoder
from sscd_vec.files import write_whole
from sscd_vec.metrics import evaluate
from sscd_vec.normalize import Grade, Kind, Normalizer, Proof, Verdict
from sscd_vec.predictions import Predictions
from sscd_vec.verify import Evidence, Features, Verifier
from sscd_vec.verify.everywhere import agree_everywhere

Float32 = NDArray[np.float32]
Flags = NDArray[np.bool_]
Draw = Callable[[int], Image.Image]
Row = dict[str, object]
UNSEEN = ("music", "puzzles")  # kinds the shipped background does not have
PHONE = {"chats": 90, "dashboards": 40, "code": 40, "documents": 70, "invoices": 60,
         "receipts": 50, "memes": 60, "maps": 30, "QR codes": 20}  # fmt: skip
PHONE_PHOTOS, PHONE_COPIES = 490, 50


@dataclass(frozen=True)
class Ours:
    """The model under test, and where its descriptors are kept."""

    encoder: Encoder
    normalizer: Normalizer
    verifier: Verifier
    cache: Path

    @property
    def folder(self) -> Path:
        """Where descriptors and figures of this encoder are kept."""
        return self.cache / self.encoder.fingerprint[:16]

    def images(self, name: str, count: int, draw: Draw) -> "Described":
        """Describe images, or read what was described before."""
        file = self.folder / f"{name}-{count}.npy"
        pixels: dict[int, Pixels] = {}
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, self.encoder.encode(_drawn(draw, count, pixels)))
        z = self.normalizer.whiten(np.load(file))
        flags, shifts = self.normalizer.outside(z)
        return Described(z, self.normalizer.whitened_biases(z), shifts, flags, draw, pixels)


def _drawn(draw: Draw, count: int, pixels: dict[int, Pixels]) -> Iterator[Image.Image]:
    """Images to encode; they are kept as they are compared, since drawing takes time."""
    for row in range(count):
        image = draw(row)
        pixels[row] = prepare(image)
        yield image


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
    _compared: dict[tuple[int, int, int], ExactCopy] = field(default_factory=dict)
    _features: dict[int, Features] = field(default_factory=dict)

    def pixels(self, row: int) -> Pixels:
        """Pixels of one image, as they are compared."""
        if row not in self._pixels:
            self._pixels[row] = prepare(self.draw(row))
        return self._pixels[row]

    def compared(self, row: int, bank: "Described", other: int) -> ExactCopy:
        """What the exact-copy test says; two images are compared once."""
        pair = (min(row, other), max(row, other)) if bank is self else (row, other)
        if (id(bank), *pair) not in self._compared:
            found = compare(self.pixels(pair[0]), bank.pixels(pair[1]))
            self._compared[id(bank), *pair] = found
        return self._compared[id(bank), *pair]

    def features(self, row: int, verifier: Verifier) -> Features:
        """Local features of one image."""
        if row not in self._features:
            self._features[row] = verifier.extract(self.pixels(row))
        return self._features[row]

    def related(
        self, row: int, bank: "Described", other: int, verifier: Verifier, score: float
    ) -> Evidence:
        """What geometry says."""
        theirs = bank.features(other, verifier).best(verifier.kept)
        return verifier.compare(self.features(row, verifier), theirs, score)

    def closely(self, row: int, bank: "Described", other: int, evidence: Evidence) -> Proof | None:
        """What the aligned pixels say; None if geometry aligns nothing."""
        if evidence.transform is None:
            return None
        pixels = self.pixels(row), bank.pixels(other)
        found = agree_everywhere(*pixels, np.array(evidence.transform))
        return Proof(found.is_copy, found.reason, "geometry")

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
    rules: Normalizer,
    kind: Kind,
    queries: Described,
    bank: Described,
    scores: Float32,
    verifier: Verifier | None = None,
) -> list[dict[int, Grade]]:
    """For each query, the grades of all references that are not "no".

    Of the pairs in doubt, the best few of a query are compared by their pixels. With a verifier,
    ``dedup`` aligns those pairs too; ``search`` verifies the best candidates, and looks closely at
    the best few in doubt.
    """
    doubt, size = queries.doubtful(bank), len(bank.z)
    found = []
    for row in range(len(scores)):
        graded: dict[int, Grade] = {}
        looks, close = 0, SECOND_LOOKS
        for rank, other in enumerate(np.argsort(-scores[row], kind="stable").tolist()):
            score, in_doubt = float(scores[row, other]), bool(doubt[row, other])
            judge = partial(rules.judge, score, size, kind)
            is_candidate = verifier is not None and kind == "search" and rank < verifier.candidates
            judged = judge()
            if judged.grade == "no" and not is_candidate:
                break
            proof, looked = None, in_doubt and looks < SECOND_LOOKS and judged.grade != "no"
            if looked:
                proof, looks = queries.compared(row, bank, other).proof, looks + 1
            judged = judge(in_doubt=in_doubt, shift=float(queries.shifts[row]), proof=proof)
            due = is_candidate if kind == "search" else looked
            if verifier is not None and due and judged.basis != "pixels":
                evidence = queries.related(row, bank, other, verifier, score)
                closer = None
                if in_doubt and close and evidence.located:
                    closer, close = queries.closely(row, bank, other, evidence), close - 1
                judged = _verified(judged, evidence, verifier, closer, kind)
            if judged.grade != "no":
                graded[other] = judged.grade
        found.append(graded)
    return found


def _verified(
    judged: Verdict, evidence: Evidence, verifier: Verifier, proof: Proof | None, kind: Kind
) -> Verdict:
    """The verdict of ``search`` or ``dedup``; the latter takes geometry's proofs only."""
    if kind == "search":
        return verified(judged, evidence, verifier.weights.with_descriptor.threshold, proof)
    is_proven = proof is not None and proof.is_copy
    return replace(judged, grade="copy") if is_proven else judged


def measure_kind(ours: Ours, kind: str, options: argparse.Namespace) -> dict[str, object]:
    """One row of the table."""
    draw = partial(kinds.draw, kind, seed=options.seed)
    count, strangers = options.images, options.strangers
    name = f"{kind}-{options.seed}".replace(" ", "_")
    bank = ours.images(name, count, draw)
    others = ours.images(f"{name}-strangers", strangers, lambda row: draw(count + row))
    rules, limit = ours.normalizer, ours.normalizer.threshold("search", count)
    scores = others.directed_scores(bank)
    row: dict[str, object] = {
        "kind": kind,
        "outside": percent(bank.outside),
        **false_pairs(rules, bank, ours.verifier),
        "strangers, before": percent((scores >= limit).any(axis=1)),
    }
    stages = {"": None, ", verified": ours.verifier}
    for stage, verifier in stages.items():
        called = grades(rules, "search", others, bank, scores, verifier)
        row[f"strangers{stage}"] = percent(["copy" in graded.values() for graded in called])
        row[f"strangers, unsure{stage}"] = percent(
            ["unsure" in graded.values() for graded in called]
        )
    for copy, maker in COPIES.items():
        chosen = np.linspace(0, count - 1, options.copies).astype(int).tolist()
        queries = ours.images(
            f"{name}-{copy}-{options.copies}", len(chosen), partial(copied, draw, maker, chosen)
        )
        scores = queries.directed_scores(bank)
        own = np.array([scores[place, source] for place, source in enumerate(chosen)])
        row[f"{copy}, before"] = percent(own >= limit)
        for stage, verifier in stages.items():
            graded = grades(rules, "search", queries, bank, scores, verifier)
            known = [grade.get(source, "no") for grade, source in zip(graded, chosen, strict=True)]
            row[f"{copy}{stage}"] = percent([grade == "copy" for grade in known])
            row[f"{copy}, unsure{stage}"] = percent([grade == "unsure" for grade in known])
    return row


def kept(ours: Ours, name: str, asked: object, measure: Callable[[], Row]) -> Row:
    """Figures, or what an earlier run of the same code found."""
    version = hashlib.sha256("".join(map(str, (name, asked, *_sources()))).encode()).hexdigest()
    file = ours.folder / f"figures-{version[:16]}.json"
    if not file.exists():
        figures = measure()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(figures))
    found: Row = json.loads(file.read_text())
    print(name, found, flush=True)
    return found


def _sources() -> list[str]:
    """The code that decides."""
    package = Path(sscd_vec.__file__).parent
    files = [Path(__file__), package / "bank/exact.py", package / "bank/judging.py"]
    files += sorted((package / "verify").glob("*.py")) + sorted(
        (package / "normalize").glob("*.py")
    )
    return [file.read_text("utf-8") for file in files]


def copied(draw: Draw, maker: Maker, chosen: Sequence[int], place: int) -> Image.Image:
    """A copy of the chosen image at this place, the same every time."""
    return maker(draw(chosen[place]), random.Random(f"{maker.__name__} {chosen[place]}"))


def false_pairs(rules: Normalizer, images: Described, verifier: Verifier) -> dict[str, object]:
    """Share of all pairs called copies: before, after, and verified."""
    scores, count = images.symmetric_scores(), len(images.z)
    limit, pairs = rules.threshold("symmetric", count), count * (count - 1) / 2
    return {
        "false copies, before": round(100 * float((scores >= limit).sum()) / 2 / pairs, 2),
        "false copies": round(100 * len(copy_pairs(rules, images, scores)) / pairs, 4),
        "false copies, verified": round(
            100 * len(copy_pairs(rules, images, scores, verifier)) / pairs, 4
        ),
    }


def copy_pairs(
    rules: Normalizer, images: Described, scores: Float32, verifier: Verifier | None = None
) -> set[tuple[int, int]]:
    """All pairs that verdicts call copies."""
    graded = grades(rules, "symmetric", images, images, scores, verifier)
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
    found = {", before": before, "": copy_pairs(rules, images, scores)}
    found[", verified"] = copy_pairs(rules, images, scores, ours.verifier)
    figures: Row = {"images": len(images.z), "copies": PHONE_COPIES}
    return figures | {
        f"{key}{stage}": value
        for stage, pairs in found.items()
        for key, value in groups(pairs, true).items()
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


def over_all(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The mean, the least and the largest of every column; every kind has as many images."""
    names = [name for name in rows[0] if name != "kind"]
    table = {name: [float(str(row[name])) for row in rows] for name in names}
    return [
        {"figure": n, "mean": round(float(np.mean(v)), 3), "least": min(v), "largest": max(v)}
        for n, v in table.items()
    ]


def percent(flags: ArrayLike) -> float:
    """Share of what is true."""
    return round(100 * float(np.mean(np.asarray(flags))), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    encoder = Encoder.from_pretrained(options.model, backend=options.backend)
    verifier = Verifier.from_pretrained(candidates=options.candidates)
    ours = Ours(encoder, Normalizer.from_pretrained(options.model), verifier, options.cache)
    figures: dict[str, object] = {}
    if options.photos:
        asked = options.photos, options.seed
        phone = partial(measure_phone, ours, options)
        figures["phone folder"] = kept(ours, "phone folder", asked, phone)
    if options.disc:
        photos = partial(measure_photos, ours, options.disc)
        figures["photos"] = kept(ours, "photos", options.disc, photos)
    sizes = options.images, options.strangers, options.copies, options.seed, options.candidates
    rows = [
        kept(ours, kind, sizes, partial(measure_kind, ours, kind, options))
        for kind in options.kinds
    ]
    figures |= {
        "images of each kind": options.images,
        "strangers of each kind": options.strangers,
        "copies of each kind and edit": options.copies,
        "kinds": rows,
        "all kinds": over_all(rows),
        "unseen by the background": list(UNSEEN),
    }
    print(figures["all kinds"], flush=True)
    if options.name:
        print(results.write(options.name, figures, encoder=encoder.fingerprint))


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
    add("--candidates", type=int, default=10, help="verified in a search")
    add("--seed", type=int, default=0)
    add("--disc", type=Path, help="a DISC-like set")
    add("--cache", type=Path, default=CACHE / "domains", help="folder for descriptors")
    add("--name", help="write the figures to benchmarks/results/NAME.json")
    return parser


if __name__ == "__main__":
    main()
