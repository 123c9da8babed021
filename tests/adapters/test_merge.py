"""Large FAISS indexes: built in parts, merged, mapped, with exact scores from what refines."""

from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from sscd_vec.adapters.faiss import FaissIndex, merge_indexes
from sscd_vec.normalize import Normalizer
from tests.adapters.conftest import DIM, Photos

FACTORIES = [
    "IVF8,SQ8,Refine(SQfp16)",
    "RR32,IVF8,RaBitQ,Refine(SQfp16)",
    "IVF8,PQ16x4fs,Refine(SQfp16)",
    "IVF8,SQ8",
    "IVF8,Flat",
]


def built(
    photos: Photos, normalizer: Normalizer, folder: Path, factory: str, parts: int = 3
) -> list[Path]:
    FaissIndex(normalizer, factory).train(photos.references).save(folder / "trained.faiss")
    paths = []
    for number in range(parts):
        part = FaissIndex.open(folder / "trained.faiss", normalizer)
        part.add_batches([(photos.ids[number::parts], photos.references[number::parts])])
        paths.append(folder / f"{number}.faiss")
        part.save(paths[-1])
    return paths


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("mmap", [False, True])
def test_merged_parts_find_what_one_index_finds(
    photos: Photos, normalizer: Normalizer, tmp_path: Path, factory: str, mmap: bool
) -> None:
    parts = built(photos, normalizer, tmp_path, factory)
    assert merge_indexes(parts, tmp_path / "all.faiss", normalizer) == 600
    whole = FaissIndex.open(tmp_path / "trained.faiss", normalizer, parameters={"nprobe": 8})
    whole.add(photos.ids, photos.references)
    merged = FaissIndex.open(
        tmp_path / "all.faiss", normalizer, mmap=mmap, parameters={"nprobe": 8}
    )
    expected, found = whole.search(photos.queries, k=1), merged.search(photos.queries, k=1)
    assert found.ids.tolist() == expected.ids.tolist()
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-6)
    assert len(merged) == 600 and "r599" in merged


@pytest.mark.parametrize("factory", FACTORIES[:3])
def test_refined_scores_are_exact_and_every_match_in_range_is_found(
    photos: Photos, normalizer: Normalizer, tmp_path: Path, factory: str
) -> None:
    merge_indexes(built(photos, normalizer, tmp_path, factory), tmp_path / "all", normalizer)
    exact = FaissIndex(normalizer)
    exact.add(photos.ids, photos.references)
    parameters = {"nprobe": 8, "k_factor_rf": 64}  # one bit of 32 numbers says little
    merged = FaissIndex.open(tmp_path / "all", normalizer, mmap=True, parameters=parameters)
    truth, found = (i.range_search(photos.queries, 0.3) for i in (exact, merged))
    expected = dict(zip(zip(truth.queries, truth.ids, strict=True), truth.scores, strict=True))
    got = dict(zip(zip(found.queries, found.ids, strict=True), found.scores, strict=True))
    assert len(got.keys() & expected.keys()) >= 0.98 * len(expected)
    for pair in got.keys() & expected.keys():
        assert got[pair] == pytest.approx(expected[pair], abs=1e-3)


def test_a_mapped_index_leaves_its_vectors_in_the_file(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    paths = built(photos, normalizer, tmp_path, FACTORIES[0], parts=1)
    opened = FaissIndex.open(paths[0], normalizer, mmap=True)
    outer: Any = faiss.downcast_index(opened.index)
    refining: Any = faiss.downcast_index(outer.refine_index)
    assert not refining.codes.is_owned


def test_refining_vectors_come_back(photos: Photos, normalizer: Normalizer, tmp_path: Path) -> None:
    merge_indexes(built(photos, normalizer, tmp_path, FACTORIES[0]), tmp_path / "all", normalizer)
    merged = FaissIndex.open(tmp_path / "all", normalizer, mmap=True)
    rows = {i: row for ids, part in merged.iterate_vectors() for i, row in zip(ids, part)}  # noqa: B905
    expected = normalizer.whiten(photos.references)
    np.testing.assert_allclose([rows[i] for i in photos.ids], expected, atol=1e-3)


def test_integer_ids_metadata_and_removed_rows_are_kept(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    FaissIndex(normalizer, FACTORIES[0]).train(photos.references).save(tmp_path / "trained")
    for number in range(2):
        part = FaissIndex.open(tmp_path / "trained", normalizer)
        rows = range(number * 50, number * 50 + 50)
        more = [{"row": row} for row in rows] if number else None
        part.add(list(rows), photos.references[rows.start : rows.stop], more)
        part.remove([number * 50 + 3])
        part.save(tmp_path / str(number))
    paths = [tmp_path / "0", tmp_path / "1"]
    merge_indexes(paths, tmp_path / "all", normalizer)
    merged = FaissIndex.open(tmp_path / "all", normalizer, parameters={"nprobe": 8})
    assert len(merged) == 98 and 53 not in merged and 54 in merged
    (hit,) = merged.search(photos.references[60], k=1)[0]
    assert (hit.id, hit.metadata) == (60, {"row": 60})
    assert merged.search(photos.references[10], k=1)[0][0].metadata is None


def test_what_cannot_be_merged_is_refused(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = built(photos, normalizer, tmp_path / "a", FACTORIES[0], parts=2)
    with pytest.raises(ValueError, match="every id in one part only"):
        merge_indexes([first[0], first[0]], tmp_path / "all", normalizer)
    turned = Photos(photos.references[::-1].copy(), photos.queries)
    other = built(turned, normalizer, tmp_path / "b", FACTORIES[0], parts=2)
    with pytest.raises(ValueError, match="the training of the first part"):
        merge_indexes([first[0], other[1]], tmp_path / "all", normalizer)
    flat = FaissIndex(normalizer)
    flat.add(photos.ids, photos.references)
    flat.save(tmp_path / "flat")
    with pytest.raises(ValueError, match=r"expected lists \(IVF"):
        merge_indexes([tmp_path / "flat"], tmp_path / "all", normalizer)
    with pytest.raises(FileExistsError):
        merge_indexes(first, tmp_path / "flat", normalizer)
    with pytest.raises(ValueError, match="at least one"):
        merge_indexes([], tmp_path / "all", normalizer)
    assert not (tmp_path / "all").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "flat", "flat.sidecar"]
    assert DIM + 2 == 32  # what RR32 above turns
