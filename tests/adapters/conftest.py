"""What the adapter tests share: made-up descriptors with copies in them, and a real Milvus."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from faults.milvus_server import MilvusProcess, running
from sscd_vec.normalize import Normalizer

faiss.omp_set_num_threads(1)  # small data: threads would only wait for each other

Float32 = NDArray[np.float32]
DIM = 30  # + 2 = 32; a PQ of 5 parts needs padding to 35


def unit(rows: NDArray[np.floating]) -> Float32:
    scaled: Float32 = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return scaled


@dataclass(frozen=True)
class Photos:
    """References, and queries of which the first are noisy copies of the first references."""

    references: Float32
    queries: Float32

    @property
    def ids(self) -> list[str]:
        return [f"r{i}" for i in range(len(self.references))]


@pytest.fixture(scope="session")
def photos() -> Photos:
    rng = np.random.default_rng(0)
    references = unit(rng.normal(size=(600, DIM)))
    copies = references[:30] + 0.1 * rng.normal(size=(30, DIM))
    return Photos(references, unit(np.concatenate([copies, rng.normal(size=(10, DIM))])))


@pytest.fixture(scope="session")
def normalizer() -> Normalizer:
    rng = np.random.default_rng(1)
    return Normalizer.fit(unit(rng.normal(size=(2000, DIM)))).with_threshold(0.2)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MilvusProcess]:
    """PyPI's Milvus 2.3.5 on a free port, in a temporary folder, with authorization on."""
    with running(tmp_path_factory.mktemp("milvus"), authorized=True) as process:
        yield process


@pytest.fixture
def lite(tmp_path: Path) -> str:
    return str(tmp_path / "photos.db")
