"""Drawn images, a stand-in encoder, and banks of them on every backend."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sscd_vec.bank import Bank
from sscd_vec.cli.pictures import draw
from sscd_vec.normalize import Kind, Normalizer
from tests.tiny_encoder import TinyEncoder

COUNT = 8
COPY = 0.93  # the least score of a copy; drawn images are alike
KINDS: tuple[Kind, ...] = ("search", "symmetric", "tiled")
OpenBank = Callable[..., Bank]


@pytest.fixture(autouse=True)
def own_key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder, and so a signing key, of the test's own."""
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    for seed in range(COUNT):
        image = draw(seed)
        image.thumbnail((160, 160))
        image.save(folder / f"image-{seed:02}.png", compress_level=1)
    return folder


@pytest.fixture
def images(tmp_path: Path, drawn: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for file in drawn.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def encoder() -> TinyEncoder:
    return TinyEncoder()


@pytest.fixture(scope="session")
def normalizer() -> Normalizer:
    plain = Normalizer.identity(TinyEncoder.dim)
    for kind in KINDS:
        plain = plain.with_threshold(COPY, kind)
    return plain


@pytest.fixture(params=["faiss", "lite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / ("known.faiss" if request.param == "faiss" else "known.db"))


@pytest.fixture
def open_bank(encoder: TinyEncoder, normalizer: Normalizer) -> OpenBank:
    def open_(location: Any = None, **options: Any) -> Bank:  # noqa: ANN401
        defaults: dict[str, Any] = {"model": encoder, "normalizer": normalizer}
        return Bank(location, **(defaults | options))

    return open_
