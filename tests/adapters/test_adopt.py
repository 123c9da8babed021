"""Indexes that people have already: searched as they are, or migrated by one call."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import faiss
import numpy as np
import pytest
from pymilvus import DataType, MilvusClient

from faults.milvus_server import TOKEN
from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.index import Index
from sscd_vec.adapters.milvus import ForeignCollection, MilvusCollection, MilvusError
from sscd_vec.normalize import Normalizer

from .conftest import DIM, Photos, unit

METRICS = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}


@pytest.fixture(scope="module")
def biased() -> Normalizer:
    """A bias but no whitening: all that plain descriptors need."""
    rng = np.random.default_rng(1)
    background = unit(rng.normal(size=(2000, DIM)) + rng.normal(size=DIM))
    return Normalizer.fit(background, whitening=None).with_threshold(0.2)


def check_same_as_ours(index: Index, ours: Index, photos: Photos) -> None:
    """The same matches and scores as from an index that was built here."""
    for found, expected in (
        (index.search(photos.queries, 10), ours.search(photos.queries, 10)),
        (index.range_search(photos.queries, 0.05), ours.range_search(photos.queries, 0.05)),
        (index.range_search(photos.queries), ours.range_search(photos.queries)),
    ):
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
        assert found.counts.tolist() == expected.counts.tolist()
        assert len(expected.ids) > 20
        ties = np.abs(np.diff(expected.scores)) < 1e-4
        firm = ~(np.append(ties, False) | np.append(False, ties))
        assert found.ids[firm].tolist() == expected.ids[firm].tolist()
    parts = list(index.iterate_range(photos.queries, 0.05, block=9))
    assert [begin for begin, _ in parts] == [0, 9, 18, 27, 36]


@pytest.fixture(scope="module")
def ours(photos: Photos, biased: Normalizer) -> FaissIndex:
    index = FaissIndex(biased)
    index.add(photos.ids, photos.references)
    return index


# ---------------------------------------------------------------------- FAISS


@pytest.mark.parametrize("metric", ["ip", "l2"])
@pytest.mark.parametrize("factory", ["Flat", "IVF1,Flat", "HNSW32", "RR30,Flat"])
def test_a_plain_faiss_index_gives_our_scores(
    factory: str,
    metric: str,
    photos: Photos,
    biased: Normalizer,
    ours: FaissIndex,
    tmp_path: Path,
) -> None:
    theirs = faiss.index_factory(DIM, factory, METRICS[metric])
    theirs.train(photos.references)
    theirs.add(photos.references)
    before = faiss.serialize_index(theirs)
    index = FaissIndex.adopt(theirs, photos.ids, biased, parameters=EF.get(factory))
    check_same_as_ours(index, ours, photos)
    assert len(index) == 600 and index.metric == metric
    if factory not in EF:  # it was told to search more widely
        np.testing.assert_array_equal(faiss.serialize_index(theirs), before)

    index.save(tmp_path / "a.faiss")
    opened = FaissIndex.open(tmp_path / "a.faiss", biased, parameters=EF.get(factory))
    check_same_as_ours(opened, ours, photos)
    opened.remove(photos.ids[:3])
    opened.add("new", photos.references[0], {"n": 1})
    assert opened.search(photos.references[0], 1)[0][0][::2] == ("new", {"n": 1})
    assert len(opened) == 598


EF = {"HNSW32": {"efSearch": 600}}


@pytest.mark.parametrize("kind", [faiss.IndexIDMap, faiss.IndexIDMap2])
def test_an_id_map_keeps_its_ids(kind: Any, photos: Photos, biased: Normalizer) -> None:  # noqa: ANN401
    theirs = kind(faiss.IndexFlatIP(DIM))
    numbers = np.arange(600, dtype=np.int64) * 7 + 10**12
    theirs.add_with_ids(photos.references, numbers)
    index = FaissIndex.adopt(theirs, normalizer=biased)
    assert index.search(photos.queries[:9], 1).ids.tolist() == numbers[:9].tolist()
    named = FaissIndex.adopt(theirs, photos.ids, biased, metadata=[{"n": i} for i in range(600)])
    assert named.search(photos.queries[3], 1)[0][0][::2] == ("r3", {"n": 3})


def test_whitening_says_that_vectors_must_be_rewritten_and_migrate_does_it(
    photos: Photos, normalizer: Normalizer, tmp_path: Path
) -> None:
    theirs = faiss.IndexFlatIP(DIM)
    theirs.add(photos.references)
    with pytest.raises(ValueError, match=r"whitens: the vectors must be rewritten.*migrate\(old\)"):
        FaissIndex.adopt(theirs, photos.ids, normalizer)
    centring = Normalizer.fit(photos.references, whitening="centre")
    with pytest.raises(ValueError, match="must be rewritten"):
        FaissIndex.adopt(theirs, photos.ids, centring)
    old = FaissIndex.adopt(theirs, photos.ids, metadata=[{"n": i} for i in range(600)])
    old.remove("r7")
    new = FaissIndex(normalizer, "HNSW32", path=tmp_path / "new.faiss")
    assert new.migrate(old) == 599 == len(new) and "r7" not in new
    expected = FaissIndex(normalizer, "HNSW32")
    expected.add([i for i in photos.ids if i != "r7"], np.delete(photos.references, 7, axis=0))
    found = new.search(photos.queries, 5)
    np.testing.assert_allclose(found.scores, expected.search(photos.queries, 5).scores, atol=1e-5)
    assert found[3][0].metadata == {"n": 3}
    assert theirs.ntotal == 600, "theirs stays as it is"


def test_lists_and_refined_codes_give_their_vectors_back(photos: Photos) -> None:
    for factory in ("IVF4,Flat", "PQ5x4,RFlat", "HNSW16"):
        theirs = faiss.index_factory(DIM, factory, faiss.METRIC_INNER_PRODUCT)
        theirs.train(photos.references)
        theirs.add(photos.references)
        new = FaissIndex(Normalizer.identity(DIM))
        assert new.migrate(FaissIndex.adopt(theirs, photos.ids)) == 600
        assert new.search(photos.references[:9], 1).ids.tolist() == photos.ids[:9]
        np.testing.assert_allclose(new.search(photos.references[:9], 1).scores, 1, atol=1e-5)


def test_faiss_indexes_that_cannot_be_adopted_or_migrated(
    photos: Photos, biased: Normalizer, normalizer: Normalizer
) -> None:
    flat = faiss.IndexFlatIP(DIM)
    flat.add(photos.references)
    with pytest.raises(ValueError, match="only an IndexIDMap knows its own"):
        FaissIndex.adopt(flat, normalizer=biased)
    with pytest.raises(ValueError, match="expected 600 different ids.* got 599 ids"):
        FaissIndex.adopt(flat, photos.ids[1:], biased)
    with pytest.raises(ValueError, match=r"got 600 ids \(599 different\)"):
        FaissIndex.adopt(flat, ["r1", *photos.ids[1:]], biased)
    with pytest.raises(ValueError, match="30 dimensions, but this normalizer takes 31"):
        FaissIndex.adopt(flat, photos.ids, Normalizer.identity(31))
    long = faiss.IndexFlatIP(DIM)
    long.add(3 * photos.references)
    with pytest.raises(ValueError, match="expected unit descriptors .* lengths from 3 to 3"):
        FaissIndex.adopt(long, photos.ids, biased)
    city = faiss.IndexFlat(DIM, faiss.METRIC_L1)
    city.add(photos.references)
    with pytest.raises(ValueError, match="expected inner products or L2"):
        FaissIndex.adopt(city, photos.ids, biased)
    bits = faiss.index_factory(DIM, "LSH")
    with pytest.raises(ValueError, match="compares bits"):
        FaissIndex.adopt(bits, [], biased)
    lists = faiss.index_factory(DIM, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    lists.train(photos.references)
    lists.add_with_ids(photos.references, np.arange(600) + 10**6)
    with pytest.raises(ValueError, match="numbers of their own"):
        FaissIndex.adopt(lists, photos.ids, biased)
    codes = faiss.index_factory(DIM, "PQ5x4", faiss.METRIC_INNER_PRODUCT)
    codes.train(photos.references)
    codes.add(photos.references)
    adopted = FaissIndex.adopt(codes, photos.ids, biased)
    assert not adopted.search(photos.queries, 1).complete
    with pytest.raises(ValueError, match="IndexPQ keeps codes, not vectors.* encode the images"):
        FaissIndex(normalizer).migrate(adopted)
    with pytest.raises(ValueError, match="expected an adopted index"):
        FaissIndex(normalizer).migrate(FaissIndex(normalizer))


# ---------------------------------------------------------------------- Milvus


@pytest.fixture(params=["lite", "server"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MilvusClient, str]]:
    """Somebody's client, and where it is connected to."""
    uri = str(tmp_path / "m.db")
    if request.param == "server":
        uri = request.getfixturevalue("server").uri
    made = MilvusClient(uri, token=TOKEN if request.param == "server" else "")
    yield made, uri
    made.close()


def theirs(
    client: MilvusClient, vectors: np.ndarray, metric: str, kind: str = "FLAT", strings: bool = True
) -> str:
    """A collection as somebody else would make it: other names, a field of its own."""
    name = f"old{uuid4().hex[:8]}"
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    if strings:
        schema.add_field("file", DataType.VARCHAR, is_primary=True, max_length=40)
    else:
        schema.add_field("file", DataType.INT64, is_primary=True)
    schema.add_field("embedding", DataType.FLOAT_VECTOR, dim=vectors.shape[1])
    schema.add_field("label", DataType.VARCHAR, max_length=20)
    index = client.prepare_index_params()
    params = {"M": 16, "efConstruction": 100} if kind == "HNSW" else {}
    index.add_index("embedding", index_type=kind, metric_type=metric, params=params)
    client.create_collection(name, schema=schema, index_params=index)
    rows = [
        {"file": f"r{i}" if strings else i, "embedding": v, "label": f"l{i}", "year": 2000 + i % 20}
        for i, v in enumerate(vectors)
    ]
    client.insert(name, rows)
    client.flush(name)
    client.load_collection(name)
    return name


@pytest.mark.parametrize("metric", ["IP", "L2", "COSINE"])
def test_a_plain_collection_gives_our_scores(
    metric: str,
    client: tuple[MilvusClient, str],
    photos: Photos,
    biased: Normalizer,
    ours: FaissIndex,
) -> None:
    mine, _ = client
    # Cosine does not care for lengths.
    vectors = photos.references * (3 if metric == "COSINE" else 1)
    name = theirs(mine, vectors, metric)
    index = MilvusCollection.adopt(mine, name, "file", "embedding", biased)
    check_same_as_ours(index, ours, photos)
    assert len(index) == 600 and "r5" in index and index.present(["r5", "x"]) == {"r5"}
    best = index.search(photos.queries[:4], 1, filter="year < 2003")
    assert best[1][0].metadata == {"label": "l1", "year": 2001}
    assert index.remove(["r0", "nowhere"]) == 1 and len(index) == 599
    index.add("r0", photos.references[0], {"label": "back", "year": 1})
    assert index.search(photos.references[0], 1)[0][0][::2] == ("r0", {"label": "back", "year": 1})
    with pytest.raises(ValueError, match=r"the names \['embedding'\] are taken"):
        index.add("r0", photos.references[0], {"embedding": 1})
    index.close()
    assert mine.has_collection(name), "their client stays open"
    mine.drop_collection(name)


def test_a_plain_collection_is_migrated_by_one_call(
    client: tuple[MilvusClient, str], photos: Photos, normalizer: Normalizer
) -> None:
    mine, uri = client
    name = theirs(mine, photos.references, "IP", strings=False)
    with pytest.raises(ValueError, match="the vectors must be rewritten"):
        MilvusCollection.adopt(mine, name, "file", "embedding", normalizer)
    old = MilvusCollection.adopt(mine, name, "file", "embedding")
    token = "" if old.is_lite else TOKEN
    new = MilvusCollection(uri, f"{name}new", normalizer, token=token)
    assert new.migrate(old) == 600 == len(new)
    found = new.search(photos.queries, 5)
    best = -np.sort(-normalizer.scores(photos.queries, photos.references), axis=1)[:, :5]
    np.testing.assert_allclose(found.scores.reshape(best.shape), best, atol=1e-4)
    assert found[3][0][::2] == (3, {"label": "l3", "year": 2003})
    elsewhere = FaissIndex(normalizer)  # to the other backend as well
    assert elsewhere.migrate(old) == 600
    assert elsewhere.search(photos.queries, 5).ids.tolist() == found.ids.tolist()
    new.drop()
    old.drop()
    new.close()


def test_a_place_will_do_in_place_of_a_client(
    client: tuple[MilvusClient, str], photos: Photos, biased: Normalizer
) -> None:
    mine, uri = client
    name = theirs(mine, photos.references, "IP", "HNSW")
    token = TOKEN if uri.startswith("http") else ""
    with MilvusCollection.adopt(uri, name, "file", "embedding", biased, token=token) as index:
        found = index.search(photos.references[:9], 1)
        assert found.ids.tolist() == photos.ids[:9] and not found.complete
        with pytest.raises(ValueError, match="not an adopted one"):
            index.write_bulk_files([], "folder")
        index.drop()


def test_collections_that_cannot_be_adopted(
    client: tuple[MilvusClient, str], photos: Photos, biased: Normalizer
) -> None:
    mine, _ = client
    name = theirs(mine, 2 * photos.references, "IP")
    with pytest.raises(ForeignCollection, match="primary key 'id' .* fields .*'embedding', 'file'"):
        MilvusCollection.adopt(mine, name, normalizer=biased)
    with pytest.raises(ForeignCollection, match="expected a primary key 'label'"):
        MilvusCollection.adopt(mine, name, "label", "embedding", biased)
    with pytest.raises(ForeignCollection, match="expected float vectors 'label'"):
        MilvusCollection.adopt(mine, name, "file", "label", biased)
    with pytest.raises(ValueError, match="expected unit descriptors .* lengths from 2 to 2"):
        MilvusCollection.adopt(mine, name, "file", "embedding", biased)
    with pytest.raises(MilvusError, match="nowhere|not exist|not find"):
        MilvusCollection.adopt(mine, "nowhere", "file", "embedding", biased)
    with pytest.raises(ForeignCollection, match=r"use MilvusCollection\.adopt"):
        MilvusCollection(
            client[1], name, biased, token=TOKEN if client[1].startswith("http") else ""
        )
    mine.drop_collection(name)


def test_ids_that_milvus_makes_up_are_searched_but_not_added_to(
    client: tuple[MilvusClient, str], photos: Photos, biased: Normalizer
) -> None:
    mine, _ = client
    name = f"auto{uuid4().hex[:8]}"
    mine.create_collection(name, dimension=DIM, metric_type="COSINE", auto_id=True)
    made = mine.insert(name, [{"vector": v} for v in photos.references])["ids"]
    index = MilvusCollection.adopt(mine, name, normalizer=biased)
    assert index.search(photos.references[:9], 1).ids.tolist() == list(made)[:9]
    with pytest.raises(MilvusError, match="makes up its ids"):
        index.add([7], photos.references[:1])
    index.drop()
