"""A small bank of drawn pictures and a stand-in encoder that needs no network weights."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.app.engine import Engine
from sscd_vec.app.metrics import Metrics
from sscd_vec.cli.pictures import draw
from sscd_vec.encoder.images import ImageInput, load_pixels
from sscd_vec.normalize import Normalizer
from sscd_vec.photos.bank import Bank, BankSettings
from sscd_vec.photos.folder import find_images

SIDE = 8


class TinyEncoder:
    """Descriptors are 8x8 thumbnails without their mean: enough for resaved and resized copies."""

    dim = SIDE * SIDE * 3
    fingerprint = "tiny-encoder"

    def __init__(self) -> None:
        self.batches: list[int] = []

    def encode(
        self, inputs: Sequence[ImageInput], *, show_progress: bool | None = None
    ) -> NDArray[np.float32]:
        self.batches.append(len(inputs))
        rows = [self._grid(image).reshape(-1) for image in inputs]
        return np.stack([row / max(float(np.linalg.norm(row)), 1e-6) for row in rows])

    def heatmap(self, a: ImageInput, b: ImageInput) -> NDArray[np.float32]:
        return np.asarray((self._grid(a) * self._grid(b)).sum(2), np.float32)

    def _grid(self, image: ImageInput) -> NDArray[np.float32]:
        small = Image.fromarray(load_pixels(image)).resize((SIDE, SIDE), Image.Resampling.BOX)
        grid = np.asarray(small, np.float32)
        return np.asarray(grid - grid.mean((0, 1)), np.float32)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    for seed in range(12):
        image = draw(seed)
        image.thumbnail((240, 240))
        image.save(folder / f"picture-{seed:02}.png", compress_level=1)
    return folder


@pytest.fixture
def photos(tmp_path: Path, drawn: Path) -> Path:
    return Path(shutil.copytree(drawn, tmp_path / "photos"))


@pytest.fixture
def encoder() -> TinyEncoder:
    return TinyEncoder()


@pytest.fixture
def bank(photos: Path, encoder: TinyEncoder, tmp_path: Path) -> Iterator[Bank]:
    normalizer = Normalizer.identity(encoder.dim).with_threshold(0.8)
    settings = BankSettings("models/tiny", encoder.fingerprint)
    made = Bank.create(str(tmp_path / "bank.faiss"), normalizer, settings)
    files = find_images([photos])
    vectors = encoder.encode([file.path for file in files])
    made.add(files, [row[None] for row in vectors])
    made.commit()
    yield made
    made.close()


@pytest.fixture
def engine(bank: Bank, encoder: TinyEncoder) -> Engine:
    return Engine(bank, encoder, Metrics())
