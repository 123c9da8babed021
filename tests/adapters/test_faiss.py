"""What is FAISS's own: padding, scores, training, tombstones, threads, GPUs."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sscd_vec.adapters.arguments import Batch, Wanted, padded
from sscd_vec.adapters.faiss import FaissIndex, search, types
from sscd_vec.adapters.matches import Matches
from sscd_vec.normalize import Normalizer

from .conftest import DIM, Photos, unit


@pytest.fixture
def index(photos: Photos, normalizer: Normalizer) -> FaissIndex:
    made = FaissIndex(normalizer)
    made.add(photos.ids, photos.references, [{"n": i} for i in range(600)])
    return made


def test_range_results_stream_in_blocks(index: FaissIndex, photos: Photos) -> None:
    whole = index.range_search(photos.queries, 0.0)
    parts = list(index.iterate_range(photos.queries, 0.0, block=7))
    assert [begin for begin, _ in parts] == [0, 7, 14, 21, 28, 35]
    assert [i for _, part in parts for i in part.ids] == whole.ids.tolist()


@pytest.mark.parametrize("metric", ["ip", "l2"])
def test_thresholds_beyond_float32_find_all_or_nothing(
    metric: Any,  # noqa: ANN401
    photos: Photos,
    normalizer: Normalizer,
) -> None:
    made = FaissIndex(normalizer, metric=metric)
    made.add(photos.ids, photos.references)
    for threshold, count in ((-1e300, 600), (1e300, 0)):
        assert made.range_search(photos.queries[:2], threshold).counts.tolist() == [count] * 2


def test_many_queries_are_searched_in_blocks(
    index: FaissIndex, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = index.search(photos.queries, 10, threshold=0.1)
    searched: list[int] = []
    nearest = FaissIndex._nearest

    def counting(self: FaissIndex, vectors: np.ndarray, k: int, wanted: Wanted) -> Matches:
        searched.append(len(vectors))
        return nearest(self, vectors, k, wanted)

    monkeypatch.setattr(FaissIndex, "_nearest", counting)
    monkeypatch.setattr("sscd_vec.adapters.index.SEARCH_BLOCK", 16)
    parts = index.search(photos.queries, 10, threshold=0.1)
    assert searched == [16, 16, 8]
    assert parts.ids.tolist() == whole.ids.tolist() and parts.metadata == whole.metadata
    assert parts.counts.tolist() == whole.counts.tolist()
    # Products of other shapes are summed in another order: rounding of numbers near 1.
    np.testing.assert_allclose(parts.scores, whole.scores, atol=1e-6)


@pytest.mark.parametrize(
    ("factory", "usual"),
    [
        ("HNSW16", {"efSearch": 64}),
        ("IVF32,Flat", {"nprobe": 16}),
        ("IVF4,Flat", {"nprobe": 4}),
        ("OPQ5,IVF32,PQ5x4", {"nprobe": 16}),
        ("PQ5x4,RFlat", {"k_factor_rf": 8}),
        ("IVF32,PQ5x4,RFlat", {"nprobe": 16, "k_factor_rf": 8}),
        ("Flat", {}),
    ],
)
def test_lists_and_graphs_are_searched_widely_unless_told_otherwise(
    photos: Photos, normalizer: Normalizer, tmp_path: Path, factory: str, usual: dict[str, float]
) -> None:
    def setting(index: Any, name: str) -> float:  # noqa: ANN401  (types differ in what they have)
        if name == "k_factor_rf":
            return float(index.k_factor)
        lists = faiss.try_extract_index_ivf(index)
        return float(getattr(index.hnsw if lists is None else lists, name))

    made = FaissIndex(normalizer, factory)
    assert made.parameters == usual
    for name, value in usual.items():
        assert setting(made.index, name) == value
        narrow = FaissIndex(normalizer, factory, parameters={name: 2})
        narrow.add(photos.ids, photos.references)
        narrow.save(tmp_path / "narrow.faiss")
        assert setting(FaissIndex.open(tmp_path / "narrow.faiss", normalizer).index, name) == 2


def test_refining_looks_at_more_than_were_asked_for_but_at_no_more_than_there_are(
    photos: Photos, normalizer: Normalizer
) -> None:
    exact, coarse, refined = (
        FaissIndex(normalizer, factory, parameters=parameters)
        for factory, parameters in (
            ("Flat", {}),
            ("PQ8x4,RFlat", {"k_factor_rf": 1}),
            ("PQ8x4,RFlat", {}),
        )
    )
    found = []
    for index in (exact, coarse, refined):
        index.add(photos.ids, photos.references)
        found.append([{match.id for match in row} for row in index.search(photos.queries, 10)])
    truth, few, many = found
    hits = [sum(len(a & b) for a, b in zip(truth, each, strict=True)) for each in (few, many)]
    assert hits[1] > 1.3 * hits[0]
    every = refined.search(photos.queries, 600)
    assert every.counts.tolist() == [600] * 40
    np.testing.assert_allclose(every.scores, exact.search(photos.queries, 600).scores, atol=1e-5)


def test_tombstones_do_not_make_short_lists_search_everything(
    photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FaissIndex(normalizer, "IVF16,Flat", parameters={"nprobe": 1})
    made.add(photos.ids, photos.references)
    expected = made.search(photos.queries, 200)
    assert expected.counts.max() < 200, "one list holds fewer"
    gone = str(expected.ids[0])
    made.remove(gone)
    asked: list[int] = []
    top = search.Searcher._top

    def counting(self: search.Searcher, vectors: np.ndarray, k: int) -> Any:  # noqa: ANN401
        asked.append(k)
        return top(self, vectors, k)

    monkeypatch.setattr(search.Searcher, "_top", counting)
    found = made.search(photos.queries, 200)
    assert asked == [208]
    assert found.ids.tolist() == [i for i in expected.ids if i != gone]
    made.remove(str(found.ids[0]))  # what is dead is looked up anew
    assert found.ids[0] not in set(made.search(photos.queries, 200).ids)


@pytest.mark.parametrize(
    ("factory", "metric"),
    [
        ("Flat", "ip"),
        ("IVF4,Flat", "l2"),
        ("RR32,IVF4,SQ8", "ip"),
        ("SQfp16", "l2"),
        ("HNSW16", "ip"),
    ],
)
def test_a_query_near_many_tombstones_holds_up_no_other(
    factory: str,
    metric: Any,  # noqa: ANN401
    photos: Photos,
    normalizer: Normalizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(6)
    crowd = unit(photos.queries[20] + 0.02 * rng.normal(size=(300, DIM)))
    made = FaissIndex(normalizer, factory, metric)
    made.add(photos.ids, photos.references)
    expected = made.search(photos.queries, 5)
    made.add([f"crowd{i}" for i in range(300)], crowd)
    made.remove([f"crowd{i}" for i in range(300)])
    searched: list[int] = []
    top = search.Searcher._top

    def counting(self: search.Searcher, vectors: np.ndarray, k: int) -> Any:  # noqa: ANN401
        searched.append(len(vectors))
        return top(self, vectors, k)

    monkeypatch.setattr(search.Searcher, "_top", counting)
    monkeypatch.setattr(search, "LARGEST_RESULT", 1)  # no two of them fit
    found = made.search(photos.queries, 5)
    assert found.counts.tolist() == [5] * 40
    assert searched[0] == 40 and set(searched[1:]) <= {1}
    assert (len(searched) > 1) == (factory in ("SQfp16", "HNSW16")), "the others leave out the dead"
    if factory == "HNSW16":  # a graph with more nodes is searched another way
        assert np.mean(found.scores) == pytest.approx(np.mean(expected.scores), abs=0.01)
    else:
        assert found.ids.tolist() == expected.ids.tolist()
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)


def test_ids_as_numpy_and_iterators_give_them(photos: Photos, normalizer: Normalizer) -> None:
    made = FaissIndex(normalizer)
    made.add(np.arange(3), photos.references[:3])
    assert all(i in made for i in np.arange(3)) and np.int64(3) not in made
    made.add(np.array(7), photos.references[3])
    assert 7 in made and made.remove(np.array(7)) == 1
    assert True not in made and 1.0 not in made
    named = FaissIndex(normalizer)
    batches: list[Any] = [
        ("abc", photos.references[0]),
        ((f"r{i}" for i in range(2)), photos.references[:2]),
    ]
    assert named.add_batches(batches) == 3 == len(named)
    assert "abc" in named and np.str_("r1") in named
    assert named.remove(np.array("abc")) == 1 and len(named) == 2


def test_threads_that_search_at_once_after_an_add_find_what_one_finds(
    photos: Photos, normalizer: Normalizer
) -> None:
    for _ in range(5):  # what is made at the first search after a change is made again
        made = FaissIndex(normalizer)
        made.add(range(600), photos.references)
        made.remove(599)
        ready = threading.Barrier(6)

        def search(index: FaissIndex = made, ready: threading.Barrier = ready) -> list[int]:
            ready.wait()
            assert 0 in index and 599 not in index
            found: list[int] = index.search(photos.queries, 3).ids.tolist()
            return found

        with ThreadPoolExecutor(6) as threads:
            found = [future.result() for future in [threads.submit(search) for _ in range(6)]]
        assert found == [made.search(photos.queries, 3).ids.tolist()] * 6
        assert len(made) == 599


def test_one_large_add_can_be_replaced_and_counted_like_any(
    photos: Photos, normalizer: Normalizer
) -> None:
    made = FaissIndex(normalizer)
    assert "r0" not in made
    made.add(photos.ids, photos.references)
    made.add(["r0", "new"], photos.references[:2])
    assert len(made) == 601 and made.index.ntotal == 602 and "new" in made
    assert made.remove(photos.ids) == 600 and len(made) == 1


def test_nothing_is_added_of_a_large_call_with_a_bad_row(
    photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(types, "BLOCK", 100)
    index = FaissIndex(normalizer)
    index.add("there", photos.references[0])
    spoilt = photos.references.copy()
    spoilt[-1, 0] = np.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        index.add(photos.ids, spoilt)
    with pytest.raises(ValueError, match="expected unit length"):
        index.add(photos.ids, np.concatenate([photos.references[:-1], 2 * spoilt[:1]]))
    notes = [{"n": i} for i in range(599)]
    with pytest.raises(TypeError, match="metadata"):
        index.add(photos.ids, photos.references, [*notes, {"n": object()}])
    assert len(index) == index.index.ntotal == 1
    index.add(photos.ids, photos.references, [*notes, None])
    assert len(index) == 601
    assert index.search(photos.references[598], 1)[0][0][::2] == ("r598", {"n": 598})


@pytest.mark.parametrize("length", [3.0, np.inf])
def test_nothing_is_added_of_a_large_call_with_too_long_a_row(
    length: float, photos: Photos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(types, "BLOCK", 100)
    rules = Normalizer.fit(photos.references, whitening=None, unit=False, max_length=2.0)
    index = FaissIndex(rules)
    long = photos.references.copy()
    long[-1] *= length
    with pytest.raises(ValueError, match="longer than R|infinity"):
        index.add(photos.ids, long)
    assert len(index) == index.index.ntotal == 0


def test_padding_changes_no_score(photos: Photos, normalizer: Normalizer) -> None:
    assert FaissIndex(normalizer, "IVF4,PQ7x4").index.d == 35
    assert FaissIndex(normalizer, "OPQ5,IVF4,PQ5x4").index.d == 35
    assert FaissIndex(normalizer, "PRQ5x2x4").index.d == 35
    assert FaissIndex(normalizer, "IVF4,PLSQ5x2x4").index.d == 35
    assert FaissIndex(normalizer, "IVF4,PQ5+2", "l2").index.d == 40
    assert FaissIndex(Normalizer.identity(31), "IMI2x4,Flat", "l2").index.d == 34
    assert FaissIndex(normalizer, "Flat").index.d == 32
    references = padded(normalizer.references(photos.references), 35)
    queries = padded(normalizer.queries(photos.queries), 35)
    expected = normalizer.scores(photos.queries, photos.references)
    np.testing.assert_allclose(queries @ references.T, expected, atol=1e-5)
    with pytest.raises(ValueError, match="FAISS refuses 'Nonsense'"):
        FaissIndex(normalizer, "Nonsense")


@pytest.mark.parametrize(
    ("factory", "metric", "problem"),
    [
        ("IDMap,Flat", "ip", "leave IDMap out"),
        ("RR32,IDMap,Flat", "l2", "leave IDMap out"),
        ("PQ8x4,Refine(IDMap,Flat)", "ip", "leave IDMap out"),
        ("Residual4,PQ8x4", "l2", "cannot be searched"),
        ("PCAR16,Flat", "ip", r"reduce with Normalizer\.fit"),
        ("OPQ8_16,IVF4,PQ8", "l2", r"reduce with Normalizer\.fit"),
        ("L2norm,Flat", "l2", "leave L2norm out"),
        ("PCAR32,Flat", "ip", "changes the inner products .* leave PCAR32 out"),
        ("RR32,PCA32,IVF4,Flat", "ip", "leave PCA32 out"),
        ("PCAW32,Flat", "l2", "changes the distances .* leave PCAW32 out"),
        ("PCA16,RR32,Flat", "l2", "leave PCA16 out"),
        ("ITQ32,Flat", "ip", "leave ITQ32 out"),
        ("ITQ32,Flat", "l2", "leave ITQ32 out"),
        ("LSH", "l2", "compares bits"),
        ("IVF4,ITQ32,SH1.2", "ip", "compares bits"),
        ("IVF4,ITQ32,SH1.2", "l2", "compares bits"),
        ("SQ8_direct", "ip", "keeps whole numbers only"),
        ("IVF4,SQ8_direct_signed", "l2", "keeps whole numbers only"),
        ("HNSW16_SQ8_direct", "l2", "keeps whole numbers only"),
        ("Flat,Refine(SQ8_direct)", "ip", "keeps whole numbers only"),
        ("IVF4,RaBitQ", "ip", "use 'RR32,IVF4,RaBitQ'"),
        ("Pad40,RaBitQ", "l2", "use 'RR40,Pad40,RaBitQ'"),
        ("HNSW16_PQ8x4", "ip", "returns another metric"),
    ],
)
def test_factories_that_cannot_give_scores_are_refused(
    factory: str,
    metric: Any,  # noqa: ANN401
    problem: str,
    normalizer: Normalizer,
) -> None:
    with pytest.raises(ValueError, match=problem):
        FaissIndex(normalizer, factory, metric)


@pytest.mark.parametrize(
    ("factory", "metric", "error"),
    [
        ("RR32,Flat", "ip", 1e-5),
        ("RR40,IVF4,Flat", "ip", 1e-5),
        ("Pad40,HNSW16", "ip", 1e-5),
        ("PCAR32,Flat", "l2", 1e-5),
        ("PCA16,Flat,RFlat", "ip", 1e-5),  # what refines sees whole vectors
        ("SQfp16", "l2", 1e-3),  # values near 1 have steps of 5e-4 there
        ("SQ8", "ip", 0.1),  # of 32 values, some beyond the range of the background's
    ],
)
def test_what_keeps_scores_is_not_refused(
    factory: str,
    metric: Any,  # noqa: ANN401
    error: float,
    photos: Photos,
    normalizer: Normalizer,
) -> None:
    made = FaissIndex(normalizer, factory, metric)
    made.add(range(600), photos.references)
    found = made.search(photos.queries, 5)
    expected = normalizer.scores(photos.queries, photos.references)[found.queries, found.ids]
    assert len(found.ids) == 200 and np.abs(found.scores - expected).max() < error


@pytest.mark.parametrize("factory", ["RR32,IVF4,RaBitQ", "IVF4,PQ8x4", "RQ4x4", "IVF4,SQ4"])
def test_codes_lose_precision_but_do_not_shift_scores(
    factory: str, photos: Photos, normalizer: Normalizer
) -> None:
    made = FaissIndex(normalizer, factory)
    made.add(range(600), photos.references)
    found = made.search(photos.queries, 600)
    errors = (
        found.scores
        - normalizer.scores(photos.queries, photos.references)[found.queries, found.ids]
    )
    # Of 24 000 pairs with errors of 0.3 or less that 600 references share: 0.3 / sqrt(600), thrice.
    assert abs(errors.mean()) < 0.04


def test_a_transform_that_training_makes_unscorable_is_refused_then(
    photos: Photos, normalizer: Normalizer
) -> None:
    made = FaissIndex(normalizer, "PCAR32,Flat", "l2")
    index: Any = made.index
    rotation: Any = faiss.downcast_VectorTransform(index.chain.at(0))
    rotation.eigen_power = -0.5  # now it whitens
    for _ in range(2):
        with pytest.raises(ValueError, match="trained on 2000 descriptors, changes the distances"):
            made.add(photos.ids, photos.references)
    assert len(made) == 0 == made.index.ntotal


@pytest.mark.parametrize(
    ("factory", "parameters", "exact"),
    [
        ("IVF8,Flat", {}, True),
        ("IVF8,Flat", {"nprobe": 7}, False),
        ("IVF8,Flat", {"max_codes": 200}, False),
        ("IVF64_HNSW4,Flat", {"nprobe": 64}, False),
        ("IVF8(IVF4,Flat),Flat", {"nprobe": 8}, False),
    ],
)
def test_complete_is_claimed_only_if_every_list_is_searched_to_its_end(
    photos: Photos,
    normalizer: Normalizer,
    factory: str,
    parameters: dict[str, float],
    exact: bool,
) -> None:
    made = FaissIndex(normalizer, factory, parameters=parameters)
    made.add(photos.ids, photos.references)
    everything = made.range_search(photos.queries, -10.0)
    assert everything.complete == exact == made.search(photos.queries, 3).complete
    if exact:
        assert everything.counts.tolist() == [600] * 40


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize(
    "factory",
    ["IVF4,PQ8x4fs", "OPQ8,IVF4,PQ8x4fs", "PQ8x4fs", "PQ8x4fs,RFlat", "IVF4,FlatDedup"],
)
def test_types_whose_own_range_search_or_removal_is_missing_or_wrong(
    factory: str,
    metric: Any,  # noqa: ANN401
    photos: Photos,
    normalizer: Normalizer,
    tmp_path: Path,
) -> None:
    made = FaissIndex(
        normalizer, factory, metric, parameters={"nprobe": 4} if "IVF" in factory else None
    )
    made.add(photos.ids, photos.references)
    wide = made.range_search(photos.queries, -10.0)
    assert wide.counts.tolist() == [600] * 40
    top = made.search(photos.queries, 5)
    first = wide.scores[wide.offsets[:-1]]
    if "RFlat" in factory:  # refines more candidates, and so may find better ones
        assert (first >= top.scores[::5] - 1e-5).all()
    else:
        np.testing.assert_allclose(top.scores[::5], first, atol=1e-5)
    made.remove(photos.ids[:200])
    assert not set(photos.ids[:200]) & set(made.range_search(photos.queries, -10.0).ids)
    assert made.compact() == 200 and made.index.ntotal == len(made) == 400
    made.save(tmp_path / "a.faiss")
    opened = FaissIndex.open(tmp_path / "a.faiss", normalizer)
    assert (
        opened.search(photos.queries, 5).ids.tolist() == made.search(photos.queries, 5).ids.tolist()
    )


@pytest.mark.parametrize(
    ("factory", "metric"),
    [
        ("PQ8x4,RFlat", "ip"),
        ("PQ8x4,RFlat", "l2"),
        ("IVF4,PQ8x4,RFlat", "ip"),
        ("IVF4,PQ8+8", "l2"),
    ],
)
def test_range_search_finds_by_refined_scores(
    factory: str,
    metric: Any,  # noqa: ANN401
    photos: Photos,
    normalizer: Normalizer,
) -> None:
    made = FaissIndex(normalizer, factory, metric)
    made.add(photos.ids, photos.references)
    found, best = made.range_search(photos.queries, 0.3), made.search(photos.queries, 600, 0.3)
    assert len(best.ids) > 20
    assert set(zip(found.queries, found.ids, strict=True)) == set(
        zip(best.queries, best.ids, strict=True)
    )


def test_rows_with_one_vector_can_be_removed_and_saved(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    made = FaissIndex(normalizer, "IVF4,FlatDedup")
    twins = [f"t{i}" for i in range(600)]
    made.add(photos.ids + twins, np.concatenate([photos.references, photos.references]))
    made.remove(photos.ids)
    with pytest.raises(RuntimeError, match="IVFFlatDedup cannot be made again .* dead rows stay"):
        made.compact()
    made.save(tmp_path / "a.faiss")
    opened = FaissIndex.open(tmp_path / "a.faiss", normalizer)
    for each in (made, opened):
        assert len(each) == 600
        assert each.search(photos.references[:9], 1).ids.tolist() == twins[:9]
    made.remove(twins)
    with pytest.raises(RuntimeError, match="rows of equal vectors"):
        made.compact()
    made.add(photos.ids[:50], photos.references[:50])
    assert made.search(photos.references[:9], 1).ids.tolist() == photos.ids[:9]


@pytest.mark.skipif(not hasattr(faiss, "IndexRaBitQFastScan"), reason="an older FAISS")
@pytest.mark.parametrize("factory", ["RR32,RaBitQfs", "RR32,IVF4,RaBitQfs"])
def test_codes_that_made_again_would_score_otherwise_keep_their_dead(
    factory: str, photos: Photos, normalizer: Normalizer
) -> None:
    made = FaissIndex(normalizer, factory)
    made.add(photos.ids, photos.references)
    made.remove(photos.ids[:100])
    before = made.search(photos.queries, 5)
    with pytest.raises(RuntimeError, match="cannot be made again from what it keeps"):
        made.compact()
    assert made.search(photos.queries, 5).ids.tolist() == before.ids.tolist()
    if "IVF" in factory:  # the others cannot be copied
        made.remove(photos.ids)
        assert made.compact() == 600 and made.index.ntotal == 0


def test_a_graph_that_takes_one_add_says_so_and_stays_whole(
    photos: Photos, normalizer: Normalizer
) -> None:
    made = FaissIndex(normalizer, "NSG16")
    with pytest.raises(RuntimeError, match="cannot add 50 rows to NSG16 with 0 .* more than 100"):
        made.add(photos.ids[:50], photos.references[:50])
    made.add(photos.ids, photos.references)
    before = made.search(photos.queries, 3).ids.tolist()
    with pytest.raises(RuntimeError, match="cannot add 1 rows to NSG16 with 600 .* use HNSW"):
        made.add("r0", photos.references[1])
    assert made.search(photos.queries, 3).ids.tolist() == before
    assert len(made) == 600 == made.index.ntotal
    made.remove(photos.ids[:100])
    assert made.compact() == 100 and made.index.ntotal == 500


@pytest.mark.parametrize("factory", ["NSG16", "NSG16,RFlat"])
def test_a_graph_that_takes_one_add_is_given_all_rows_of_a_call(
    factory: str, photos: Photos, normalizer: Normalizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(types, "BLOCK", 150)
    made = FaissIndex(normalizer, factory)
    made.add(photos.ids, photos.references)
    assert made.search(photos.references[:20], 1).ids.tolist() == photos.ids[:20]


def test_a_type_that_keeps_its_dead_says_so_once_and_goes_on(
    normalizer: Normalizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise RuntimeError("compact: cannot give its vectors back")

    monkeypatch.setattr(types, "without_dead", cannot)
    made = FaissIndex(normalizer)
    rows = unit(np.random.default_rng(3).normal(size=(3000, DIM)))
    made.add(range(3000), rows)
    assert made.remove(range(2000)) == 2000 and made.remove(range(2000, 2500)) == 500
    assert len(made) == 500 and made.index.ntotal == 3000
    assert caplog.text.count("cannot give its vectors back") == 1
    assert made.search(rows[2500:2501], 1).ids.tolist() == [2500]
    with pytest.raises(RuntimeError, match="cannot give its vectors back"):
        made.compact()


def test_training_needs_enough_background(photos: Photos, normalizer: Normalizer) -> None:
    with pytest.raises(ValueError, match="keeps no background"):
        FaissIndex(Normalizer.identity(DIM), "IVF4,Flat").add(photos.ids, photos.references)
    few = FaissIndex(normalizer, "IVF4096,Flat")
    with pytest.raises(ValueError, match=r"cannot train IVF4096,Flat on 2000 descriptors"):
        few.add(photos.ids, photos.references)
    trained = FaissIndex(Normalizer.identity(DIM), "IVF4,Flat").train(photos.references)
    trained.add(photos.ids, photos.references)
    assert len(trained) == 600
    with pytest.raises(RuntimeError, match="expected an empty index"):
        trained.train(photos.references)


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "IVF4,Flat", "IVF4,PQ5x4", "HNSW16"])
def test_compaction_keeps_answers_and_frees_rows(
    factory: str, photos: Photos, normalizer: Normalizer
) -> None:
    made = FaissIndex(normalizer, factory, parameters={"nprobe": 4} if "IVF" in factory else None)
    made.add(photos.ids, photos.references, [{"n": i} for i in range(600)])
    made.remove(photos.ids[::3])
    assert made.index.ntotal == 600 and len(made) == 400
    before = made.search(photos.queries, 10)
    assert made.compact() == 200 and made.index.ntotal == 400
    after = made.search(photos.queries, 10)
    assert all(m.metadata == {"n": int(str(m.id)[1:])} for row in after for m in row)
    if factory == "HNSW16":  # a rebuilt graph is another graph
        assert np.mean(before.scores) == pytest.approx(np.mean(after.scores), abs=0.01)
    else:
        assert before.ids.tolist() == after.ids.tolist()
        np.testing.assert_array_equal(before.scores, after.scores)
    made.add(photos.ids[:3], photos.references[:3])  # rows are numbered on without gaps
    top = made.search(photos.references[:1], 1)
    if "PQ" not in factory:
        assert top.ids.tolist() == ["r0"]


def test_replacing_many_times_compacts_by_itself(normalizer: Normalizer) -> None:
    rng = np.random.default_rng(3)
    made = FaissIndex(normalizer, compact_at=0.25)
    for _ in range(8):
        made.add(range(500), unit(rng.normal(size=(500, DIM))))
    assert len(made) == 500
    assert made.index.ntotal <= 500 + 1000 + 500


def test_streaming_holds_one_batch_at_a_time(normalizer: Normalizer) -> None:
    alive = 0
    most = 0

    class Rows(np.ndarray[Any, np.dtype[np.float32]]):
        def __del__(self) -> None:
            nonlocal alive
            if self.base is None:
                alive -= 1

    def batches() -> Iterator[Batch]:
        nonlocal alive, most
        rng = np.random.default_rng(0)
        for n in range(20):
            rows = Rows((100, DIM), dtype=np.float32)
            rows[:] = unit(rng.normal(size=(100, DIM)))
            alive += 1
            most = max(most, alive)
            yield list(range(100 * n, 100 * n + 100)), rows

    made = FaissIndex(normalizer)
    assert made.add_batches(batches()) == 2000 == len(made)
    assert most <= 2


def test_bad_input_is_named(index: FaissIndex, photos: Photos) -> None:
    with pytest.raises(ValueError, match="as many descriptors as ids, got 2 for 1"):
        index.add(["a"], photos.references[:2])
    with pytest.raises(ValueError, match="as many metadata as ids"):
        index.add(["a"], photos.references[:1], [None, None])
    with pytest.raises(TypeError, match="what JSON can hold"):
        index.add(["a"], photos.references[:1], [{"x": object()}])
    with pytest.raises(ValueError, match="what JSON can hold"):
        index.add(["a"], photos.references[:1], [{"x": float("nan")}])
    with pytest.raises(TypeError, match=r"names that are strings, got \[3, 'x'\]"):
        index.add(["a"], photos.references[:1], [{3: 4, "x": 5}])  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"names that are strings, got \[1, '1'\]"):
        index.add(["a"], photos.references[:1], [{"x": [{"y": {1: 2, "1": 3}}]}])
    with pytest.raises(ValueError, match="block: expected a positive integer, got -1"):
        index.iterate_range(photos.queries, 0.1, block=-1)
    with pytest.raises(ValueError, match="non-empty"):
        index.add([""], photos.references[:1])
    with pytest.raises(TypeError, match="got bool"):
        index.add([True], photos.references[:1])
    with pytest.raises(ValueError, match="NaN or infinity"):
        index.add(["a"], np.full((1, DIM), np.nan, dtype=np.float32))
    with pytest.raises(ValueError, match="k: expected a positive integer"):
        index.search(photos.queries, 0)
    with pytest.raises(ValueError, match="threshold"):
        index.search(photos.queries, 1, threshold=float("nan"))
    with pytest.raises(ValueError, match="expected 'ip' or 'l2'"):
        FaissIndex(index.normalizer, metric="cosine")  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="does not know 'nprobes'"):
        FaissIndex(index.normalizer, parameters={"nprobes": 1})
    with pytest.raises(ValueError, match=r"Unicode text, got 'a\\udcff'"):
        index.add(["a\udcff"], photos.references[:1])  # a file name that is no UTF-8
    with pytest.raises(ValueError, match="what JSON can hold"):
        index.add(["a"], photos.references[:1], [{"x": "\udcff"}])
    with pytest.raises(ValueError, match="at most 65535 bytes, got 65536 in 'éé"):
        index.add(["é" * 32_768], photos.references[:1])
    for wrong in (b"a", Path("a"), None, 1.5):
        with pytest.raises(TypeError, match="ids: expected a str, an int, or a sequence of either"):
            index.add(wrong, photos.references[:1])  # type: ignore[arg-type]  # the point
    with pytest.raises(TypeError, match="add_batches takes generators"):
        index.add(["a"], (row for row in photos.references))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a finite score or 'calibrated', got None"):
        index.range_search(photos.queries, None)  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="device: expected one of"):
        FaissIndex(index.normalizer, device="tpu")  # type: ignore[arg-type]  # the point
    with pytest.raises(ValueError, match="compact_at: expected a share above 0"):
        FaissIndex(index.normalizer, compact_at=0)
    assert len(index) == 600 and index.index.ntotal == 600, "a refused add leaves nothing behind"
    for verb in (index.search, index.range_search):
        with pytest.raises(ValueError, match="expected 30 dimensions, got 0"):
            verb(np.empty((5, 0), dtype=np.float32))
        assert len(verb([])) == 0
    assert index.search(np.empty((0, DIM), dtype=np.float32)).counts.tolist() == []
    assert index.range_search(np.empty((0, DIM), dtype=np.float32)).counts.tolist() == []


class FakeGpuIndex:
    """A FAISS index with a GPU's limits: k and nprobe up to 2048, no range search."""

    def __init__(self, index: faiss.Index) -> None:
        self.inner = faiss.clone_index(index)
        self.searches = 0

    def search(self, vectors: np.ndarray, k: int) -> Any:  # noqa: ANN401
        lists = faiss.try_extract_index_ivf(self.inner)
        assert k <= 2048 and (lists is None or lists.nprobe <= 2048), "a GPU refuses more"
        self.searches += 1
        return self.inner.search(vectors, k)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpuIndex]:
    """What was copied to the GPU that FAISS sees from now on."""
    made: list[FakeGpuIndex] = []

    def to_gpu(resources: object, device: int, index: faiss.Index) -> FakeGpuIndex:
        made.append(FakeGpuIndex(index))
        return made[-1]

    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    return made


def test_gpus_that_are_not_there_are_refused(normalizer: Normalizer) -> None:
    for device in (0, -1):
        with pytest.raises(RuntimeError, match=f"expected GPU {device}, but FAISS sees 0 GPUs"):
            FaissIndex(normalizer).to_gpu(device)


def test_gpu_limits_are_respected(
    photos: Photos, normalizer: Normalizer, copies: list[FakeGpuIndex]
) -> None:
    with pytest.raises(RuntimeError, match="not HNSW16"):
        FaissIndex(normalizer, "HNSW16", device="gpu")
    FaissIndex(normalizer, "HNSW16")  # automatic: stays on the CPU
    assert not copies

    rng = np.random.default_rng(4)
    rows = unit(rng.normal(size=(3000, DIM)))
    cpu, gpu = FaissIndex(normalizer, device="cpu"), FaissIndex(normalizer)
    for device in (1, -1):
        with pytest.raises(RuntimeError, match=f"expected GPU {device}, but FAISS sees 1 GPU"):
            gpu.to_gpu(device)
    for each in (cpu, gpu):
        each.add(range(3000), rows)
    for k in (10, 2500):  # over the limit the CPU answers
        expected, found = (i.search(photos.queries, k) for i in (cpu, gpu))
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)
    for threshold in (-0.5, 0.1):  # thousands per query, and a few
        expected, found = (i.range_search(photos.queries, threshold) for i in (cpu, gpu))
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)
    assert len(copies) == 2, "of the empty index, and of the full one"
    assert copies[0].searches == 0 and copies[1].searches >= 3
    gpu.add(-1, rows[0])
    assert gpu.search(rows[:1], 2).ids.tolist() in ([0, -1], [-1, 0])
    assert len(copies) == 3, "the copy is made again after a write"
    gpu.to_cpu().search(rows[:1], 2)
    assert copies[2].searches == 1
    every_list = FaissIndex(normalizer, "IVF4,Flat", parameters={"nprobe": 4096})
    every_list.add(range(3000), rows)
    assert every_list.search(rows[:1], 1).ids.tolist() == [0]
    assert every_list.range_search(rows[:1], -9.0).counts.tolist() == [3000]


@pytest.mark.parametrize("when", ["at once", "when it has grown"])
def test_an_index_that_the_gpu_refuses_is_searched_on_the_cpu_unless_it_was_asked_for(
    when: str,
    photos: Photos,
    normalizer: Normalizer,
    copies: list[FakeGpuIndex],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("codes of 8 bits are not supported")

    willing = FaissIndex(normalizer, "IVF4,SQ8", device="gpu")
    if when == "at once":
        monkeypatch.setattr(faiss, "index_cpu_to_gpu", refuse)
        with pytest.raises(RuntimeError, match="GPU 0 refuses IVF4,SQ8 .*8 bits.* to_cpu"):
            FaissIndex(normalizer, "IVF4,SQ8", device="gpu")
        assert not caplog.records
    automatic, cpu = (FaissIndex(normalizer, "IVF4,SQ8", device=d) for d in ("auto", "cpu"))
    assert ("it is searched on the CPU" in caplog.text) == (when == "at once")
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", refuse)
    for each in (willing, automatic, cpu):
        each.add(photos.ids, photos.references)
    for _ in range(2):
        found, expected = (each.search(photos.queries, 5) for each in (automatic, cpu))
        assert found.ids.tolist() == expected.ids.tolist()
        found, expected = (each.range_search(photos.queries, 0.1) for each in (automatic, cpu))
        assert found.ids.tolist() == expected.ids.tolist()
    assert caplog.text.count("GPU 0 refuses IVF4,SQ8") == 1, "it says so once"
    with pytest.raises(RuntimeError, match="GPU 0 refuses"):
        willing.search(photos.queries, 5)
    assert (
        willing.to_cpu().search(photos.queries, 5).ids.tolist()
        == automatic.search(photos.queries, 5).ids.tolist()
    )


def test_a_gpu_serves_one_thread_at_a_time(
    photos: Photos,
    normalizer: Normalizer,
    copies: list[FakeGpuIndex],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = FaissIndex(normalizer, device="gpu")
    made.add(photos.ids, photos.references)
    inside, most, search = 0, 0, FakeGpuIndex.search

    def watched(self: FakeGpuIndex, vectors: np.ndarray, k: int) -> Any:  # noqa: ANN401
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)  # lets the others come
        found = search(self, vectors, k)
        inside -= 1
        return found

    monkeypatch.setattr(FakeGpuIndex, "search", watched)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: made.search(photos.queries, 5), range(8)))
    assert most == 1 and len(copies) == 2
