import pytest
import torch

from sscd_vec.trainer import filters
from sscd_vec.trainer.filters import FILTERS, Filter


@pytest.mark.parametrize("edit", FILTERS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_a_filter_changes_a_view_and_stays_in_range(edit: Filter, strength: float) -> None:
    image = torch.rand(3, 20, 20, generator=torch.Generator().manual_seed(0))
    before = image.clone()
    changed = edit(image, strength)
    assert torch.equal(image, before), "the view given is left alone"
    assert changed.shape == image.shape and changed.dtype == image.dtype
    assert changed.min() >= 0 and changed.max() <= 1
    if (edit, strength) != (filters.bend, 0.5):  # a gamma of 1
        assert (changed - image).abs().mean() > 0.01


def test_filters_by_hand() -> None:
    image = torch.tensor([0.0, 0.25, 0.8]).view(3, 1, 1).expand(3, 2, 2)

    def values(edit: Filter, strength: float) -> list[float]:
        return [round(float(channel[0, 0]), 4) for channel in edit(image, strength)]

    assert values(filters.invert, 0) == [1, 0.75, 0.2]
    assert values(filters.solarize, 1) == [0, 0.25, 0.2]
    assert values(filters.solarize, 0) == [0, 0.25, 0.8]
    assert values(filters.posterize, 1) == [0, 0, 1]
    assert values(filters.bend, 1) == [0, 0.0156, 0.512]
    assert values(filters.turn_channels, 0) == [0.8, 0, 0.25]
    assert values(filters.turn_channels, 1) == [0.25, 0.8, 0]
    assert values(filters.sharpen, 1) == [0, 0.25, 0.8], "no edges, nothing to sharpen"
    assert values(filters.relief, 1) == [0.45, 0.475, 0.53], "no slopes: grey"


def test_sharpening_widens_an_edge() -> None:
    image = torch.full((3, 8, 8), 0.4)
    image[:, :, 4:] = 0.6
    sharp = filters.sharpen(image, 0.0)
    assert float(sharp[0, 4, 3]) == pytest.approx(0.4 - 0.2 * 2 / 5)
    assert float(sharp[0, 4, 4]) == pytest.approx(0.6 + 0.2 * 2 / 5)
    assert float(sharp[0, 4, 0]) == pytest.approx(0.4)
