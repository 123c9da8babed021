"""What FAISS index types can and cannot do: dimensions, scores, removal, rebuilding.

A rotation or padding in front of an index keeps every inner product and every distance. PCA's mean,
whitening and unit length do not, and scores and calibrated thresholds would be wrong. Codes lose a
little of each vector, as they are meant to; codes of bits or of whole numbers lose what scores are
made of.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

LARGEST_BLOCK = 65_536  # rows
# What lies between the transform and the index stays in the cache: flat storage takes a quarter
# more per second than in blocks of 65 536.
BLOCK = 8192
TRAINING_ROWS = 65_536  # for quantizers of 256 values
TRAINED_PER_LIST = 64
PROBED_LISTS, EF_SEARCH, REFINED = 16, 64, 8
EXACT = {"IndexFlat", "IndexFlatIP", "IndexFlatL2", "IndexIVFFlat"}
PROBES = 8
TOLERANCE = 1e-4  # what exact types promise of a score; rotations in float32 are right to 1e-6


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
        problem = why_unscorable(index, factory, metric)
        if problem:
            raise ValueError(f"factory: {factory!r} {problem}")
        return index
    raise ValueError(f"factory: FAISS refuses {factory!r} for {dim} dimensions: {refusal}")


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


def training_rows(index: faiss.Index) -> int:
    """How many vectors are enough to train on; 0 if it is trained.

    k-means in FAISS wants 39 per centroid at least and uses 256 at most.
    """
    if index.is_trained:
        return 0
    lists = faiss.try_extract_index_ivf(index)
    return max(TRAINING_ROWS, 0 if lists is None else TRAINED_PER_LIST * int(lists.nlist))


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


def set_parameters(index: faiss.Index, factory: str, parameters: Mapping[str, float]) -> None:
    """Set search-time parameters by FAISS's names.

    Raises:
        ValueError: If the type does not know one.
    """
    space = faiss.ParameterSpace()
    for name, value in parameters.items():
        try:
            space.set_index_parameter(index, name, value)
        except RuntimeError as error:
            raise ValueError(f"parameters: {factory} does not know {name!r}") from error


def can_remove(index: faiss.Index) -> bool:
    """Whether the type can take rows out in place."""
    inner: Any = innermost(index)
    if type(inner).__name__ == "IndexIVFFlatDedup":
        # Rows with the same vector as another are in a map of their own, which keeps old numbers.
        return bool(inner.invlists.compute_ntotal() == inner.ntotal)
    return isinstance(inner, faiss.IndexFlatCodes | faiss.IndexIVF) and not isinstance(
        inner, faiss.IndexIVFFastScan | faiss.IndexIVFPQR
    )


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


def without_id_map(index: faiss.Index, ids: Any) -> tuple[faiss.Index, Any]:  # noqa: ANN401
    """Someone's index and its ids, which an ``IndexIDMap`` has itself.

    Raises:
        ValueError: If ids are missing, or rows have numbers of their own within lists.
    """
    inner: Any = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexIDMap):
        ids = faiss.vector_to_array(inner.id_map) if ids is None else ids
        inner = faiss.downcast_index(inner.index)
    if ids is None:
        raise ValueError("adopt: expected one id per row; only an IndexIDMap knows its own")
    lists: Any = faiss.try_extract_index_ivf(inner)
    for i in range(0 if lists is None else lists.nlist):
        size = lists.invlists.list_size(i)
        if size and faiss.rev_swig_ptr(lists.invlists.get_ids(i), size).max() >= inner.ntotal:
            raise ValueError(
                "adopt: expected rows numbered from 0, got lists with numbers of their own "
                "(add_with_ids); put an IndexIDMap around the lists instead"
            )
    return inner, ids


def keeps_vectors(index: faiss.Index) -> bool:
    """Whether the type can give its vectors back as they were added, or rounded to 16 bits."""
    storing = _storing(index)
    half = getattr(getattr(storing, "sq", None), "qtype", None) == faiss.ScalarQuantizer.QT_fp16
    return type(storing).__name__ in EXACT or (half and not hasattr(storing, "nlist"))


@contextmanager
def findable_rows(index: faiss.Index) -> Iterator[None]:
    """Let lists look up rows by number within the block; undo that afterwards."""
    lists: Any = faiss.try_extract_index_ivf(index)
    refines = isinstance(faiss.downcast_index(index), faiss.IndexRefine)
    if refines or lists is None or not lists.direct_map.no():
        yield
        return
    none = lists.direct_map.type
    lists.make_direct_map()
    try:
        yield
    finally:
        lists.set_direct_map_type(none)


def stored_vectors(index: faiss.Index, begin: int, count: int) -> NDArray[np.float32]:
    """Vectors of successive rows, as they were added; lists need ``findable_rows`` around it.

    Raises:
        ValueError: If the type keeps codes, or cannot find rows by number.
    """
    try:
        if not keeps_vectors(index):
            raise RuntimeError(f"{type(innermost(index)).__name__} keeps codes, not vectors")
        outer = faiss.downcast_index(index)
        keeper = outer.refine_index if isinstance(outer, faiss.IndexRefine) else outer
        vectors: NDArray[np.float32] = keeper.reconstruct_n(begin, count)
    except RuntimeError as error:
        raise ValueError(
            f"the descriptors cannot be had back from this index ({error}); encode the images again"
        ) from error
    return vectors


def _storing(index: faiss.Index) -> Any:  # noqa: ANN401  (types differ in what they have)
    """The part that keeps whole vectors, where there is one: what refines, or a graph's storage."""
    inner: Any = innermost(index)
    if isinstance(inner, faiss.IndexRefine):
        return _storing(inner.refine_index)
    return _scoring(inner)


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


def why_unscorable(index: faiss.Index, factory: str, metric: int) -> str:
    """Why no score can be read from what the index returns; empty if one can.

    Steps that are not trained yet are judged by what training makes of their kind, trained ones by
    what they do: ask again after training.
    """
    outer, inner = faiss.downcast_index(index), innermost(index)
    scoring = _scoring(inner)
    if _numbers_rows(outer):
        return "numbers its rows itself; ids are kept here, leave IDMap out"
    if isinstance(inner, faiss.Index2Layer):
        return "only stores codes for other types and cannot be searched; use IVF"
    if isinstance(scoring, faiss.IndexLSH | faiss.IndexIVFSpectralHash):
        return "compares bits, which have no score; use Flat, SQ, PQ, HNSW or IVF"
    if inner.d < outer.d:
        return (
            "shortens vectors, and scores with them; reduce with Normalizer.fit(..., dim=...), "
            "which does it before scores are made"
        )
    step = _distorting_step(outer, factory, metric)
    if step:
        kept = "inner products" if metric == faiss.METRIC_INNER_PRODUCT else "distances"
        return (
            f"changes the {kept} that scores are made of; leave {step} out (rotations, RR and OPQ, "
            "keep them; the normalizer whitens)"
        )
    if _takes_whole_numbers(scoring):
        return "keeps whole numbers only, and all of a descriptor lies between -1 and 1; use SQ8"
    if "RaBitQ" in type(scoring).__name__ and not _turned(outer):
        # Signs of the coordinates that all references share say nothing, but count for queries.
        return f"shifts all scores unless vectors are turned first; use 'RR{inner.d},{factory}'"
    if inner.metric_type != metric:
        return "returns another metric than asked for; FAISS makes it so. Try the other metric"
    return ""


def innermost(index: faiss.Index) -> faiss.Index:
    """The index behind its pre-transforms, as its own class."""
    inner = faiss.downcast_index(index)
    if isinstance(inner, faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
    return inner


def _numbers_rows(index: faiss.Index) -> bool:
    """Whether there is an IDMap anywhere within."""
    inner = innermost(index)
    if isinstance(inner, faiss.IndexRefine):
        return _numbers_rows(inner.base_index) or _numbers_rows(inner.refine_index)
    return isinstance(inner, faiss.IndexIDMap)


def _scoring(inner: Any) -> Any:  # noqa: ANN401  (types differ in what they have)
    """The part whose numbers are returned: a graph's storage, or what refines."""
    if isinstance(inner, faiss.IndexRefine):
        return _scoring(innermost(inner.refine_index))
    storage = getattr(inner, "storage", None)
    return inner if storage is None else faiss.downcast_index(storage)


def _turned(outer: faiss.Index) -> bool:
    """Whether vectors are rotated, not just padded, before they come to the index."""
    steps = _steps(outer)
    return any(not isinstance(step, faiss.RemapDimensionsTransform) for step in steps)


def _steps(outer: faiss.Index) -> list[Any]:
    """The transforms in front of an index, in the order in which they are applied."""
    if not isinstance(outer, faiss.IndexPreTransform):
        return []
    chain: Any = outer.chain  # a C++ vector, whatever its type hint says
    return [faiss.downcast_VectorTransform(chain.at(i)) for i in range(chain.size())]


def _distorting_step(outer: faiss.Index, factory: str, metric: int) -> str:
    """The part of the factory string whose transform changes scores, if there is one."""
    # They are written in the order in which they are applied, and the index behind them.
    for name, step in zip(factory.split(","), _steps(outer), strict=False):
        if _distorts(step, metric):
            return name
    return ""


def _distorts(step: Any, metric: int) -> bool:  # noqa: ANN401  (any of FAISS's transforms)
    products = metric == faiss.METRIC_INNER_PRODUCT
    if step.d_out < step.d_in:
        return True
    if not step.is_trained:
        rescales = isinstance(step, faiss.ITQTransform) or getattr(step, "eigen_power", 0) != 0
        return rescales or (products and getattr(step, "have_bias", False))
    rng = np.random.default_rng(0)
    before = rng.normal(size=(PROBES, step.d_in))
    # Of different lengths, so that making all of them one length is noticed.
    before *= (np.linspace(0.5, 1.5, PROBES) / np.linalg.norm(before, axis=1))[:, None]
    after = step.apply(before.astype(np.float32)).astype(np.float64)
    if not products:  # distances stay if the products of differences do
        before, after = before - before[0], after - after[0]
    return not np.allclose(before @ before.T, after @ after.T, rtol=0, atol=TOLERANCE)


def _takes_whole_numbers(scoring: Any) -> bool:  # noqa: ANN401
    quantizer = getattr(scoring, "sq", None)
    kinds = faiss.ScalarQuantizer
    direct = [getattr(kinds, name) for name in dir(kinds) if name.startswith("QT_8bit_direct")]
    return quantizer is not None and quantizer.qtype in direct
