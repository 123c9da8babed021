"""One large FAISS index from parts that were built apart, in memory for its codes only.

Lists are trained once; every part adds its own rows to a copy of what was trained, on any machine:

    FaissIndex(normalizer, factory).train(sample).save("trained.faiss")
    part = FaissIndex.open("trained.faiss", normalizer); part.add_batches(...); part.save("1.faiss")
    merge_indexes(["1.faiss", "2.faiss", ...], "bank.faiss", normalizer)

With ``...,Refine(SQfp16)`` in the factory the vectors that give exact scores are most of the file.
They are never in memory all at once: they are copied from file to file, and a merged index that is
opened with ``mmap=True`` reads them from there.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss.files import IndexFile, Pair, read_pair
from sscd_vec.adapters.faiss.rows import RowTable
from sscd_vec.adapters.faiss.settings import Settings
from sscd_vec.normalize import Normalizer

_ROWS_AT = 8  # bytes before the number of rows in a file of FAISS's


def merge_indexes(
    parts: Sequence[str | Path],
    path: str | Path,
    normalizer: Normalizer,
    *,
    trusted: bool = False,
) -> int:
    """Merge indexes saved by ``FaissIndex.save`` into one; the parts stay as they are.

    Args:
        parts: At least one, of the same training, each with ids of its own.
        path: The index to write, whole or not at all.
        normalizer: Must have the reference fingerprint of the parts.
        trusted: See ``FaissIndex.open``.

    Returns:
        Rows of the merged index.

    Raises:
        FileExistsError: There is something at ``path``.
        ValueError: If the parts cannot be merged: no lists, another training, shared ids.
    """
    target = Path(path)
    if not parts:
        raise ValueError("parts: expected at least one index file, got none")
    if target.exists():
        raise FileExistsError(f"{target} exists; merge into another path")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".merge-") as folder:
        tables, merged, refiner = [], None, None
        for place in map(Path, parts):
            pair = read_pair(place, normalizer, False, trusted)[0]
            base, exact = _lists(place, pair)
            if merged is None:
                merged, settings, owner = base, pair.settings, pair.vectors
                refiner = None if exact is None else _Codes(Path(folder) / "exact", exact)
                refining: Any = faiss.downcast_index(owner)
                factor = 1.0 if exact is None else refining.k_factor
            else:
                _require_same(place, settings, pair.settings, merged, base)
                merged.merge_from(base, int(merged.ntotal))
            if refiner is not None:
                refiner.append(exact)
            tables.append(pair.rows)
        index = owner if refiner is None else refiner.refine(merged, factor)
        table = RowTable.joined(tables)
        final = replace(settings, rows=int(index.ntotal), generation=1)
        IndexFile(target).write(index, final, table.arrays())
    return len(table)


def _lists(place: Path, pair: Pair) -> tuple[Any, Any]:
    """The part that has lists, and the one that has exact vectors, if any."""
    outer = faiss.downcast_index(pair.vectors)
    base, exact = outer, None
    if isinstance(outer, faiss.IndexRefine):
        base = faiss.downcast_index(outer.base_index)
        exact = faiss.downcast_index(outer.refine_index)
    if faiss.try_extract_index_ivf(base) is None or not (
        exact is None or isinstance(exact, faiss.IndexScalarQuantizer)
    ):
        raise ValueError(
            f"{place}: expected lists (IVF...), alone or with Refine(SQfp16), got "
            f"{pair.settings.factory}; build it in one piece"
        )
    return base, exact


def _require_same(place: Path, first: Settings, other: Settings, left: Any, right: Any) -> None:  # noqa: ANN401
    same = (first.factory, first.metric, first.dim) == (other.factory, other.metric, other.dim)
    if not same or not np.array_equal(_centroids(left), _centroids(right)):
        raise ValueError(
            f"{place}: expected {first.factory} with the training of the first part, got "
            f"{other.factory}; train once, save that, and add every part's rows to a copy of it"
        )


def _centroids(base: Any) -> NDArray[np.float32]:  # noqa: ANN401
    lists: Any = faiss.try_extract_index_ivf(base)
    found: NDArray[np.float32] = lists.quantizer.reconstruct_n(0, lists.nlist)
    return found


class _Codes:
    """Exact vectors of all parts in a FAISS file of their own, appended to and then mapped."""

    def __init__(self, path: Path, like: Any) -> None:  # noqa: ANN401
        """Begin with the head of an empty index."""
        empty = faiss.IndexScalarQuantizer(like.d, like.sq.qtype, like.metric_type)
        self._head = bytearray(faiss.serialize_index(empty).tobytes())
        self._size = int(empty.code_size)
        self._rows, self._path = 0, path
        path.write_bytes(self._head)

    def append(self, exact: Any) -> None:  # noqa: ANN401
        """Append the vectors of a part."""
        count = int(exact.ntotal)
        codes = faiss.rev_swig_ptr(exact.codes.data(), count * self._size)
        with self._path.open("ab") as file:
            file.write(codes.data)
        self._rows += count

    def refine(self, base: Any, candidates: float) -> faiss.IndexRefine:  # noqa: ANN401
        """The merged lists with the exact vectors, which stay in their file."""
        with self._path.open("r+b") as file:
            _set(file, _ROWS_AT, self._rows)
            _set(file, len(self._head) - 8, self._rows * self._size)
        exact = faiss.read_index(str(self._path), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_MMAP_IFC)
        whole = len(self._head) + self._rows * self._size == self._path.stat().st_size
        if not whole or (exact.ntotal, exact.d) != (base.ntotal, base.d):
            raise RuntimeError(
                f"merge: {exact.ntotal} exact vectors of {exact.d} dimensions for {base.ntotal} of "
                f"{base.d}; this version of FAISS writes its files another way"
            )
        self._exact = exact  # the refining index does not own it
        refined = faiss.IndexRefine(base, exact)
        refined.k_factor = candidates
        return refined


def _set(file: BinaryIO, offset: int, value: int) -> None:
    file.seek(offset)
    file.write(value.to_bytes(8, "little"))
