"""Candidates of a DISC-like set and what geometry measures of each, cached block by block.

A killed run goes on where it was. Descriptors are kept per encoder, measurements per version of the
code that makes them.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accuracy.dataset import DiscSet, Images
from accuracy.tiles import describe
from sscd_vec.bank.views import SCALES
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.images import load_pixels
from sscd_vec.files import writing
from sscd_vec.normalize import Normalizer
from sscd_vec.verify import Features, FeatureStore, evidence
from sscd_vec.verify.evidence import Support, best_alignment
from sscd_vec.verify.features import extract
from sscd_vec.verify.verifier import KEPT, KEYPOINTS, SIDE

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Look = Literal["larger", "tiled"]
BLOCK = 50  # queries per file
NEVER = 1_000_000  # rank of a candidate that this kind of search did not find


@dataclass(frozen=True)
class Measurements:
    """Candidate pairs by row.

    Attributes:
        query: Row of the query in the set.
        reference: Row of the reference.
        rank: Place among the query's candidates by whole descriptor, from 0.
        further_rank: Place among the candidates of a further look at the query.
        descriptor: Score of the whole images' descriptors.
        support: ``(n, fields of Support)``, what speaks for the best alignment.
    """

    query: Int64
    reference: Int64
    rank: Int64
    further_rank: Int64
    descriptor: Float32
    support: Float32

    def within(self, k: int, further: int = 0) -> "Measurements":
        """The pairs a search for ``k`` candidates and ``further`` of another look would see.

        A bank does not know the whole query's score with a candidate that only the other look
        found: it takes the least of the others for it.
        """
        own = self.rank < k
        least = np.full(int(self.query.max(initial=0)) + 1, np.inf, np.float32)
        np.minimum.at(least, self.query[own], self.descriptor[own])
        known = np.where(own, self.descriptor, least[self.query])
        return replace(self, descriptor=known).where(own | (self.further_rank < further))

    def where(self, kept: NDArray[np.bool_]) -> "Measurements":
        """Some of the pairs."""
        return Measurements(*(getattr(self, field.name)[kept] for field in fields(self)))


class Job(NamedTuple):
    """A block of queries to measure: the folder to write to, their files and candidates."""

    folder: Path
    paths: tuple[str, ...]
    found: tuple[dict[str, Any], ...]

    @property
    def file(self) -> Path:
        """Named by what is compared, so that another search with the same candidates finds it."""
        names = [Path(path).name for path in self.paths]
        return self.folder / f"{_digest(names, [e['reference'].tolist() for e in self.found])}.npy"


def measure_set(
    disc: DiscSet,
    encoder: Encoder,
    normalizer: Normalizer,
    cache: Path,
    *,
    k: int,
    further: int = 0,
    look: Look = "larger",
    count: int | None = None,
    skip: int = 0,
    processes: int = 1,
) -> Measurements:
    """Search a set and measure its candidates.

    Args:
        disc: The set.
        encoder: Makes descriptors.
        normalizer: Makes scores of them.
        cache: Folder of everything that is kept.
        k: Candidates per query by whole descriptor.
        further: More candidates per query, of another look at it.
        look: Which: the best of its tiles, or the query at twice the size.
        count: Take only so many queries, the first ones of the set (they are in no order).
        skip: Leave out so many of these, the first ones.
        processes: How many measure at once.
    """
    queries = disc.queries.only(disc.queries.ids[:count])
    kept = cache / _digest(encoder.fingerprint)
    references = normalizer.references(
        np.concatenate(list(chain(*_views(encoder, disc.references, kept / "references"))))
    )
    views = chain(*_views(encoder, queries, kept / "queries"))
    # Another look costs four or nine times as much as the first: taken only if it is wanted.
    name = f"{look} queries" if further else "queries"
    others = chain(*_views(encoder, queries, kept / name, look if further else None))
    found = [
        _search(normalizer, *both, references, k, further)
        for both in zip(views, others, strict=True)
    ]
    measured = cache / "measured" / _code()
    jobs = [
        Job(measured, queries.paths[start : start + BLOCK], tuple(found[start : start + BLOCK]))
        for start in range(skip, len(queries), BLOCK)
    ]
    left = [job for job in jobs if not job.file.exists()]
    if left:
        measured.mkdir(parents=True, exist_ok=True)
        store = keep_features(disc.references, cache / f"local-{_code()}", processes)
        with _workers(processes, store, disc.references.ids) as run:
            for done, _ in enumerate(run(_measure_block, left), 1):
                print(f"measured {done} of {len(left)} blocks", flush=True)
    supports = np.concatenate([np.load(job.file) for job in jobs])
    found = found[skip:]
    rows = np.repeat(skip + np.arange(len(found)), [len(each["reference"]) for each in found])
    columns = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    return Measurements(query=rows, support=supports, **columns)


def joined(parts: Sequence[Measurements]) -> Measurements:
    """Several lists of pairs as one."""
    names = [field.name for field in fields(Measurements)]
    return Measurements(*(np.concatenate([getattr(part, n) for part in parts]) for n in names))


def are_copies(measured: Measurements, disc: DiscSet) -> NDArray[np.bool_]:
    """Which pairs the ground truth has."""
    pairs = zip(measured.query.tolist(), measured.reference.tolist(), strict=True)
    return np.array(
        [(disc.queries.ids[q], disc.references.ids[r]) in disc.matches for q, r in pairs]
    )


def supports(measured: Measurements) -> Iterator[Support]:
    """What speaks for each pair."""
    for row in measured.support.tolist():
        yield Support(*row)


def keep_features(images: Images, path: Path, processes: int) -> Path:
    """Local features of images in a store, as an index keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FeatureStore(path) as store:
        left = [pair for pair in zip(images.ids, images.paths, strict=True) if pair[0] not in store]
        with _workers(processes) as run:
            for start in range(0, len(left), BLOCK):
                names, paths = zip(*left[start : start + BLOCK], strict=True)
                made = [Features.from_bytes(blob) for blob in run(_extract, paths)]
                store.put(dict(zip(names, made, strict=True)))
                print(f"features of {start + len(names)} of {len(left)} references", flush=True)
    return path


def _views(
    encoder: Encoder, images: Images, folder: Path, look: Look | None = None
) -> Iterator[list[Float32]]:
    """Descriptors ``(views, d)`` of one look at every image, a block at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in _starts(images):
        file = _block_file(folder, start, len(images))
        if not file.exists():
            made = _encode(encoder, list(images.paths[start : start + BLOCK]), look)
            with writing(file) as opened:
                np.savez(opened, *made)
            print(f"{folder.name}: {start + len(made)} of {len(images)} encoded", flush=True)
        with np.load(file) as loaded:
            yield [loaded[name] for name in loaded.files]


def _encode(encoder: Encoder, paths: list[str], look: Look | None) -> list[Float32]:
    if look == "larger":
        return [row[None] for row in encoder.encode(paths, scale=SCALES[1], show_progress=False)]
    views = describe(encoder, paths, 2 if look == "tiled" else 1)
    return [each[1:] for each in views] if look == "tiled" else views


def _starts(images: Images) -> range:
    return range(0, len(images), BLOCK)


def _block_file(folder: Path, start: int, count: int) -> Path:
    """One file per block; the last block, if it is not full, says how much it holds."""
    rest = count - start
    return folder / (f"{start:06d}.npz" if rest >= BLOCK else f"{start:06d}-{rest}.npz")


def _search(
    normalizer: Normalizer,
    whole: Float32,
    other: Float32,
    references: Float32,
    k: int,
    further: int,
) -> dict[str, Any]:
    """Candidates of one query: reference rows, their ranks by both looks and the first's score."""
    scores = (normalizer.queries(whole) @ references.T)[0]
    order = np.argsort(-scores, kind="stable")[:k]
    best = (normalizer.queries(other) @ references.T).max(axis=0)
    # Those the first look has already are no further candidates; it may have up to k of them.
    by_other = np.argsort(-best, kind="stable")[: k + further]
    more = by_other[~np.isin(by_other, order)][:further]
    found = np.concatenate([order, more])
    return {
        "reference": found,
        "rank": _places(found, order),
        "further_rank": _places(found, more),
        "descriptor": scores[found].astype(np.float32),
    }


def _places(found: Int64, order: Int64) -> Int64:
    known = {row: place for place, row in enumerate(order.tolist())}
    return np.array([known.get(row, NEVER) for row in found.tolist()], np.int64)


# ---------------------------------------------------------------------- worker processes

_store: FeatureStore | None = None
_names: tuple[str, ...] = ()


@contextmanager
def _workers(
    processes: int, store: Path | None = None, names: tuple[str, ...] = ()
) -> Iterator[Callable[..., Iterator[Any]]]:
    """A ``map`` over several processes; over this one alone if there is one."""
    if processes == 1:
        _open(store, names)
        yield map
        return
    spawn = get_context("spawn")
    with ProcessPoolExecutor(processes, spawn, _open, (store, names)) as pool:
        yield pool.map


def _open(store: Path | None, names: tuple[str, ...]) -> None:
    global _store, _names
    import cv2

    cv2.setNumThreads(1)
    _store, _names = None if store is None else FeatureStore(store), names


def _extract(path: str) -> bytes:
    return extract(load_pixels(path), side=SIDE, keypoints=KEYPOINTS).best(KEPT).to_bytes()


def _measure_block(job: Job) -> None:
    table = []
    for path, found in zip(job.paths, job.found, strict=True):
        query = extract(load_pixels(path), side=SIDE, keypoints=KEYPOINTS)
        table += [
            astuple(best_alignment(query, _kept(place)).support)
            for place in found["reference"].tolist()
        ]
    with writing(job.file) as opened:
        np.save(opened, np.array(table, np.float32))


def _kept(place: int) -> Features:
    found = None if _store is None else _store.get(_names[place])
    if found is None:
        raise RuntimeError("the worker process has no features of this reference")
    return found


def _code() -> str:
    """What distinguishes this version of the measuring code."""
    folder = Path(evidence.__file__).parent
    names = ("features", "geometry", "agreement", "shared", "evidence")
    return _digest(*((folder / f"{name}.py").read_text() for name in names), SIDE, KEYPOINTS, KEPT)


def _digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]
