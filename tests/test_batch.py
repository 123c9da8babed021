"""Callables on columns: the same answers for mappings, data frames and any engine."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from sscd_vec.bank import Bank
from sscd_vec.batch import EncodeBatch, QueryVectors, ReferenceVectors, SearchBank
from sscd_vec.cli.pictures import draw
from sscd_vec.normalize import Normalizer
from tests.tiny_encoder import TinyEncoder


def jpeg(seed: int) -> bytes:
    image, file = draw(seed), io.BytesIO()
    image.thumbnail((80, 80))
    image.save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(scope="module")
def column() -> list[bytes | None]:
    return [jpeg(0), b"not an image", jpeg(1), None]


@pytest.fixture
def normalizer() -> Normalizer:
    return Normalizer.identity(TinyEncoder.dim).with_threshold(0.93)


def test_a_mapping_gets_descriptors_and_errors(column: list[Any]) -> None:
    encode = EncodeBatch(TinyEncoder(), column="jpg")
    batch = encode({"jpg": np.array(column, object), "key": np.arange(4)})
    assert set(batch) == {"key", "descriptor", "error"}
    assert batch["descriptor"].shape == (4, TinyEncoder.dim)
    assert np.isnan(batch["descriptor"]).all(1).tolist() == [False, True, False, True]
    assert [bool(error) for error in batch["error"]] == [False, True, False, True]
    expected = TinyEncoder().encode([column[0], column[2]])
    np.testing.assert_array_equal(batch["descriptor"][[0, 2]], expected)


def test_a_data_frame_comes_back_as_one(column: list[Any]) -> None:
    frame = pd.DataFrame({"image": column, "key": ["a", "b", "c", "d"]})
    found = EncodeBatch(TinyEncoder(), keep_images=True)(frame)
    assert list(found.columns) == ["image", "key", "descriptor", "error"]
    mapped = EncodeBatch(TinyEncoder())({"image": column})
    np.testing.assert_array_equal(np.stack(found["descriptor"]), mapped["descriptor"])


def test_every_way_to_keep_an_image_is_understood(tmp_path: Path) -> None:
    data = jpeg(3)
    path = tmp_path / "a.jpg"
    path.write_bytes(data)
    cells = [data, str(path), {"bytes": data, "path": None}, {"bytes": None, "path": str(path)},
             Image.open(path), np.asarray(Image.open(path))]  # fmt: skip
    rows = EncodeBatch(TinyEncoder())({"image": cells})["descriptor"]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def test_paths_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(3))
    batch = EncodeBatch(TinyEncoder(), column="path")({"path": [str(tmp_path / "a.jpg")]})
    assert batch["path"] == [str(tmp_path / "a.jpg")]


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"expected a column 'image', got \['jpg'\]"):
        EncodeBatch(TinyEncoder())({"jpg": []})


def test_only_settings_are_pickled(column: list[Any], normalizer: Normalizer) -> None:
    encode = EncodeBatch(column="jpg")
    assert len(pickle.dumps(encode)) < 500
    assert encode.encoder.dim == 512  # the shipped model: now it is loaded
    assert len(pickle.dumps(encode)) < 500
    vectors = QueryVectors(normalizer)
    vectors({"descriptor": TinyEncoder().encode([column[0]])})
    assert pickle.loads(pickle.dumps(vectors)).normalizer.dim == normalizer.dim
    shipped = Normalizer.from_pretrained()
    copy = pickle.loads(pickle.dumps(shipped))
    assert copy.query_fingerprint == shipped.query_fingerprint
    assert copy.threshold("search", 10**6) == shipped.threshold("search", 10**6)


def test_vectors_are_the_normalizers(column: list[Any]) -> None:
    rng = np.random.default_rng(0)
    fitted = Normalizer.fit(rng.standard_normal((400, 16)).astype(np.float32))
    rows = rng.standard_normal((5, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[3] = np.nan
    good = [0, 1, 2, 4]
    references = ReferenceVectors(fitted)({"descriptor": rows})["vector"]
    queries = QueryVectors(fitted, to="query")({"descriptor": list(rows)})["query"]
    np.testing.assert_array_equal(references[good], fitted.references(rows[good]))
    np.testing.assert_array_equal(queries[good], fitted.queries(rows[good]))
    assert np.isnan(references[3]).all() and np.isnan(queries[3]).all()


@pytest.mark.parametrize("frame", [False, True])
def test_search_finds_the_best_match_of_each(
    normalizer: Normalizer, column: list[Any], frame: bool
) -> None:
    encoder = TinyEncoder()
    bank = Bank(model=encoder, normalizer=normalizer)
    bank.add([jpeg(0), jpeg(1), jpeg(2)], ids=["zero", "one", "two"])
    batch: Any = EncodeBatch(encoder)({"image": column})
    batch = {name: list(values) for name, values in batch.items()}
    found = SearchBank(bank, k=2)(pd.DataFrame(batch) if frame else batch)
    assert list(found["match"]) == ["zero", "", "one", ""]
    assert list(found["is_copy"]) == [True, False, True, False]
    assert found["score"][0] == pytest.approx(1, abs=1e-5) and np.isnan(found["score"][1])
    assert [len(ids) for ids in found["matches"]] == [2, 0, 2, 0]


def test_a_bank_is_opened_where_the_batch_is(tmp_path: Path, normalizer: Normalizer) -> None:
    encoder = TinyEncoder()
    with Bank(tmp_path / "known.faiss", model=encoder, normalizer=normalizer) as bank:
        bank.add([jpeg(0)], ids=["zero"])
    search = pickle.loads(pickle.dumps(SearchBank(tmp_path / "known.faiss", threshold=0.5)))
    found = search({"descriptor": encoder.encode([jpeg(0)])})
    assert found["match"].tolist() == ["zero"]
