"""The same page is recognised after what happens to pages; the next page of the pad is not."""

import io
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from sscd_vec.bank.exact import SIDE, SMALLEST, ExactCopy, compare, prepare

WORDS = "amount order paper station number garden river total second market light water".split()


def page(seed: int, number: str = "4711", width: int = 620, height: int = 800) -> Image.Image:
    """A letter of one company: the layout is always the same, the text is not."""
    dice = random.Random(seed)
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((40, 30, 110, 100), (190, 40, 60))
    pen.text((400, 60), f"No. {number}", "black", ImageFont.load_default(22))
    font = ImageFont.load_default(16)
    for line in range(22):
        pen.text((50, 150 + 27 * line), " ".join(dice.choices(WORDS, k=8)), (30, 30, 30), font)
    return image


def resaved(image: Image.Image, quality: int = 80) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def scaled(image: Image.Image, by: float) -> Image.Image:
    return resaved(image.resize((round(image.width * by), round(image.height * by))))


def cropped(image: Image.Image, left: int, top: int, right: int, bottom: int) -> Image.Image:
    return resaved(image.crop((left, top, image.width - right, image.height - bottom)))


def banded(image: Image.Image) -> Image.Image:
    taller = Image.new("RGB", (image.width, image.height + 90), "black")
    taller.paste(image, (0, 90))
    return resaved(taller)


def judged(first: Image.Image, second: Image.Image) -> ExactCopy:
    return compare(prepare(first), prepare(second))


ORIGINAL = page(0)


@pytest.mark.parametrize(
    "copy",
    [
        ORIGINAL,
        resaved(ORIGINAL, 40),
        resaved(resaved(ORIGINAL, 60), 75),
        scaled(ORIGINAL, 0.5),
        scaled(ORIGINAL, 1.4),
        cropped(ORIGINAL, 20, 0, 0, 0),
        cropped(ORIGINAL, 14, 31, 25, 40),
        scaled(cropped(ORIGINAL, 14, 31, 25, 40), 0.8),
        banded(ORIGINAL),
        resaved(Image.eval(ORIGINAL, lambda value: round(0.9 * value + 12))),
    ],
    ids="same resaved twice smaller larger edge crop crop+smaller band lighter".split(),
)
def test_copies_are_recognised(copy: Image.Image) -> None:
    found = judged(ORIGINAL, copy)
    assert found.is_copy and found.reason == "the same pixels everywhere"
    assert found.disagreement < 0.3


@pytest.mark.parametrize("seed", range(1, 6))
def test_another_letter_of_the_same_company_is_not(seed: int) -> None:
    assert not judged(ORIGINAL, resaved(page(seed))).is_copy


@pytest.mark.parametrize("number", ["4718", "4171", "4712"])
def test_one_digit_is_enough(number: str) -> None:
    found = judged(ORIGINAL, resaved(page(0, number)))
    assert not found.is_copy and found.reason == "they differ in places"


def test_the_order_does_not_matter() -> None:
    for other in (scaled(ORIGINAL, 0.7), page(3), cropped(ORIGINAL, 30, 30, 30, 30)):
        assert judged(ORIGINAL, other) == judged(other, ORIGINAL)


def test_two_screens_of_one_page_are_not_copies() -> None:
    above, below = cropped(ORIGINAL, 0, 0, 0, 120), cropped(ORIGINAL, 0, 120, 0, 0)
    found = judged(above, below)
    assert not found.is_copy and found.reason == "each shows something the other does not"


def test_a_small_part_is_not_a_copy() -> None:
    part = cropped(ORIGINAL, 150, 200, 150, 200)
    assert not judged(ORIGINAL, part).is_copy


def test_another_colour_is_another_image() -> None:
    def mark(colour: tuple[int, int, int]) -> Image.Image:
        image = Image.new("RGB", (400, 400), "white")
        ImageDraw.Draw(image).regular_polygon((200, 200, 120), 5, fill=colour)
        return image

    red, green = mark((200, 40, 40)), mark((0, 143, 40))  # as bright as each other
    assert judged(red, resaved(red)).is_copy
    found = judged(red, green)
    assert not found.is_copy and found.reason == "the colours differ"


def test_nothing_is_confirmed_without_anything_to_see() -> None:
    blank = Image.new("RGB", (400, 500), (250, 250, 250))
    assert judged(blank, blank) == (False, np.inf, 0.0, "one is almost blank: nothing to compare")
    tiny = scaled(ORIGINAL, (SMALLEST - 2) / ORIGINAL.height)
    found = judged(ORIGINAL, tiny)
    assert not found.is_copy and str(SMALLEST) in found.reason


def test_large_images_are_compared_small_and_arrays_like_images() -> None:
    large = page(0).resize((2480, 3200))
    assert max(prepare(large).shape) == SIDE
    np.testing.assert_array_equal(prepare(np.asarray(ORIGINAL)), prepare(ORIGINAL))
    assert judged(large, ORIGINAL).is_copy
    assert judged(ORIGINAL.convert("L"), ORIGINAL.convert("P")).disagreement < 0.3


def test_noise_does_not_pass_for_a_copy_of_other_noise() -> None:
    def noise(seed: int) -> Image.Image:
        rng = np.random.default_rng(seed)
        return Image.fromarray(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8))

    assert judged(noise(0), noise(0)).is_copy
    assert not judged(noise(0), noise(1)).is_copy


def stripes(width: int, height: int, across: bool) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray((255 * ((x if across else y) // 20 % 2)).astype(np.uint8))


@pytest.mark.parametrize("across", [True, False])
def test_level_lines_do_not_stop_it(across: bool) -> None:
    plain = stripes(300, 260, across)
    assert judged(plain, resaved(plain)).is_copy
    assert not judged(plain, stripes(300, 260, not across)).is_copy


@pytest.mark.parametrize("seed", range(12))
def test_any_two_images_get_an_answer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = []
    for _ in range(2):
        height, width = (int(side) for side in np.exp(rng.uniform(np.log(2), np.log(900), 2)))
        pixels = rng.integers(0, 256, (height, width, 3)) * (rng.random((height, width, 1)) < 0.1)
        pixels[: int(height * rng.random())] = rng.integers(0, 256)
        pair.append(Image.fromarray(pixels.astype(np.uint8)))
    found = judged(*pair)
    assert not found.is_copy and found.reason and 0 <= found.overlap <= 1


@pytest.mark.parametrize(
    "pixels", [np.zeros((200, 200), np.uint8), np.zeros((200, 200, 3), np.float32)]
)
def test_other_arrays_are_refused(pixels: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected uint8 pixels \(h, w, 3\) from prepare, got"):
        compare(prepare(ORIGINAL), pixels)
