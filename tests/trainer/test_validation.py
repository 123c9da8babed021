from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import SSCDModel, build_model
from sscd_vec.files import find_images
from sscd_vec.plots import training_report
from sscd_vec.trainer import validation as validation_room
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.pixels import MemoryPixels, Storage
from sscd_vec.trainer.validation import Validation
from tests.trainer import tiny
from tests.trainer.images import write_folder


@pytest.fixture(autouse=True)
def tiny_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.install(monkeypatch)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("few"), 24, side=32)


def test_validation_is_perfect_for_a_model_that_knows_and_poor_for_one_that_does_not(
    few: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = MemoryPixels(find_images(few), Storage(32))
    validation = Validation(pixels, pixels, 24, Overlays())
    model = build_model(EncoderConfig(trunk=tiny.NAME, dim=64))
    random = np.random.default_rng(0)

    def directions(count: int) -> NDArray[np.float32]:
        z: NDArray[np.float32] = random.normal(size=(count, 64)).astype(np.float32)
        z /= np.linalg.norm(z, axis=1, keepdims=True)
        return z

    def blind(model: SSCDModel, images: torch.Tensor) -> NDArray[np.float32]:
        return directions(len(images))

    monkeypatch.setattr(validation_room, "encode", blind)
    assert validation(model).micro_ap < 0.5

    references, queries = (
        directions(len(validation.references)),
        directions(len(validation.queries)),
    )
    truth = validation.truth
    for query, reference in zip(truth.query_ids, truth.reference_ids, strict=True):
        queries[query] += 5 * references[reference]
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    answers = {id(validation.queries): queries, id(validation.references): references}

    def knowing(model: SSCDModel, images: torch.Tensor) -> NDArray[np.float32]:
        known = answers.get(id(images))
        return directions(len(images)) if known is None else known

    monkeypatch.setattr(validation_room, "encode", knowing)
    score = validation(model)
    assert score.micro_ap > 0.95
    assert score.copies.mean() > score.others.mean() + 0.3
    assert len(score.spectrum) == min(64, len(pixels))


@pytest.mark.parametrize("dimensions", [0, 1])
def test_a_collapsed_model_is_measured_too(
    few: Path, monkeypatch: pytest.MonkeyPatch, dimensions: int
) -> None:
    """All descriptors one point, or one line: there is little or nothing to whiten."""
    pixels = MemoryPixels(find_images(few), Storage(32))
    validation = Validation(pixels, pixels, 24, Overlays())

    def collapsed(model: SSCDModel, images: torch.Tensor) -> NDArray[np.float32]:
        z: NDArray[np.float32] = np.zeros((len(images), 2), dtype=np.float32)
        z[:, 0] = 1
        if dimensions == 1:
            z[::2] *= -1
        return z * np.float32(1 + 1e-6)  # rounded up, as unit length may be

    monkeypatch.setattr(validation_room, "encode", collapsed)
    score = validation(build_model(EncoderConfig(trunk=tiny.NAME, dim=2)))
    assert 0 <= score.micro_ap < 0.5
    assert (score.spectrum > 1e-6).sum() == dimensions
    # Drawn without a warning (an error here), both histograms with something in them.
    figure = training_report([], (score.copies, score.others, score.spectrum))
    bars = [bar.get_height() for bar in figure.axes[4].patches if isinstance(bar, Rectangle)]
    assert len(bars) == 120 and sum(bars[:60]) > 0 and sum(bars[60:]) > 0


def test_few_images_are_edited_several_times(few: Path) -> None:
    pixels = MemoryPixels(find_images(few), Storage(32))
    validation = Validation(pixels, pixels, 24, Overlays())
    assert len(validation.references) == 12
    assert len(validation.queries) == 306, "17 rounds of 18: 6 references and 12 others"
    copied = validation.truth.reference_ids.astype(int)
    assert {0, 2, 4, 6, 8, 10} <= set(copied.tolist())
    assert np.bincount(copied)[0] >= 17
    first = validation.queries[:18]
    assert (first - validation.queries[18:36]).abs().mean(dim=(1, 2, 3)).min() > 0.01
