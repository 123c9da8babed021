import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import transforms

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.preprocess import normalize, preprocess, resize, target_size


def noise(height: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    generator = np.random.default_rng(height * 1000 + width)
    return generator.integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("mode", "size", "image", "wanted"),
    [
        ("short", 288, (3000, 4000), (288, 384)),
        ("short", 288, (4000, 3000), (384, 288)),
        ("short", 288, (500, 333), (432, 288)),
        ("short", 100, (10, 15), (100, 150)),
        ("square", 320, (3000, 4000), (320, 320)),
        ("long", 800, (3000, 4000), (600, 800)),
        ("long", 800, (20, 600), (26, 800)),
        ("long", 10, (2, 60), (1, 10)),
    ],
)
def test_target_size(mode: str, size: int, image: tuple[int, int], wanted: tuple[int, int]) -> None:
    config = EncoderConfig.from_dict({"size": size, "size_mode": mode})
    assert target_size(*image, config) == wanted


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 400), st.integers(2, 400), st.integers(16, 300))
def test_short_side_is_what_torchvision_makes_of_it(height: int, width: int, size: int) -> None:
    wanted = transforms.Resize(size)(Image.new("L", (width, height))).size
    assert target_size(height, width, EncoderConfig(size=size)) == wanted[::-1]


@pytest.mark.parametrize("shape", [(300, 401), (401, 300), (64, 64), (33, 900), (60, 80)])
def test_agrees_with_the_papers_preprocessing(shape: tuple[int, int]) -> None:
    config = EncoderConfig(size=64)
    pixels = noise(*shape)
    steps = [transforms.Resize(64), transforms.ToTensor(),
             transforms.Normalize(config.mean, config.std)]  # fmt: skip
    wanted = transforms.Compose(steps)(Image.fromarray(pixels))[None]
    ours = preprocess(pixels, config)
    assert ours.shape == wanted.shape and ours.dtype == torch.float32
    # One level of 255 apart at most, and hardly anywhere.
    level = 1 / (255 * min(config.std))
    assert float((ours - wanted).abs().max()) < 1.01 * level
    assert float((ours - wanted).abs().mean()) < 0.05 * level


def test_right_size_is_left_alone() -> None:
    pixels = noise(64, 96)
    np.testing.assert_array_equal(resize(pixels, EncoderConfig(size=64)).numpy(), pixels)


def test_read_only_pixels_are_taken() -> None:
    pixels = noise(64, 96)
    pixels.flags.writeable = False
    assert resize(pixels, EncoderConfig(size=64)).shape == (64, 96, 3)


def test_normalize_by_hand() -> None:
    config = EncoderConfig(mean=(0.5, 0.0, 1.0), std=(0.5, 1.0, 2.0))
    black_white = torch.tensor([0, 255], dtype=torch.uint8).reshape(1, 1, 2, 1).expand(1, 1, 2, 3)
    x = normalize(black_white, config)
    assert x.shape == (1, 3, 1, 2)
    torch.testing.assert_close(x[0, :, 0], torch.tensor([[-1.0, 1.0], [0.0, 1.0], [-0.5, 0.0]]))
    assert normalize(torch.zeros(2, 4, 5, 3, dtype=torch.uint8), config).is_contiguous(
        memory_format=torch.channels_last
    )


def test_floats_and_bytes_are_normalized_alike() -> None:
    config = EncoderConfig()
    pixels = torch.from_numpy(noise(12, 20))[None]
    x = normalize(pixels.permute(0, 3, 1, 2) / 255, config)
    torch.testing.assert_close(x, normalize(pixels, config), atol=1e-5, rtol=0)
    assert x.is_contiguous(memory_format=torch.channels_last)
