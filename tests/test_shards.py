"""Parquet files of descriptors: what is written is read, and what is wrong is said."""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sscd_vec.files import ImageFile
from sscd_vec.shards import (
    DescriptorFiles,
    Precision,
    ShardInfo,
    ShardRows,
    ShardWriter,
    holds_descriptors,
    read_info,
)

DIM = 8


def rows(count: int, first: int = 0) -> ShardRows:
    """The third of every five could not be read."""
    descriptors = np.random.default_rng(first).standard_normal((count, DIM)).astype(np.float32)
    bad = np.arange(count) % 5 == 2
    descriptors[bad] = np.nan
    return ShardRows(
        [f"image-{first + row}" for row in range(count)],
        descriptors,
        ["truncated" if each else "" for each in bad],
        [ImageFile(Path("/a.tar"), 10 + row, 7, f"{row}.jpg", 512 * row) for row in range(count)],
    )


def write(
    path: Path, part: ShardRows, encoder: str = "e1", precision: Precision = "float32"
) -> None:
    with ShardWriter(path, ShardInfo(encoder, DIM, "source", "state"), precision) as writer:
        writer.write(part)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_rows_come_back_as_they_were_written(tmp_path: Path, precision: Precision) -> None:
    part = rows(12)
    write(tmp_path / "a.parquet", part, precision=precision)
    files = DescriptorFiles(tmp_path)
    assert (files.encoder, files.dim, files.rows) == ("e1", DIM, 12)
    (read,) = files.parts()
    assert (read.ids, read.errors, read.files) == (part.ids, part.errors, part.files)
    kept = np.asarray(part.descriptors, precision).astype(np.float32)
    np.testing.assert_array_equal(read.descriptors, kept)
    ids, descriptors = next(files.batches())
    assert ids == [name for row, name in enumerate(part.ids) if row % 5 != 2]
    np.testing.assert_array_equal(files.array(), descriptors)
    assert files.failures == [("image-2", "truncated"), ("image-7", "truncated")]


def test_other_programs_read_nulls_and_the_encoder(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(6))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table["descriptor"].null_count == 1
    assert table["error"].to_pylist().count(None) == 5
    assert b'"encoder": "e1"' in table.schema.metadata[b"sscd_vec"]
    info = read_info(tmp_path / "a.parquet")
    assert info is not None and (info.source, info.state) == ("source", "state")


def test_files_of_other_programs_are_read(tmp_path: Path) -> None:
    table = pa.table({"id": [5, 6], "descriptor": [[1.0, 0.0], [0.0, 1.0]]})
    pq.write_table(table, tmp_path / "a.parquet")
    ((ids, descriptors),) = DescriptorFiles(tmp_path / "a.parquet").batches()
    assert ids == [5, 6]
    np.testing.assert_array_equal(descriptors, np.eye(2))


def test_a_batch_never_holds_more_rows_than_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(50))
    write(tmp_path / "b.parquet", rows(30, first=50))
    files = DescriptorFiles(tmp_path)
    parts = list(files.parts(rows=16))
    assert max(len(part.ids) for part in parts) == 16
    assert [name for part in parts for name in part.ids] == [f"image-{n}" for n in range(80)]


def test_a_sample_has_about_the_size_and_only_descriptors(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(1000))
    sample = DescriptorFiles(tmp_path).sample(100)
    assert 70 <= len(sample) <= 100
    assert not np.isnan(sample).any()


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, rows(3))
    before = path.read_bytes()
    with pytest.raises(RuntimeError), ShardWriter(path, ShardInfo("e1", DIM)) as writer:
        writer.write(rows(20))
        raise RuntimeError
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.parquet"]


def test_half_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(20))
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"not a whole Parquet file.*encode again"):
        DescriptorFiles(tmp_path)


def test_descriptors_of_two_encoders_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", rows(3))
    write(tmp_path / "b.parquet", rows(3), encoder="e2")
    with pytest.raises(ValueError, match=r"b.parquet: its encoder is e2, expected e1"):
        DescriptorFiles(tmp_path)
    with pytest.raises(ValueError, match="its encoder is e1, expected e3"):
        DescriptorFiles(tmp_path / "a.parquet", encoder="e3")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"key": ["a"], "jpg": [b"x"]}), tmp_path / "a.parquet")
    assert not holds_descriptors(tmp_path)
    with pytest.raises(ValueError, match=r"expected the columns id and descriptor, got .*jpg"):
        DescriptorFiles(tmp_path)


def test_an_empty_folder_says_who_makes_files(tmp_path: Path) -> None:
    assert not holds_descriptors(tmp_path)
    with pytest.raises(FileNotFoundError, match="sscd-vec encode"):
        DescriptorFiles(tmp_path)


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"sscd-vec\[parquet\]"):
        ShardWriter("a.parquet", ShardInfo("e1", DIM))
