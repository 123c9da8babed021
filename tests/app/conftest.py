"""A small bank of drawn images, described by a stand-in encoder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sscd_vec.app.engine import Engine
from sscd_vec.app.metrics import Metrics
from sscd_vec.bank import Bank
from sscd_vec.cli.pictures import draw
from sscd_vec.normalize import Normalizer
from tests.tiny_encoder import TinyEncoder


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
def bank(
    photos: Path, encoder: TinyEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bank]:
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))
    normalizer = Normalizer.identity(encoder.dim).with_threshold(0.8)
    with Bank(tmp_path / "bank.faiss", model=encoder, normalizer=normalizer) as made:
        made.add(photos)
        encoder.batches.clear()
        yield made


@pytest.fixture
def engine(bank: Bank) -> Engine:
    return Engine(bank, Metrics())
