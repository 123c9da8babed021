"""What different images share, a frame or a pattern, is not taken for a copy."""

import numpy as np
import pytest
from PIL import Image

from sscd_vec.verify import Evidence, Verifier
from sscd_vec.verify.shared import FRAME, PATTERN
from tests.verify.scenes import Pixels, crop, paste, scene, wall, window

SURE = 0.3  # a descriptor score at which little more is needed


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier.from_pretrained()


def compared(verifier: Verifier, query: Pixels, reference: Pixels) -> Evidence:
    features = verifier.extract(reference).best(verifier.kept)
    return verifier.compare(verifier.extract(query), features, SURE)


def resaved(pixels: Pixels) -> Pixels:
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((image.width * 3 // 4, image.height * 3 // 4)))


@pytest.mark.parametrize("other", range(2, 6))
def test_a_frame_around_another_image_is_in_doubt(verifier: Verifier, other: int) -> None:
    found = compared(verifier, window(scene(other)), window(scene(1)))
    assert found.located and found.doubt == FRAME and not found.is_copy


@pytest.mark.parametrize("shift", [0, 3, 7])
def test_a_repeating_pattern_is_in_doubt(verifier: Verifier, shift: int) -> None:
    found = compared(verifier, wall(scene(2), shift), wall(scene(1), 3))
    assert found.located and found.doubt == PATTERN and not found.is_copy


@pytest.mark.parametrize("image", [window(scene(1)), wall(scene(1), 5)])
def test_the_same_image_in_the_same_surroundings_is_a_copy(
    verifier: Verifier, image: Pixels
) -> None:
    for query in (image, resaved(image), 255 - image):
        found = compared(verifier, query, image)
        assert found.is_copy and found.doubt == ""


def test_an_image_with_another_one_on_it_is_a_copy(verifier: Verifier) -> None:
    inset = paste(scene(2), scene(1), (120, 60, 280, 200))
    assert compared(verifier, inset, scene(1)).is_copy
    assert compared(verifier, window(scene(1)), scene(1)).is_copy
    assert compared(verifier, crop(window(scene(1)), 0, 0.1, 1, 0.7), window(scene(1))).is_copy


def test_what_does_not_align_is_not_looked_at(verifier: Verifier) -> None:
    assert compared(verifier, scene(2), scene(1)).doubt == ""
