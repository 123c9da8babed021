import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.encoder import Encoder, EncoderConfig, build_model
from sscd_vec.encoder.images import ImageError

DIM = 32


def make_encoder(**changes: object) -> Encoder:
    torch.manual_seed(0)
    config = EncoderConfig(trunk="resnet18", dim=DIM, size=64).replace(**changes)
    return Encoder(build_model(config), device="cpu")


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return make_encoder()


def picture(seed: int, height: int = 80, width: int = 120) -> NDArray[np.uint8]:
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels: NDArray[np.uint8], kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def test_rows_are_unit_float32_in_input_order(encoder: Encoder) -> None:
    pictures = [picture(seed, 80, 60 + 20 * (seed % 3)) for seed in range(10)]
    z = encoder.encode(pictures, batch_size=2)
    assert z.shape == (10, DIM) and z.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), 1, atol=1e-6)
    for row, one in zip(z, pictures, strict=True):
        np.testing.assert_allclose(encoder.encode(one), row[None], atol=1e-5)
    assert np.abs(z[0] - z[1]).max() > 1e-4  # the pictures do differ


def test_same_as_the_plain_model(encoder: Encoder) -> None:
    pixels = picture(3, 64, 96)
    mean, std = np.array(encoder.config.mean), np.array(encoder.config.std)
    x = torch.from_numpy(((pixels / 255 - mean) / std).transpose(2, 0, 1)[None]).float()
    model = encoder.model.eval()
    with torch.inference_mode():
        wanted = model(x).numpy()
    np.testing.assert_allclose(encoder.encode(pixels), wanted, atol=1e-5)


def test_input_kind_and_batch_mates_do_not_matter(encoder: Encoder, tmp_path: Path) -> None:
    pixels = picture(1)
    content = encoded(pixels)
    path = tmp_path / "picture.png"
    path.write_bytes(content)
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    sources: list[Any] = [
        path, str(path), content, io.BytesIO(content), Image.fromarray(pixels), pixels, tensor,
        tensor / 255, np.dstack((pixels, np.full(pixels.shape[:2], 255, np.uint8))),
    ]  # fmt: skip
    alone = encoder.encode(pixels)
    mates = [picture(seed) for seed in range(5, 12)]
    together = encoder.encode([*mates, *sources, picture(20, 70, 90)])
    for row in together[len(mates) : len(mates) + len(sources)]:
        np.testing.assert_allclose(row, alone[0], atol=1e-5)


def test_single_images_batches_generators_and_nothing(encoder: Encoder) -> None:
    stack = np.stack([picture(seed) for seed in range(3)])
    z = encoder.encode(stack)
    assert z.shape == (3, DIM)
    tensors = torch.from_numpy(stack).permute(0, 3, 1, 2)
    for inputs in (list(stack), (one for one in stack), tensors, iter(tensors)):
        np.testing.assert_allclose(encoder.encode(inputs), z, atol=1e-5)
    assert encoder.encode(stack[0]).shape == (1, DIM)
    assert encoder.encode([]).shape == (0, DIM)
    assert encoder.encode(iter(())).shape == (0, DIM)
    assert len(encoder.encode([], on_error="skip")) == 0


def test_a_folder_is_walked(encoder: Encoder, tmp_path: Path) -> None:
    for index in range(3):
        (tmp_path / f"{index}.png").write_bytes(encoded(picture(index)))
    (tmp_path / "readme.txt").write_text("no image")
    result = encoder.encode(tmp_path, on_error="skip")
    assert [Path(name).name for name in result.names] == ["0.png", "1.png", "2.png"]
    np.testing.assert_allclose(
        result.descriptors, encoder.encode([picture(index) for index in range(3)]), atol=1e-5
    )


def test_raise_names_the_first_bad_input(encoder: Encoder) -> None:
    with pytest.raises(ImageError, match=r"bytes at position 2: empty"):
        encoder.encode([picture(0), encoded(picture(1)), b"", "nowhere.jpg"])


def test_skip_returns_rows_positions_names_and_reasons(encoder: Encoder, tmp_path: Path) -> None:
    good = tmp_path / "good.png"
    good.write_bytes(encoded(picture(1)))
    cut = encoded(picture(2), "JPEG")[:-200]
    inputs: list[Any] = [picture(0), b"", str(good), tmp_path / "none.jpg", cut, picture(3, 64, 64)]
    result = encoder.encode(inputs, on_error="skip", batch_size=2)
    assert result.positions.tolist() == [0, 2, 5] and result.positions.dtype == np.int64
    assert result.names == ("ndarray at position 0", str(good), "ndarray at position 5")
    assert [(one.position, one.name) for one in result.skipped] == [
        (1, "bytes at position 1"),
        (3, str(tmp_path / "none.jpg")),
        (4, "bytes at position 4"),
    ]
    assert [one.reason for one in result.skipped][:2] == ["empty", "no such file"]
    wanted = encoder.encode([picture(0), picture(1), picture(3, 64, 64)])
    np.testing.assert_allclose(result.descriptors, wanted, atol=1e-5)
    assert len(result) == 3


def test_all_bad_is_no_row(encoder: Encoder) -> None:
    result = encoder.encode([b"", b"x"], on_error="skip")
    assert result.descriptors.shape == (0, DIM) and len(result.skipped) == 2


def test_fast_decode_is_close_and_exact_is_exact() -> None:
    encoder = make_encoder(size=48)
    pixels = picture(4, 600, 800)
    content = encoded(pixels, "JPEG", quality=95)
    decoded = np.array(Image.open(io.BytesIO(content)))
    wanted = encoder.encode(decoded)
    np.testing.assert_allclose(encoder.encode(content, decode="exact"), wanted, atol=1e-5)
    fast = encoder.encode(content)
    assert np.abs(fast - wanted).max() > 1e-6  # it did take the short cut
    assert float((fast * wanted).sum()) > 0.999


@pytest.mark.parametrize("mode", ["short", "square", "long"])
def test_size_modes(mode: str) -> None:
    encoder = make_encoder(size=40, size_mode=mode)
    assert encoder.encode([picture(0), picture(1, 120, 80)]).shape == (2, DIM)


def test_tensor_output(encoder: Encoder) -> None:
    z = encoder.encode([picture(0)], convert_to_tensor=True)
    assert isinstance(z, torch.Tensor) and z.dtype == torch.float32
    with pytest.raises(ValueError, match="from_numpy"):
        encoder.encode([picture(0)], convert_to_tensor=True, on_error="skip")  # type: ignore[call-overload]


def test_milvus_and_sentence_transformers_manners(encoder: Encoder) -> None:
    inputs = [picture(0), picture(1)]
    z = encoder.encode(inputs)
    assert encoder.dim == DIM
    np.testing.assert_array_equal(encoder.encode_query(inputs), z)
    np.testing.assert_array_equal(encoder.encode_document(inputs, batch_size=2), z)
    for vectors in (
        encoder(inputs),
        encoder.encode_queries(inputs),
        encoder.encode_documents(inputs),
    ):
        assert isinstance(vectors, list) and vectors[0].shape == (DIM,)
        np.testing.assert_array_equal(np.stack(vectors), z)


def test_weights_may_change_under_the_encoder() -> None:
    encoder = make_encoder()
    before, mark = encoder.encode(picture(0)), encoder.fingerprint
    with torch.no_grad():
        encoder.model.head.weight.mul_(torch.linspace(0.5, 2, DIM)[:, None])  # type: ignore[operator]
    assert np.abs(encoder.encode(picture(0)) - before).max() > 1e-3
    assert encoder.fingerprint != mark


def test_copies_also_through_pickle_encode_the_same(encoder: Encoder) -> None:
    pictures = [picture(seed) for seed in range(5)]
    expected = encoder.encode(pictures)  # the network is ready: threads, prepared weights
    for twin in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        assert twin.fingerprint == encoder.fingerprint
        np.testing.assert_allclose(twin.encode(pictures), expected, atol=1e-5)


def test_the_models_mode_is_respected() -> None:
    encoder = make_encoder()
    wanted = encoder.encode(picture(0))
    encoder.model.train()
    statistics = {name: buffer.clone() for name, buffer in encoder.model.named_buffers()}
    np.testing.assert_array_equal(encoder.encode(picture(0)), wanted)
    assert encoder.model.training
    assert all(torch.equal(statistics[name], b) for name, b in encoder.model.named_buffers())


def test_fingerprint_follows_what_descriptors_depend_on(tmp_path: Path) -> None:
    encoder = make_encoder()
    assert make_encoder().fingerprint == encoder.fingerprint
    others = [make_encoder(size=96), make_encoder(size_mode="square"), make_encoder(gem_p=4.0)]
    torch.manual_seed(1)
    others.append(Encoder(build_model(encoder.config)))
    assert len({encoder.fingerprint, *(other.fingerprint for other in others)}) == 5
    encoder.save_pretrained(tmp_path / "saved")
    loaded = Encoder.from_pretrained(tmp_path / "saved", device="cpu")
    assert loaded.fingerprint == encoder.fingerprint and loaded.config == encoder.config
    np.testing.assert_allclose(loaded.encode(picture(0)), encoder.encode(picture(0)), atol=1e-6)
    square = Encoder.from_pretrained(tmp_path / "saved", size=32, size_mode="square")
    assert (square.config.size, square.config.size_mode) == (32, "square")
    assert square.fingerprint != encoder.fingerprint


@pytest.mark.parametrize("mode", ["short", "square", "long"])
def test_a_scale_is_that_of_an_encoder_of_another_size(mode: str) -> None:
    small, large = make_encoder(size_mode=mode), make_encoder(size_mode=mode, size=96)
    pixels = picture(1)
    wanted = large.encode(pixels)
    np.testing.assert_allclose(small.encode(pixels, scale=1.5), wanted, atol=1e-5)
    streamed = next(small.encode_stream([pixels], scale=1.5))
    np.testing.assert_allclose(streamed.descriptors, wanted, atol=1e-5)
    assert np.abs(small.encode(pixels) - wanted).max() > 1e-4
    assert small.config.size == 64, "only this time"


def test_trunk_features_have_the_trunks_dim() -> None:
    encoder = make_encoder(features="trunk")
    assert encoder.dim == 512 and encoder.encode(picture(0)).shape == (1, 512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"num_workers": -1}, "num_workers"),
        ({"on_error": "ignore"}, "on_error"),
        ({"decode": "quick"}, "decode"),
        ({"scale": 0}, "scale"),
    ],
)
def test_wrong_options_are_named(encoder: Encoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder.encode([picture(0)], **options)


def test_wrong_inputs_are_explained(encoder: Encoder) -> None:
    with pytest.raises(TypeError, match="got int"):
        encoder.encode(7)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="four axes"):
        encoder.encode(np.zeros((1, 1, 4, 4, 3), np.uint8))


def test_a_generators_own_error_comes_through(encoder: Encoder) -> None:
    def broken() -> Iterator[NDArray[np.uint8]]:
        yield picture(0)
        raise ZeroDivisionError("the caller's bug")

    with pytest.raises(ZeroDivisionError, match="the caller's bug"):
        encoder.encode(broken())
