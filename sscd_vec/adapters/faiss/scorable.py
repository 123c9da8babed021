"""From which FAISS types a score can be read: what they return is the metric of these vectors.

A rotation or padding in front of an index keeps every inner product and every distance. PCA's mean,
whitening and unit length do not, and with them go the scores and what a threshold was calibrated
for. Codes lose a little of each vector, which is what they are for; codes of bits or of whole
numbers lose what scores are made of.
"""

from typing import Any

import faiss
import numpy as np

PROBES = 8
TOLERANCE = 1e-4  # what exact types promise of a score; rotations in float32 are right to 1e-6


def problem(index: faiss.Index, factory: str, metric: int) -> str:
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
