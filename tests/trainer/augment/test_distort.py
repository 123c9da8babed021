import numpy as np
import pytest
import torch

from sscd_vec.trainer.augment import distort as room
from sscd_vec.trainer.augment.distort import DISTORTIONS, Distortion, distort, perspective
from tests.trainer.images import pixels

KINDS = sorted(set(DISTORTIONS), key=lambda edit: edit.__name__)


@pytest.mark.parametrize("edit", KINDS, ids=lambda edit: edit.__name__)
def test_an_edit_changes_a_view_and_stays_in_range(edit: Distortion) -> None:
    image = pixels(1, 48)[0].permute(2, 0, 1).float() / 255
    before = image.clone()
    changes = []
    for seed in range(8):
        edited = edit(image, np.random.default_rng(seed))
        assert edited.shape == image.shape and edited.dtype == image.dtype
        assert -1e-6 <= edited.min() and edited.max() <= 1 + 1e-6
        again = edit(image, np.random.default_rng(seed))
        assert torch.equal(edited, again), "all randomness comes from the generator"
        changes.append(float((edited - image).abs().mean()))
    assert torch.equal(image, before), "the view given is left alone"
    assert np.median(changes) > 0.01
    assert len(set(changes)) > 1


def test_every_edit_is_drawn() -> None:
    calls = set()
    for seed in range(400):
        kind = int(np.random.default_rng(seed).integers(len(DISTORTIONS)))
        calls.add(DISTORTIONS[kind])
    assert calls == set(DISTORTIONS)
    image = torch.rand(3, 32, 32)
    assert torch.equal(distort(image, 5), distort(image, 5))


def test_four_points_determine_a_homography() -> None:
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=np.float64)
    moved = corners * [[0.7, 0.9], [0.8, 1.0], [0.6, 0.75], [1.0, 0.9]]
    matrix = room._homography(corners, moved)
    mapped = np.c_[corners, np.ones(4)] @ matrix.T
    np.testing.assert_allclose(mapped[:, :2] / mapped[:, 2:], moved, atol=1e-12)


def test_perspective_keeps_a_plain_view_plain_inside() -> None:
    for seed in range(20):
        seen = perspective(torch.full((3, 32, 32), 0.5), np.random.default_rng(seed))
        assert torch.allclose(seen[:, 14:18, 14:18], torch.tensor(0.5)), "its centre shows the view"
