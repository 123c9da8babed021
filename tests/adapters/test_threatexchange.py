"""The extension in the real threatexchange package: its interfaces, index and command line."""

import io
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib.cbook
import numpy as np
import pytest
from PIL import Image
from threatexchange.content_type.photo import PhotoContent
from threatexchange.extensions.manifest import ThreatExchangeExtensionManifest
from threatexchange.interface_validation import SignalTypeMapping
from threatexchange.signal_type.index import SignalTypeIndex

from sscd_vec.adapters import threatexchange as extension
from sscd_vec.adapters.threatexchange import SSCDIndex, SSCDSignal
from sscd_vec.encoder import Encoder, EncoderConfig
from sscd_vec.encoder.model import build_model
from sscd_vec.normalize import FingerprintMismatch, Normalizer, UncalibratedError

MODULE = "sscd_vec.adapters.threatexchange"


def picture(seed: int, quality: int = 95, size: int = 96) -> bytes:
    """A few coloured rectangles, as JPEG."""
    rng = np.random.default_rng(seed)
    pixels = np.zeros((96, 96, 3), dtype=np.uint8) + rng.integers(0, 255, 3, dtype=np.uint8)
    for _ in range(12):
        (x, y), (w, h) = rng.integers(0, 80, 2), rng.integers(8, 50, 2)
        pixels[y : y + h, x : x + w] = rng.integers(0, 255, 3)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((size, size)).save(out, "JPEG", quality=quality)
    return out.getvalue()


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Encoder]]:
    """A small model and a normalizer fitted for it, as the environment names them."""
    import torch

    folder = tmp_path_factory.mktemp("tx")
    torch.manual_seed(0)
    config = EncoderConfig(trunk="resnet18", dim=32, size=64, size_mode="square")
    encoder = Encoder(build_model(config).eval())
    encoder.save_pretrained(folder / "model")
    background = encoder.encode([picture(1000 + i) for i in range(80)], show_progress=False)
    rules = Normalizer.fit(background, encoder=encoder, eps="oas")
    others = encoder.encode([picture(2000 + i) for i in range(40)], show_progress=False)
    scores = rules.scores(others[:20], others[20:])
    rules.with_threshold(float(scores.max()) + 0.02).save(folder / "normalizer.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(extension.MODEL, str(folder / "model"))
        patch.setenv(extension.NORMALIZER, str(folder / "normalizer.safetensors"))
        yield folder, encoder


def test_the_manifest_loads_and_fits_the_interfaces() -> None:
    manifest = ThreatExchangeExtensionManifest.load_from_module_name(MODULE)
    assert manifest.signal_types == (SSCDSignal,)
    mapping = SignalTypeMapping([PhotoContent], [SSCDSignal])
    assert mapping.signal_type_by_name == {"sscd": SSCDSignal}
    assert SSCDSignal.get_index_cls() is SSCDIndex and issubclass(SSCDIndex, SignalTypeIndex)


def test_signals_carry_the_model_and_the_normalizer(configured: tuple[Path, Encoder]) -> None:
    _, encoder = configured
    signal = SSCDSignal.hash_from_bytes(picture(1))
    rules = extension.normalizer()
    header = f"sscd:1:{encoder.fingerprint[:16]}:{rules.reference_fingerprint[:16]}:"
    assert signal.startswith(header)
    assert SSCDSignal.validate_signal_str(f" {signal}\n") == signal
    np.testing.assert_allclose(
        extension.from_signals([signal]), encoder.encode(picture(1), show_progress=False), atol=1e-3
    )
    assert SSCDSignal.hash_from_bytes(b"no image") == ""
    for wrong in ("", "abc", signal[:-8], signal.replace("sscd:1:", "sscd:2:"), header + "AAAA"):
        with pytest.raises(ValueError, match="sscd signal"):
            SSCDSignal.validate_signal_str(wrong)
    other = signal.replace(encoder.fingerprint[:16], "0" * 16)
    with pytest.raises(ValueError, match="made by another model or for another normalizer"):
        SSCDSignal.compare_hash(signal, other)


def test_copies_match_and_others_do_not(configured: tuple[Path, Encoder]) -> None:
    original, copy = (
        SSCDSignal.hash_from_bytes(picture(1)),
        SSCDSignal.hash_from_bytes(picture(1, 60)),
    )
    stranger = SSCDSignal.hash_from_bytes(picture(2))
    same = SSCDSignal.compare_hash(original, copy)
    assert same.match and SSCDSignal.compare_hash(copy, original) == same
    different = SSCDSignal.compare_hash(original, stranger)
    assert not different.match and same.distance < different.distance
    assert all(SSCDSignal.validate_signal_str(s) for s in SSCDSignal.get_examples())


def test_the_index_finds_every_entry_of_a_match(configured: tuple[Path, Encoder]) -> None:
    signals = [SSCDSignal.hash_from_bytes(picture(i)) for i in range(12)]
    entries = [(s, {"n": i}) for i, s in enumerate(signals)]
    index: SSCDIndex[dict[str, int]] = SSCDIndex.build(iter(entries))
    index.add(signals[3], {"n": 33})  # a second entry for the same signal
    assert len(index) == 13
    found = index.query(SSCDSignal.hash_from_bytes(picture(3, 70)))
    assert sorted(m.metadata["n"] for m in found) == [3, 33]
    assert float(found[0].similarity_info.pretty_str()) < 1
    assert index.query(SSCDSignal.hash_from_bytes(picture(99))) == []
    many = index.query_all(signals)
    assert [m[0].metadata["n"] for m in many if len(m) == 1] == [0, 1, 2, *range(4, 12)]

    stored = io.BytesIO()
    index.serialize(stored)
    stored.seek(0)
    again: SSCDIndex[dict[str, int]] = SSCDIndex.deserialize(stored)
    assert len(again) == 13 and again.query_all(signals) == many
    again.add(signals[0], {"n": 100})
    assert {m.metadata["n"] for m in again.query(signals[0])} == {0, 100}
    for broken in (b"", pickle.dumps(1), stored.getvalue()[:1000], stored.getvalue()[:-5]):
        with pytest.raises(ValueError, match="deserialize"):
            SSCDIndex.deserialize(io.BytesIO(broken))
    assert SSCDIndex.build([]).query(signals[0]) == []


def test_a_picture_that_cannot_be_hashed_matches_nothing(configured: tuple[Path, Encoder]) -> None:
    signals = [SSCDSignal.hash_from_bytes(picture(i)) for i in range(3)]
    index: SSCDIndex[int] = SSCDIndex.build(zip(signals, range(3), strict=True))
    unreadable = SSCDSignal.hash_from_bytes(b"no image")
    assert index.query(unreadable) == []
    found = index.query_all([unreadable, signals[2], "", signals[0], ""])
    assert [[match.metadata for match in row] for row in found] == [[], [2], [], [0], []]
    with pytest.raises(ValueError, match="sscd signal"):
        index.add(unreadable, 3)
    assert len(index) == 3


def test_the_model_is_loaded_once(
    configured: tuple[Path, Encoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    load = Encoder.from_pretrained

    def counting(*args: object, **kwargs: object) -> Encoder:
        loads.append(args)
        return load(*args, **kwargs)  # type: ignore[arg-type]  # whatever came

    monkeypatch.setattr(Encoder, "from_pretrained", counting)
    extension._load_encoder.cache_clear()
    for seed in range(5):
        SSCDSignal.hash_from_bytes(picture(seed))
    assert len(loads) == 1


def test_a_wrong_configuration_is_named(
    configured: tuple[Path, Encoder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stored = io.BytesIO()
    SSCDIndex.build([(s, 1) for s in SSCDSignal.get_examples()]).serialize(stored)
    rng = np.random.default_rng(0).normal(size=(100, 32))
    rows = (rng / np.linalg.norm(rng, axis=1, keepdims=True)).astype(np.float32)
    Normalizer.fit(rows, encoder="another").save(tmp_path / "other.safetensors")
    monkeypatch.setenv(extension.NORMALIZER, str(tmp_path / "other.safetensors"))
    with pytest.raises(FingerprintMismatch, match="fitted on descriptors of encoder another"):
        SSCDSignal.hash_from_bytes(picture(1))
    stored.seek(0)
    with pytest.raises(FingerprintMismatch, match="another encoder, whitening or layout"):
        SSCDIndex.deserialize(stored)
    with pytest.raises(UncalibratedError, match="no calibrated threshold"):
        SSCDSignal.compare_hash(*SSCDSignal.get_examples()[:2])
    monkeypatch.delenv(extension.NORMALIZER)
    with pytest.raises(
        RuntimeError, match=f"`sscd-vec normalize fit`.* Then set {extension.NORMALIZER}"
    ):
        SSCDSignal.hash_from_bytes(picture(1))


def test_the_shipped_model_and_normalizer_need_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (extension.MODEL, extension.NORMALIZER):
        monkeypatch.delenv(name, raising=False)
    shipped = Normalizer.from_pretrained()
    assert extension.normalizer().query_fingerprint == shipped.query_fingerprint
    path = matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)
    buffer = io.BytesIO()
    Image.open(str(path)).convert("RGB").resize((256, 300)).save(buffer, "JPEG", quality=60)
    original, copy, stranger = (
        SSCDSignal.hash_from_bytes(image)
        for image in (Path(str(path)).read_bytes(), buffer.getvalue(), picture(2, size=288))
    )
    same = SSCDSignal.compare_hash(original, copy)
    assert same.match
    assert same.distance < SSCDSignal.compare_hash(original, stranger).distance
    index: SSCDIndex[str] = SSCDIndex.build([(original, "original"), (stranger, "stranger")])
    assert index.query(copy)[0].metadata == "original"


def test_a_model_brings_its_own_normalizer(
    configured: tuple[Path, Encoder], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, _ = configured
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    shutil.copy(folder / "normalizer.safetensors", model / "normalizer.safetensors")
    monkeypatch.setenv(extension.MODEL, str(model))
    monkeypatch.delenv(extension.NORMALIZER)
    expected = Normalizer.load(folder / "normalizer.safetensors").query_fingerprint
    assert extension.normalizer().query_fingerprint == expected


def test_the_command_line_hashes_and_matches(
    configured: tuple[Path, Encoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # it keeps its state there
    (tmp_path / "a.jpg").write_bytes(picture(1))

    def tx(*arguments: str) -> str:
        command = [sys.executable, "-m", "threatexchange", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "sscd" in tx("config", "extensions", "add", MODULE)
    hashed = tx("hash", "--signal-type", "sscd", "photo", "a.jpg")
    assert hashed.split() == ["sscd", SSCDSignal.hash_from_bytes(picture(1))]
    tx("fetch")  # the sample exchange serves get_examples; this builds the index
    (tmp_path / "hashes").write_text(SSCDSignal.get_examples()[0])
    assert "sscd" in tx("match", "--hashes", "--only-signal", "sscd", "photo", "hashes")
    assert tx("match", "--only-signal", "sscd", "photo", "a.jpg") == "", "not a sample"
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    assert tx("match", "--only-signal", "sscd", "photo", "broken.jpg", "a.jpg") == ""
