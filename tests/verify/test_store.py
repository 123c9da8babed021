"""Kept features: what was put is there after any crash, what is damaged is refused."""

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from sscd_vec.verify import Features, FeatureStore, FeatureStoreError
from sscd_vec.verify.features import extract
from tests.verify.scenes import scene


@pytest.fixture(scope="module")
def images() -> dict[str, Features]:
    return {f"image {n}": extract(scene(n), side=96, keypoints=20) for n in range(5)}


def same(store: FeatureStore, images: dict[str, Features]) -> bool:
    kept = {name: store.get(name) for name in store.ids()}
    return {n: f.to_bytes() for n, f in images.items()} == {
        n: f.to_bytes() for n, f in kept.items() if f is not None
    }


def test_what_is_put_is_there_when_opened_again(
    tmp_path: Path, images: dict[str, Features]
) -> None:
    with FeatureStore(tmp_path / "local") as store:
        store.put(dict(list(images.items())[:2]))
        store.put(dict(list(images.items())[2:]))
        assert same(store, images)
    with FeatureStore(tmp_path / "local") as store:
        assert len(store) == 5 and "image 3" in store and "image 9" not in store
        assert store.get("image 9") is None
        assert same(store, images)
        first = store.get("image 0")
        assert first is not None and not first.keypoints.flags.owndata  # mapped, not read


def test_an_empty_store_has_nothing(tmp_path: Path) -> None:
    with FeatureStore(tmp_path / "local") as store:
        assert len(store) == 0 and list(store.ids()) == [] and store.get("x") is None
        store.put({})
        store.compact()
        assert len(store) == 0


def test_replaced_and_removed_images(tmp_path: Path, images: dict[str, Features]) -> None:
    with FeatureStore(tmp_path / "local") as store:
        store.put(images)
        store.put({"image 1": images["image 0"]})
        store.remove(["image 4", "image 9"])
        expected = {**images, "image 1": images["image 0"]}
        del expected["image 4"]
        assert same(store, expected)
        held = store.get("image 2")
        before = (tmp_path / "local.1").stat().st_size
        store.compact()
        assert same(store, expected)
        assert [p.name for p in tmp_path.glob("local.[0-9]*")] == ["local.2"]
        assert (tmp_path / "local.2").stat().st_size == before * 4 // 6
        store.put({"new": images["image 4"]})
        assert same(store, {**expected, "new": images["image 4"]})
        # A view taken before still reads the old file.
        assert held is not None and held.to_bytes() == images["image 2"].to_bytes()


def test_a_reader_sees_what_another_process_writes(
    tmp_path: Path, images: dict[str, Features]
) -> None:
    with FeatureStore(tmp_path / "local") as writer, FeatureStore(tmp_path / "local") as reader:
        writer.put({"image 0": images["image 0"]})
        assert reader.get("image 0") is not None
        writer.put({"image 1": images["image 1"]})
        assert same(reader, {n: images[n] for n in ("image 0", "image 1")})
        writer.remove(["image 0"])
        writer.compact()
        assert same(reader, {"image 1": images["image 1"]})


def test_bytes_a_killed_process_left_are_overwritten(
    tmp_path: Path, images: dict[str, Features]
) -> None:
    with FeatureStore(tmp_path / "local") as store:
        store.put({"image 0": images["image 0"]})
    with (tmp_path / "local.1").open("ab") as file:
        file.write(b"half of something" * 1000)
    with FeatureStore(tmp_path / "local") as store:
        store.put({"image 1": images["image 1"]})
        assert same(store, {n: images[n] for n in ("image 0", "image 1")})
    sizes = [len(images[n].to_bytes()) for n in ("image 0", "image 1")]
    assert (tmp_path / "local.1").stat().st_size == sum(sizes)


def test_a_failed_put_changes_nothing(
    tmp_path: Path, images: dict[str, Features], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError("no space left")

    with FeatureStore(tmp_path / "local") as store:
        store.put({"image 0": images["image 0"]})
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", fail)
            with pytest.raises(OSError, match="no space"):
                store.put({"image 0": images["image 2"], "image 1": images["image 1"]})
        assert same(store, {"image 0": images["image 0"]})
        store.put({"image 3": images["image 3"]})
        assert same(store, {n: images[n] for n in ("image 0", "image 3")})


def _keep_putting(
    path: Path, features: Features, told: "multiprocessing.connection.Connection"
) -> None:
    with FeatureStore(path) as store:
        for number in range(10_000):
            store.put({f"put {number}": features})
            told.send(number)


def test_a_killed_writer_loses_nothing_it_was_told_is_safe(
    tmp_path: Path, images: dict[str, Features]
) -> None:
    spawn = multiprocessing.get_context("spawn")
    told, tell = spawn.Pipe(duplex=False)
    writer = spawn.Process(target=_keep_putting, args=(tmp_path / "s", images["image 0"], tell))
    writer.start()
    tell.close()
    last = -1
    while last < 5:
        last = told.recv()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    try:
        while told.poll():
            last = told.recv()
    except EOFError:
        pass
    with FeatureStore(tmp_path / "s") as store:
        assert {f"put {number}" for number in range(last + 1)} <= set(store.ids())
        store.put({"after": images["image 1"]})
        expected = dict.fromkeys(store.ids(), images["image 0"]) | {"after": images["image 1"]}
        assert same(store, expected)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damaged_data_is_refused(tmp_path: Path, images: dict[str, Features], damage: str) -> None:
    with FeatureStore(tmp_path / "local") as store:
        store.put(images)
    data = tmp_path / "local.1"
    if damage == "flip":
        raw = bytearray(data.read_bytes())
        raw[200] ^= 1
        data.write_bytes(raw)
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:100])
    else:
        data.unlink()
    with (
        FeatureStore(tmp_path / "local") as store,
        pytest.raises(FeatureStoreError, match="damaged .* index again"),
    ):
        store.get("image 0")


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to look at" * 50)
    with pytest.raises(FeatureStoreError, match="not a store of local features"):
        FeatureStore(tmp_path / "text")
    newer = sqlite3.connect(tmp_path / "newer")
    newer.execute("PRAGMA user_version=9")
    newer.close()
    with pytest.raises(FeatureStoreError, match="expected format 1, got 9"):
        FeatureStore(tmp_path / "newer")
