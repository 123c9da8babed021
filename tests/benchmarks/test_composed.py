"""The pictures and descriptors the command benchmarks are measured on are what they claim."""

from pathlib import Path

import numpy as np
import pytest

from accuracy.edits.composed import KINDS, Kind, compose
from photos import Photo, find_photos
from speed.dedup import THRESHOLD, _groups, planted
from sscd_vec.cli.pictures import draw


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Photo]:
    folder: Path = tmp_path_factory.mktemp("photos")
    for seed in range(6):
        draw(seed).resize((160, 120)).save(folder / f"{seed}.png")
    return find_photos([folder])


@pytest.mark.parametrize("kind", KINDS)
def test_region_is_where_the_source_is(kind: Kind, photos: list[Photo]) -> None:
    sources, others = photos[:2], photos[2:]
    first, second = compose(sources, others, kind), compose(sources[::-1], others, kind)
    for made, swapped in zip(first, second, strict=True):
        assert made.region.shape == (made.image.height, made.image.width)
        assert 0.1 < made.share < 0.7
        # Another source in the same draw changes nothing but the region.
        changed = (np.asarray(made.image) != np.asarray(swapped.image)).any(axis=2)
        assert not changed[~made.region].any()
        assert changed[made.region].mean() > 0.9


def test_planted_groups_are_found() -> None:
    z, expected = planted(1500)
    assert len(expected) == 30 and {len(group) for group in expected} <= set(range(2, 7))
    assert {group.members for group in _groups(z)} == expected
    similar = z @ z.T
    np.fill_diagonal(similar, 0)
    strangers = np.ones_like(similar, bool)
    for group in expected:
        strangers[np.ix_(group, group)] = False
    assert similar[strangers].max() < THRESHOLD
