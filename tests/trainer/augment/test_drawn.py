from pathlib import Path

import matplotlib
import numpy as np
import pytest

from sscd_vec.trainer.augment.drawn import KINDS, draw_image

FONT = str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf")


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: KINDS[kind].__name__)
def test_a_kind_draws_different_images_that_follow_their_seeds(kind: int) -> None:
    drawn = [draw_image(seed, kind, 96, (FONT,)) for seed in range(4)]
    for pixels, aspect in drawn:
        assert pixels.shape == (96, 96, 3) and pixels.dtype == np.uint8
        assert 9 / 17 < aspect < 17 / 9
        assert pixels.std() > 1, "something is drawn"
    for i in range(4):
        for j in range(i):
            apart = np.abs(drawn[i][0].astype(int) - drawn[j][0]).mean()
            assert apart > 2, "two of one kind are told apart"
    again, aspect = draw_image(2, kind, 96, (FONT,))
    assert np.array_equal(again, drawn[2][0]) and aspect == drawn[2][1]


def test_kinds_wrap_around_and_fonts_may_be_missing_or_broken(tmp_path: Path) -> None:
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    plain, _ = draw_image(3, 0, 64)
    broken, _ = draw_image(3, 0, 64, (str(tmp_path / "broken.ttf"),))
    assert plain.std() > 1 and broken.std() > 1
    wrapped, _ = draw_image(3, len(KINDS), 64)
    assert wrapped.shape == plain.shape
