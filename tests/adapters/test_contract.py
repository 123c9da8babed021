"""One contract for every backend: the same verbs, the same ids, the same scores as numpy."""

import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import numpy as np
import pytest

from faults.milvus_server import TOKEN
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.index import Index
from sscd_vec.adapters.matches import Matches
from sscd_vec.adapters.milvus import MilvusCollection
from sscd_vec.normalize import FingerprintMismatch, Normalizer, ScoreNorm

from .conftest import DIM, Photos, unit

Make = Callable[[Normalizer], Index]

# Recall@10 each approximate type must reach here (600 references, 40 queries), as stated in
# docs/adapters.md; exact types must return numpy's ids up to ties and its scores to 1e-4.
FAISS = {
    "Flat": ({}, 1.0),
    "HNSW32": ({"efSearch": 64}, 0.98),
    "IVF8,Flat": ({"nprobe": 8}, 1.0),
    "IVF16,Flat": ({"nprobe": 8}, 0.80),
    "IVF8,PQ5x4": ({"nprobe": 8}, 0.15),
}
MILVUS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "FLAT": ({}, {}, 1.0),
    "HNSW": ({"M": 16, "efConstruction": 100}, {"ef": 64}, 0.98),
    "IVF_FLAT": ({"nlist": 16}, {"nprobe": 8}, 0.80),
    "AUTOINDEX": ({}, {}, 0.95),
}
COPY = 0.99  # recall@1 of the 30 queries that are copies, on every type but PQ
SCORES = 1e-4


def backends() -> Iterator[Any]:
    for (factory, (parameters, recall)), metric in product(FAISS.items(), ("ip", "l2")):
        yield pytest.param(
            ("faiss", factory, metric, parameters, {}, recall), id=f"faiss-{factory}-{metric}"
        )
    for place, (kind, rest), metric in product(
        ("lite", "server"), MILVUS.items(), ("ip", "l2", "cosine")
    ):
        build, search, recall = rest
        yield pytest.param(
            (place, kind, metric, search, build, recall), id=f"{place}-{kind}-{metric}"
        )


@pytest.fixture(params=backends())
def backend(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Make, float, bool, bool]]:
    """How to make an index, its recall, whether it is exact, and whether its scores are."""
    place, kind, metric, search, build, recall = request.param
    made: list[Index] = []

    def make(normalizer: Normalizer) -> Index:
        if place == "faiss":
            index: Index = FaissIndex(normalizer, kind, metric, parameters=search)
        else:
            uri = (
                str(tmp_path / "m.db") if place == "lite" else request.getfixturevalue("server").uri
            )
            index = MilvusCollection(
                uri,
                f"c{uuid4().hex[:12]}",
                normalizer,
                metric=metric,
                index_type=kind,
                index_params=build,
                search_params=search,
                token="" if place == "lite" else TOKEN,
            )
        made.append(index)
        return index

    yield make, recall, recall == 1.0, "PQ" not in kind
    for index in made:
        if isinstance(index, MilvusCollection):
            index.drop()
            index.close()


def test_same_verbs_same_scores(
    backend: tuple[Make, float, bool, bool], photos: Photos, normalizer: Normalizer
) -> None:
    make, least_recall, exact, exact_scores = backend
    index = make(normalizer)
    assert len(index) == 0 and "r0" not in index
    assert index.search(photos.queries, 3).counts.tolist() == [0] * 40
    index.add([], np.empty((0, 30), dtype=np.float32))

    metadata = [{"n": i, "even": i % 2 == 0} for i in range(300)]
    half = photos.ids[:300], photos.references[:300], metadata
    assert index.add_batches([half, (photos.ids[300:], photos.references[300:])]) == 600
    wait_until_indexed(index)
    assert len(index) == 600 and "r599" in index and "r600" not in index

    scores = normalizer.scores(photos.queries, photos.references)
    found = index.search(photos.queries, 10)
    assert found.counts.tolist() == [10] * 40
    assert all(np.diff(found.scores[i : i + 10]).max() <= 1e-6 for i in range(0, 400, 10))
    if exact_scores:
        check_scores(found, scores)
    if exact:
        check_ids(found, scores)
        assert found.complete
    assert recall(found, scores) >= least_recall
    assert found[0][0].metadata == {"n": 0, "even": True} if exact_scores else True
    if exact_scores:
        hits = [found[i][0].id == f"r{i}" for i in range(30)]
        assert np.mean(hits) >= (1.0 if exact else COPY * least_recall)

    check_range(index, photos, scores, exact, exact_scores)
    check_changes(index, photos, normalizer, exact_scores)


def wait_until_indexed(index: Index) -> None:
    """A server builds its index after a flush; until then it compares with everything."""
    if isinstance(index, MilvusCollection) and not index.is_lite:
        table = index._storage
        deadline = time.monotonic() + 20
        while table.call("describe_index", index_name="vector")["indexed_rows"] < 600:
            assert time.monotonic() < deadline, "the server did not build its index"
            time.sleep(0.05)


def check_scores(found: Matches, scores: np.ndarray) -> None:
    """Whatever an index returns, its score is numpy's score of that pair."""
    rows = np.array([int(i[1:]) for i in found.ids])
    np.testing.assert_allclose(found.scores, scores[found.queries, rows], atol=SCORES)


def check_ids(found: Matches, scores: np.ndarray) -> None:
    """The ten best, up to ties: the scores agree place by place."""
    best = -np.sort(-scores, axis=1)[:, :10]
    np.testing.assert_allclose(found.scores.reshape(best.shape), best, atol=SCORES)


def recall(found: Matches, scores: np.ndarray) -> float:
    best = np.argsort(-scores, axis=1)[:, :10]
    hits = [
        len({m.id for m in row} & {f"r{i}" for i in b}) for row, b in zip(found, best, strict=True)
    ]
    return float(np.mean(hits)) / 10


def check_range(
    index: Index, photos: Photos, scores: np.ndarray, exact: bool, exact_scores: bool
) -> None:
    threshold = float(np.sort(scores.ravel())[-400])
    found = index.range_search(photos.queries, threshold)
    wanted = {(int(q), f"r{r}") for q, r in zip(*np.nonzero(scores >= threshold), strict=True)}
    got = set(zip(found.queries.tolist(), found.ids.tolist(), strict=True))
    assert len(got) == len(found.ids), "a match came twice"
    assert (found.scores >= threshold).all()
    assert found.complete == exact
    # Only scores within rounding of the threshold may differ.
    unsure = {
        (int(q), f"r{r}")
        for q, r in zip(*np.nonzero(abs(scores - threshold) < SCORES), strict=True)
    }
    if exact:
        assert got ^ wanted <= unsure
    elif exact_scores:
        assert got <= wanted | unsure
        assert len(got & wanted) >= 0.75 * len(wanted)
    calibrated = index.range_search(photos.queries)
    assert (calibrated.scores >= 0.2).all()
    above = index.search(photos.queries, 10, threshold="calibrated")
    assert (above.scores >= 0.2).all() and above.counts.max() <= 10
    if exact:
        assert len(above.ids) == min(len(calibrated.ids), len(above.ids)) > 0


def check_changes(index: Index, photos: Photos, normalizer: Normalizer, exact_scores: bool) -> None:
    # Replacing: same id, another picture, no metadata left over; the last of a repeated id wins.
    new = unit(np.random.default_rng(5).normal(size=(2, 30)))
    index.add(["r0", "r1", "r0"], np.stack([new[1], new[1], new[0]]))
    assert len(index) == 600
    top = index.search(new[:1], 600)
    assert len(top[0]) <= 600 and len({m.id for m in top[0]}) == len(top[0])
    if exact_scores:
        assert top[0][0].id == "r0" and top[0][0].metadata is None
        expected = normalizer.scores(new[:1], new[:1])[0, 0]
        assert abs(top[0][0].score - expected) < SCORES

    assert index.remove(["r0", "r1", "nowhere", "r1"]) == 2
    assert index.remove([]) == 0
    assert len(index) == 598 and "r0" not in index and "r2" in index
    gone = index.search(photos.queries, 1000)
    assert not {"r0", "r1"} & set(gone.ids.tolist())
    assert gone.counts.max() <= 598
    index.add("r0", photos.references[0], {"back": True})
    assert len(index) == 599
    if exact_scores:
        best = index.search(photos.queries[0], 1)[0][0]
        assert best.id == "r0" and best.metadata == {"back": True}


# ---------------------------------------------------------------------- one of each


@pytest.fixture(params=["faiss", "lite", "server"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """How to make an exact index of each backend, under a name of its own."""
    made: list[Index] = []

    def new(normalizer: Normalizer) -> Index:
        if request.param == "faiss":
            index: Index = FaissIndex(normalizer, path=tmp_path / f"{len(made)}.faiss")
        else:
            server = request.getfixturevalue("server") if request.param == "server" else None
            uri = str(tmp_path / "m.db") if server is None else server.uri
            token = "" if server is None else TOKEN
            index = MilvusCollection(uri, f"c{uuid4().hex[:12]}", normalizer, token=token)
        made.append(index)
        return index

    yield new
    for index in made:
        if isinstance(index, MilvusCollection) and not index._storage.connection.closed:
            index.drop()
        index.close()


def test_integer_ids(make: Make, photos: Photos, normalizer: Normalizer) -> None:
    index = make(normalizer)
    ids = np.arange(600, dtype=np.int64) * 10**15 - 5
    index.add(ids, photos.references)
    found = index.search(photos.queries[:3], 1)
    assert found.ids.dtype == np.int64
    assert found.ids.tolist() == ids[:3].tolist()
    assert int(ids[7]) in index and 3 not in index and "r0" not in index
    assert index.present([*ids[:3].tolist(), 3]) == set(ids[:3].tolist())
    with pytest.raises(TypeError, match="this index holds int ids, got str"):
        index.add(["a"], photos.references[:1])
    with pytest.raises(TypeError, match="all str or all int"):
        index.remove(cast(list[int], [1, "a"]))
    assert index.remove(ids[:2]) == 2 and len(index) == 598


def test_one_descriptor_for_many_ids_is_refused_before_anything_is_made(
    make: Make, photos: Photos, normalizer: Normalizer
) -> None:
    index = make(normalizer)
    one = photos.references[0]
    for wrong in (one, one[:, None, None]):  # as long as there are ids
        with pytest.raises(ValueError, match=r"one row for each id, got shape \(30,.* for 30 ids"):
            index.add([f"a{i}" for i in range(30)], wrong)
    assert len(index) == 0
    if isinstance(index, MilvusCollection):
        assert index.settings is None, "no collection was made"
    index.add([], [])
    index.add(["b"], one)
    assert index.search(one, 2).ids.tolist() == ["b"]


def test_ranges_come_in_blocks_of_queries(
    make: Make, photos: Photos, normalizer: Normalizer
) -> None:
    index = make(normalizer)
    assert [part.counts.tolist() for _, part in index.iterate_range(photos.queries, 0.0)] == [
        [0] * 40
    ]
    index.add(photos.ids, photos.references, [{"n": i} for i in range(600)])
    whole = index.range_search(photos.queries, 0.0)
    parts = list(index.iterate_range(photos.queries, 0.0, block=7))
    assert [begin for begin, _ in parts] == [0, 7, 14, 21, 28, 35]
    assert [len(part) for _, part in parts] == [7, 7, 7, 7, 7, 5]
    assert [i for _, part in parts for i in part.ids] == whole.ids.tolist()
    assert all(m.metadata == {"n": int(str(m.id)[1:])} for row in whole for m in row)
    bare = index.range_search(photos.queries, 0.0, metadata=False)
    assert bare.metadata is None and bare.ids.tolist() == whole.ids.tolist()
    assert list(index.iterate_range([], 0.0)) == []
    scores = normalizer.scores(photos.queries, photos.references)
    check_scores(whole, scores)
    expected = (scores >= 0).sum(axis=1)
    assert np.abs(whole.counts - expected).sum() <= (np.abs(scores) < SCORES).sum()


def test_bad_searches_are_named(make: Make, photos: Photos, normalizer: Normalizer) -> None:
    index = make(normalizer)
    index.add(photos.ids[:5], photos.references[:5])
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(ValueError, match="k: expected a positive integer"):
            index.search(photos.queries, wrong)  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="block: expected a positive integer, got -1"):
        index.iterate_range(photos.queries, 0.1, block=-1)
    for bad in (float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="expected a finite score or 'calibrated'"):
            index.range_search(photos.queries, bad)  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="expected a number, None or 'calibrated', got 'low'"):
        index.search(photos.queries, 1, "low")  # type: ignore[arg-type]  # the point
    for verb in (index.search, index.range_search):
        with pytest.raises(ValueError, match="expected 30 dimensions, got 0"):
            verb(np.empty((5, 0), dtype=np.float32))
        assert len(verb([])) == 0
        assert verb(np.empty((0, DIM), dtype=np.float32)).counts.tolist() == []
    if isinstance(index, FaissIndex):
        with pytest.raises(ValueError, match="filter: FAISS has none, got 'n > 3'"):
            index.iterate_range(photos.queries, 0.1, filter="n > 3")
    else:
        assert index.search(photos.queries[:1], 5, filter="n > 3").counts.tolist() == [0]


def test_what_was_committed_is_there_after_closing(
    make: Make, photos: Photos, normalizer: Normalizer
) -> None:
    index = make(normalizer)
    with index:
        index.add(photos.ids[:5], photos.references[:5])
        before = index.generation
        index.commit()
        assert index.generation != before
        committed = index.generation
        index.commit()
        assert index.generation == committed, "there was nothing to commit"
        assert not index.reload_if_changed()
        index.remove("r0")
    index.close()
    for verb in (lambda: index.search(photos.queries), lambda: index.add("x", photos.queries[0])):
        with pytest.raises(RuntimeError, match="closed"):
            verb()
    again: Index
    if isinstance(index, FaissIndex):
        assert index.path is not None
        again = FaissIndex.open(index.path, normalizer)
    else:
        assert isinstance(index, MilvusCollection)
        connection = index._storage.connection
        again = MilvusCollection(
            connection.address.uri, index.name, normalizer, token=connection.address.token
        )
    assert len(again) == 4 and "r0" not in again and "r1" in again
    if isinstance(again, MilvusCollection):
        again.drop()
    again.close()


def test_an_exception_closes_without_a_commit(
    make: Make, photos: Photos, normalizer: Normalizer
) -> None:
    index = make(normalizer)
    with pytest.raises(KeyError), index:
        index.add(photos.ids[:5], photos.references[:5])
        raise KeyError
    if isinstance(index, FaissIndex):
        assert index.path is not None and not index.path.exists()
    with pytest.raises(RuntimeError, match="closed"):
        index.add("x", photos.queries[0])


def test_only_a_normalizer_of_the_same_reference_side_takes_over(
    make: Make, photos: Photos, normalizer: Normalizer
) -> None:
    index = make(normalizer)
    index.add(photos.ids, photos.references)
    changed = normalizer.with_score_norm(ScoreNorm(beta=0.5, n=1, n_end=5))
    index.normalizer = changed
    found = index.search(photos.queries, 10)
    check_ids(found, changed.scores(photos.queries, photos.references))
    other = Normalizer.fit(unit(np.random.default_rng(9).normal(size=(500, DIM))))
    with pytest.raises(FingerprintMismatch, match="this index was built with"):
        index.normalizer = other
    assert index.normalizer.query_fingerprint == changed.query_fingerprint


def test_no_product_wakes_the_threads_of_numpy(
    make: Make, photos: Photos, normalizer: Normalizer
) -> None:
    """They would spin for 30 ms on the cores that FAISS or Milvus needs next."""
    made: list[str] = []

    def product(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        made.append("product")
        return np.asarray(np.matmul(rows, matrix))

    index = make(normalizer)
    assert index.normalizer.matmul is not np.matmul and index.normalizer.search is not None
    own = make(normalizer.with_products(product))
    for each in (index, own):
        each.add(photos.ids, photos.references)
        assert each.search(photos.queries[:9], 1).ids.tolist() == photos.ids[:9]
    assert made == ["product"] * 2, "somebody's own products are used"
