"""Names to files: the cache, the recorded hash, and what is said when something is wrong."""

import io
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.models.resnet import Bottleneck, ResNet

from sscd_vec import models
from sscd_vec.download import DownloadError
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.checkpoint import read_checkpoint, validate_release, write_pretrained
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model
from sscd_vec.files import file_sha256
from sscd_vec.models import (
    NORMALIZER_FILE,
    RELEASED,
    CheckpointError,
    Released,
    check_archive,
    normalizer_path,
    stable_name,
)
from tests.encoder.original_modules import TorchvisionSSCD
from tests.test_download import Shelf, shelf

__all__ = ["shelf"]  # the fixture

CONFIG = EncoderConfig(trunk="efficientnet_lite0", dim=8)
resolve = partial(models.resolve, validate=validate_release)


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return build_model(CONFIG).state_dict()


@pytest.fixture(scope="module")
def small_file(state: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "small.pt"
    torch.save(dict(state), path)
    return path.read_bytes()


@pytest.fixture
def small(shelf: Shelf, small_file: bytes, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """A server that has one small released model, called ``small``."""
    listed = {"small": Released("small.pt", "efficientnet_lite0", 8), **RELEASED}
    monkeypatch.setattr(models, "RELEASED", listed)
    shelf.content = small_file
    return shelf


def test_the_seven_released_names() -> None:
    assert sorted(RELEASED) == [
        "sscd_disc_advanced",
        "sscd_disc_blur",
        "sscd_disc_large",
        "sscd_disc_mixup",
        "sscd_imagenet_advanced",
        "sscd_imagenet_blur",
        "sscd_imagenet_mixup",
    ]
    assert RELEASED["sscd_disc_mixup"] == Released("sscd_disc_mixup.torchvision.pt")
    assert RELEASED["sscd_disc_large"].file == "sscd_disc_large.classy.pt"


def test_a_released_name_is_downloaded_once(shelf: Shelf, tmp_path: Path) -> None:
    original = TorchvisionSSCD(ResNet(Bottleneck, [3, 4, 6, 3], num_classes=512))
    torch.save(original.state_dict(), tmp_path / "file")
    shelf.content = (tmp_path / "file").read_bytes()
    cache = tmp_path / "cache"
    path = resolve("sscd_disc_mixup", cache_dir=cache, base_url=shelf.url)
    assert path == cache / "sscd_disc_mixup.torchvision.pt"
    assert read_checkpoint(path)[0] == EncoderConfig()
    assert len(shelf.requests) == 1
    assert resolve("sscd_disc_mixup", cache_dir=cache, local_files_only=True) == path
    assert len(shelf.requests) == 1
    assert models.present(cache) == sorted(["sscd_disc_mixup", *models.shipped()])


def test_the_hash_is_recorded_first_and_verified_afterwards(small: Shelf, tmp_path: Path) -> None:
    path = resolve("small", cache_dir=tmp_path, base_url=small.url)
    record = json.loads((tmp_path / "small.pt.json").read_text())
    assert record["sha256"] == file_sha256(path)
    assert record["url"] == f"{small.url}/small.pt"
    resolve("small", cache_dir=tmp_path)

    # Another whole and valid file of the same name: its CRCs are right, its hash is not.
    other = build_model(CONFIG).state_dict()
    torch.save(dict(other), path)
    with pytest.raises(CheckpointError, match="has changed since it was downloaded.*Delete it"):
        resolve("small", cache_dir=tmp_path)


def test_a_file_put_there_by_hand_gets_its_hash_recorded(
    small: Shelf, small_file: bytes, tmp_path: Path
) -> None:
    (tmp_path / "small.pt").write_bytes(small_file)
    resolve("small", cache_dir=tmp_path, local_files_only=True)
    assert not small.requests
    assert "sha256" in json.loads((tmp_path / "small.pt.json").read_text())


def test_a_read_only_cache_works(
    small: Shelf, small_file: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.pt").write_bytes(small_file)

    def read_only(*args: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(models, "write_whole", read_only)
    assert resolve("small", cache_dir=tmp_path).exists()


def test_damage_in_the_cache_is_noticed(small: Shelf, tmp_path: Path) -> None:
    path = resolve("small", cache_dir=tmp_path, base_url=small.url)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="CRC|damaged|changed"):
        resolve("small", cache_dir=tmp_path)


def test_an_interrupted_transfer_is_continued(
    small: Shelf, small_file: bytes, tmp_path: Path
) -> None:
    small.cuts = [3_000_000, 0, 0, 0, 0]
    with pytest.raises(DownloadError, match="3000000 bytes"):
        resolve("small", cache_dir=tmp_path, base_url=small.url)
    assert "small" not in models.present(tmp_path)
    path = resolve("small", cache_dir=tmp_path, base_url=small.url)
    assert path.read_bytes() == small_file
    assert small.requests[-1] == "bytes=3000000-"
    names = sorted(it.name for it in tmp_path.iterdir())
    assert names == ["small.pt", "small.pt.json", "small.pt.lock"]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def test_a_corrupt_transfer_never_reaches_its_name(
    small: Shelf, small_file: bytes, tmp_path: Path
) -> None:
    small.content = flipped(small_file)
    with pytest.raises(CheckpointError, match=r"not small: .*(CRC|damaged).*deleted; load again"):
        resolve("small", cache_dir=tmp_path, base_url=small.url)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["small.pt.lock"]
    small.content = small_file
    assert resolve("small", cache_dir=tmp_path, base_url=small.url).exists()


def test_a_truncated_file_or_an_error_page_is_no_model(
    small: Shelf, small_file: bytes, tmp_path: Path
) -> None:
    for content, reason in (
        (small_file[:1_000_000], "cut off"),
        (b"<html>Sign in</html>", "refused|not a file of torch.save"),
    ):
        small.content = content
        with pytest.raises(CheckpointError, match=reason):
            resolve("small", cache_dir=tmp_path, base_url=small.url)
        assert not (tmp_path / "small.pt").exists()


def test_another_model_under_the_name_is_refused(small: Shelf, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="efficientnet_lite0 with 8 dimensions, resnet50 with 512 expected"
    ):
        resolve("sscd_disc_blur", cache_dir=tmp_path, base_url=small.url)


def test_two_callers_share_one_download(small: Shelf, small_file: bytes, tmp_path: Path) -> None:
    """The lock belongs to an open file, so two threads contend for it as two processes do."""
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(resolve, "small", cache_dir=tmp_path, base_url=small.url) for _ in range(2)
        ]
        assert [call.result().stat().st_size for call in calls] == [len(small_file)] * 2
    assert len(small.requests) == 1


def test_local_files_only_never_asks_the_network(small: Shelf, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"not in the cache .*local_files_only"):
        resolve("small", cache_dir=tmp_path, base_url=small.url, local_files_only=True)
    assert not small.requests
    assert not any(tmp_path.iterdir())


def test_environment_chooses_cache_and_server(
    small: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("SSCD_VEC_BASE_URL", small.url)
    assert resolve("small").parent == tmp_path / "here"
    assert models.cache_folder(tmp_path) == tmp_path
    monkeypatch.delenv("SSCD_VEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.cache_folder() == tmp_path / "xdg" / "sscd-vec"


def test_a_bar_can_be_shown(
    small: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve("small", cache_dir=tmp_path, base_url=small.url, show_progress=True)
    captured = capsys.readouterr()
    assert "small.pt" in captured.err
    assert captured.out == ""


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(FileNotFoundError, match=r"unknown model 'sscd_disc'.*sscd_disc_blur"):
        resolve("sscd_disc")
    with pytest.raises(FileNotFoundError, match=r"no model file or folder at 'x/y\.pt'"):
        resolve("x/y.pt")


def test_shipped_models_are_found_by_name_or_alone(
    state: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "SHIPPED", tmp_path)
    with pytest.raises(FileNotFoundError, match="no model of its own. Name a released one"):
        resolve()
    write_pretrained(tmp_path / "tiny", CONFIG, state)
    assert resolve() == resolve("tiny") == tmp_path / "tiny"
    assert models.shipped() == ["tiny"]
    assert "tiny" in models.present(tmp_path / "empty")
    write_pretrained(tmp_path / "other", CONFIG, state)
    with pytest.raises(FileNotFoundError, match="several models are shipped: .*other, tiny"):
        resolve()


def test_a_bad_file_put_there_by_hand_is_refused_and_not_recorded(
    small: Shelf, small_file: bytes, tmp_path: Path
) -> None:
    (tmp_path / "small.pt").write_bytes(flipped(small_file))
    with pytest.raises(CheckpointError, match="CRC|damaged"):
        resolve("small", cache_dir=tmp_path)
    assert not (tmp_path / "small.pt.json").exists()


def test_a_download_is_checked_without_a_validator_too(
    small: Shelf, small_file: bytes, tmp_path: Path
) -> None:
    small.content = flipped(small_file)
    with pytest.raises(CheckpointError, match=r"not small: .*(CRC|damaged)"):
        models.resolve("small", cache_dir=tmp_path, base_url=small.url)
    assert not (tmp_path / "small.pt").exists()


def test_a_validator_is_called_once_with_what_is_expected(small: Shelf, tmp_path: Path) -> None:
    calls: list[Released] = []
    for _ in range(2):
        models.resolve(
            "small",
            cache_dir=tmp_path,
            base_url=small.url,
            validate=lambda path, expected: calls.append(expected),
        )
    assert calls == [Released("small.pt", "efficientnet_lite0", 8)]


def test_the_shipped_normalizer_is_found_by_none_name_and_folder() -> None:
    name = models.shipped()[0]
    file = normalizer_path()
    assert file == normalizer_path(name) == normalizer_path(file.parent) == normalizer_path(file)
    assert file.name == NORMALIZER_FILE and file.is_file()


@pytest.mark.parametrize("name", ["sscd_disc_mixup", "no/such/place", "nobody"])
def test_a_missing_normalizer_says_what_to_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"{name}.*sscd-vec normalize fit"):
        normalizer_path(name)
    with pytest.raises(FileNotFoundError, match=f"no {NORMALIZER_FILE} in .*Normalizer.fit"):
        normalizer_path(tmp_path)


def test_a_stable_name_finds_the_model_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert stable_name() == stable_name(None) == models.shipped()[0]
    assert stable_name("sscd_disc_mixup") == "sscd_disc_mixup"
    assert stable_name("model") == stable_name(Path("model")) == str(tmp_path.resolve() / "model")


def zipped(kind: int, content: bytes, name: str = "model/data/0") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def test_an_archive_cannot_unpack_to_more_than_it_is(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(zipped(zipfile.ZIP_STORED, bytes(1000)))
    check_archive(path)
    path.write_bytes(zipped(zipfile.ZIP_DEFLATED, bytes(10_000_000)))
    with pytest.raises(CheckpointError, match="data/0 is compressed, which torch never writes"):
        check_archive(path)
    path.write_bytes(zipped(zipfile.ZIP_DEFLATED, bytes(100_000), "model/code/a.py"))
    check_archive(path)  # TorchScript's source is compressed
    path.write_bytes(zipped(zipfile.ZIP_DEFLATED, bytes(65 * 2**20), "model/code/a.py"))
    with pytest.raises(CheckpointError, match="code unpacks to 68157440 bytes"):
        check_archive(path)


def test_records_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/data/0", bytes(1000))
        for number in range(1, 5):  # the directory lists one stored record five times
            copy = zipfile.ZipInfo.__new__(zipfile.ZipInfo)
            for field in zipfile.ZipInfo.__slots__:
                if hasattr(archive.filelist[0], field):
                    setattr(copy, field, getattr(archive.filelist[0], field))
            copy.filename = f"model/data/{number}"
            archive.filelist.append(copy)
    with pytest.raises(CheckpointError, match="claims to hold 5000: its records overlap"):
        check_archive(path)


def test_a_path_is_itself(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_the_model_in_the_box_works_without_a_name_or_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a network was asked"))
    folder = resolve(None)
    encoder = Encoder.from_pretrained(device="cpu")
    noise = np.random.default_rng(0).integers(0, 256, (2, 40, 60, 3), dtype=np.uint8)
    z = encoder.encode(list(noise))
    assert z.shape == (2, encoder.dim) and np.allclose(np.linalg.norm(z, axis=1), 1, atol=1e-5)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 13e6
