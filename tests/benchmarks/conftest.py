import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.model import build_model


def synthetic_photo(seed: int, side: int = 96) -> Image.Image:
    """A picture no other seed makes: coloured waves and rectangles."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:side, 0:side] / side
    pixels = np.zeros((side, side, 3))
    for channel in range(3):
        for _ in range(3):
            a, b, phase = rng.uniform(-12, 12, 3)
            pixels[..., channel] += rng.uniform(0.2, 1) * np.sin(a * x + b * y + phase)
    for _ in range(6):
        left, top = rng.integers(0, side - 16, 2)
        width, height = rng.integers(8, side // 2, 2)
        pixels[top : top + height, left : left + width] = rng.uniform(-2, 2, 3)
    return Image.fromarray(np.clip(128 + 55 * pixels, 0, 255).astype(np.uint8))


def jpeg(image: Image.Image, quality: int = 92) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def photo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty different pictures."""
    folder = tmp_path_factory.mktemp("photos")
    for seed in range(40):
        (folder / f"{seed:03d}.jpg").write_bytes(jpeg(synthetic_photo(seed)))
    return folder


@pytest.fixture(scope="session")
def disc_like(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set made of them."""
    from accuracy import make_disc_like

    out = tmp_path_factory.mktemp("set") / "disc"
    make_disc_like.main([str(photo_folder), str(out), "--workers", "1", "--unmatched", "14"])
    return out


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower in several threads, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained ResNet-18 of 6 dimensions."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("encoder")
    config = EncoderConfig(trunk="resnet18", dim=6, size=32, size_mode="square")
    Encoder(build_model(config)).save_pretrained(folder)
    return folder
