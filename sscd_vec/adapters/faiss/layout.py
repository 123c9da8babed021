"""What FAISS index types can and cannot do: dimensions, removal, rebuilding."""

import math
import re
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss import scorable
from sscd_vec.adapters.faiss.scorable import innermost

LARGEST_BLOCK = 65_536  # rows
# What lies between the transform and the index stays in the cache: flat storage takes a quarter
# more per second than in blocks of 65 536.
BLOCK = 8192
PROBED_LISTS, EF_SEARCH, REFINED = 16, 64, 8
FLAT = {"IndexFlat", "IndexFlatIP", "IndexFlatL2"}
LISTS = {"IndexIVFFlat", "IndexIVFPQ", "IndexIVFScalarQuantizer"}


def new_index(dim: int, factory: str, metric: int) -> faiss.Index:
    """An empty index of the smallest dimension from ``dim`` on that the factory accepts.

    A product quantizer of ``m`` parts needs a multiple of ``m``, which ``d + 2`` rarely is.
    Appended zeros change no inner product and no distance.

    Raises:
        ValueError: If the factory refuses every candidate, with FAISS's words, or if what it makes
            would not return this metric of these vectors, so that scores could not be read off.
    """
    # PQ5, OPQ5, PRQ5x2x4, PLSQ5x2x4, IMI2x8, and the second quantizer of PQ5+8.
    numbers = re.findall(r"(?:PQ|PRQ|PLSQ|IMI|\+)(\d+)", factory)
    parts = [int(m) for m in numbers if int(m)]
    refusal: RuntimeError | None = None
    for step in sorted({1, *parts, math.lcm(*parts)}):
        try:
            index = faiss.index_factory(-(-dim // step) * step, factory, metric)
        except RuntimeError as error:
            refusal = error
            continue
        problem = scorable.problem(index, factory, metric)
        if problem:
            raise ValueError(f"factory: {factory!r} {problem}")
        return index
    raise ValueError(f"factory: FAISS refuses {factory!r} for {dim} dimensions: {refusal}")


def pad(vectors: NDArray[np.float32], dim: int) -> NDArray[np.float32]:
    """Vectors with zeros appended up to ``dim``."""
    missing = dim - vectors.shape[1]
    return np.pad(vectors, ((0, 0), (0, missing))) if missing else vectors


def reserve(index: faiss.Index, rows: int) -> None:
    """Make room for ``rows`` more, so that flat storage grows once and not block by block."""
    inner = innermost(index)
    if isinstance(inner, faiss.IndexHNSW):
        inner = faiss.downcast_index(inner.storage)
    if isinstance(inner, faiss.IndexFlatCodes):
        used = inner.codes.size()
        inner.codes.resize(used + rows * inner.code_size)
        inner.codes.resize(used)  # the room stays


def added_at_once(index: faiss.Index) -> int:
    """Rows to transform and add at a time; NSG makes its graph of those of a single add."""
    inner = innermost(index)
    if isinstance(inner, faiss.IndexRefine):
        inner = innermost(inner.base_index)
    return LARGEST_BLOCK if "NSG" in type(inner).__name__ else BLOCK


def search_parameters(index: faiss.Index) -> dict[str, float]:
    """How a new index is searched unless told otherwise.

    FAISS's own 1 list and 16 nodes miss much, and to refine no more than the ``k`` that are asked
    for only sorts them.
    """
    parameters: dict[str, float] = {}
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        parameters["nprobe"] = min(PROBED_LISTS, lists.nlist)
    elif isinstance(innermost(index), faiss.IndexHNSW):
        parameters["efSearch"] = EF_SEARCH
    if isinstance(faiss.downcast_index(index), faiss.IndexRefine):
        parameters["k_factor_rf"] = REFINED
    return parameters


def top_parameters(index: faiss.Index, k: int) -> faiss.SearchParameters | None:
    """What a search for ``k`` is told: to refine no more candidates than there are rows.

    FAISS would make room for ``k`` times the factor of them.
    """
    refining = faiss.downcast_index(index)
    if not isinstance(refining, faiss.IndexRefine) or k * refining.k_factor <= index.ntotal:
        return None
    parameters = faiss.IndexRefineSearchParameters()
    parameters.k_factor = index.ntotal / k
    return parameters


def is_exact(index: faiss.Index) -> bool:
    """Whether a search compares with every vector, uncompressed."""
    if isinstance(index, faiss.IndexFlat):
        return True
    if not isinstance(index, faiss.IndexIVFFlat):
        return False
    # A graph or lists over the centroids find fewer lists than they are asked for, and max_codes
    # stops before the last of them.
    every_list = isinstance(faiss.downcast_index(index.quantizer), faiss.IndexFlat)
    return every_list and bool(index.nprobe >= index.nlist and index.max_codes == 0)


def has_range_search(index: faiss.Index) -> bool:
    """Whether the type's own range search finds what its top-k search would.

    A graph's range search stops at efSearch candidates, where its top-k search can be widened;
    that of fast-scan lists finds nothing at all with inner products; and one that refines asks its
    coarse codes first what is in range, which score good matches too low.
    """
    inner = innermost(index)
    names = ("HNSW", "NSG", "NNDescent", "FastScan", "Refine", "IVFPQR")
    return not any(name in type(inner).__name__ for name in names)


def living_only(index: faiss.Index, alive: NDArray[np.bool_]) -> faiss.SearchParameters | None:
    """Search parameters that leave dead rows out, or None if the type does not know such.

    Graphs do, but stop at efSearch nodes, dead ones included: better to search them widely.
    """
    inner: Any = innermost(index)
    kind = type(inner).__name__
    if kind not in FLAT | LISTS:
        return None
    made: Any = faiss  # its type hints do not know what these take
    chosen = made.IDSelectorBitmap(np.packbits(alive, bitorder="little"))
    parameters: faiss.SearchParameters
    if kind in FLAT:
        parameters = made.SearchParameters(sel=chosen)
    else:
        parameters = made.SearchParametersIVF(
            sel=chosen, nprobe=inner.nprobe, max_codes=inner.max_codes
        )
    if isinstance(faiss.downcast_index(index), faiss.IndexPreTransform):
        parameters = made.SearchParametersPreTransform(index_params=parameters)
    return parameters


def can_remove(index: faiss.Index) -> bool:
    """Whether the type can take rows out in place."""
    inner: Any = innermost(index)
    if type(inner).__name__ == "IndexIVFFlatDedup":
        # Rows with the same vector as another are in a map of their own, which keeps old numbers.
        return bool(inner.invlists.compute_ntotal() == inner.ntotal)
    return isinstance(inner, faiss.IndexFlatCodes | faiss.IndexIVF) and not isinstance(
        inner, faiss.IndexIVFFastScan | faiss.IndexIVFPQR
    )


def fits_gpu(index: faiss.Index) -> bool:
    """Whether FAISS can keep the type on a GPU."""
    return type(innermost(index)).__name__ in FLAT | LISTS


def without_dead(index: faiss.Index, alive: NDArray[np.bool_]) -> faiss.Index:
    """The index with living rows only, numbered without gaps; in place where the type can.

    Raises:
        RuntimeError: If it can neither remove rows nor be made again from what it keeps.
    """
    if not can_remove(index):
        return _rebuilt(index, alive)
    index.remove_ids(faiss.IDSelectorBatch(np.flatnonzero(~alive)))
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None and lists.invlists is not None:
        # Flat storage moves rows up; inverted lists keep their row numbers.
        _renumber(lists.invlists, np.cumsum(alive, dtype=np.int64) - 1)
    return index


def _renumber(invlists: faiss.InvertedLists, new: NDArray[np.int64]) -> None:
    for i in range(invlists.nlist):
        size = invlists.list_size(i)
        if size:
            rows = faiss.rev_swig_ptr(invlists.get_ids(i), size)
            rows[:] = new[rows]


def _rebuilt(index: faiss.Index, alive: NDArray[np.bool_]) -> faiss.Index:
    """A new index of the same kind and training."""
    kind = type(innermost(index)).__name__
    try:
        if "RaBitQ" in kind and alive.any():
            raise RuntimeError("codes made of codes have other scores")
        if kind == "IndexIVFFlatDedup":  # not even when empty: FAISS's reset leaves the map behind
            raise RuntimeError("rows of equal vectors are one to it")
        fresh = faiss.clone_index(index)
        fresh.reset()
        for begin in range(0, len(alive), LARGEST_BLOCK):
            block = alive[begin : begin + LARGEST_BLOCK]
            if block.any():
                vectors = index.reconstruct_n(begin, len(block))
                fresh.add(np.ascontiguousarray(vectors[block]))
    except RuntimeError as error:
        raise RuntimeError(
            f"compact: {kind} cannot be made again from what it keeps ({error}); its dead rows "
            "stay. Build it from the descriptors to be rid of them"
        ) from error
    return fresh
