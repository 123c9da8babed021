"""Aligned pages: the same page on a table is a copy, the next page of the pad is not."""

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from sscd_vec.verify.everywhere import SMALLEST, Agreeing, agree_everywhere
from tests.bank.test_exact import ORIGINAL, banded, cropped, page, resaved, scaled

Matrix = NDArray[np.float64]
SAME = np.eye(3)
FRAME = np.array([[0.0, 0], [1, 0], [1, 1], [0, 1]])
# Corners of the page on the table, in parts of the frame.
CORNERS = np.array([[0.08, 0.05], [0.9, 0.1], [0.95, 0.93], [0.04, 0.9]])


def to_corners(start: Matrix, end: Matrix) -> Matrix:
    """The perspective that takes four corners to four others."""
    rows, ends = [], []
    for (x, y), (u, v) in zip(start, end, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        ends += [u, v]
    return np.append(np.linalg.solve(np.array(rows), np.array(ends)), 1).reshape(3, 3)


def photographed(image: Image.Image) -> Image.Image:
    """A page on a table, seen from a slant, darker on one side."""
    size = np.array(image.size)
    back = to_corners(CORNERS * size, FRAME * size).ravel()[:8].tolist()
    slanted = image.transform(
        image.size,
        Image.Transform.PERSPECTIVE,
        back,
        Image.Resampling.BICUBIC,
        fillcolor=(120, 90, 60),
    )
    light = Image.linear_gradient("L").rotate(90).resize(image.size)
    return resaved(Image.composite(slanted, Image.eval(slanted, lambda v: round(0.75 * v)), light))


ON_TABLE = to_corners(CORNERS, FRAME)


def agree(query: Image.Image, reference: Image.Image, transform: Matrix = SAME) -> Agreeing:
    return agree_everywhere(np.asarray(query), np.asarray(reference), transform)


def test_copies_are_the_same_everywhere() -> None:
    for query in (ORIGINAL, resaved(ORIGINAL, 40), scaled(ORIGINAL, 0.6), scaled(ORIGINAL, 1.3)):
        found = agree(query, ORIGINAL)
        assert found.is_copy and found.differing == 0 and found.disagreement < 0.3
        assert found.reason == "aligned, they are the same everywhere"


def test_an_alignment_that_is_a_little_off_is_refined() -> None:
    off = np.array([[1.004, 0.002, -0.004], [-0.003, 0.997, 0.005], [0.004, -0.003, 1.0]])
    assert agree(resaved(ORIGINAL), ORIGINAL, off).is_copy


def test_a_page_on_a_table_is_a_copy_either_way_round() -> None:
    assert agree(photographed(ORIGINAL), ORIGINAL, ON_TABLE).is_copy
    assert agree(
        ORIGINAL, photographed(ORIGINAL), np.linalg.inv(ON_TABLE).astype(np.float64)
    ).is_copy


@pytest.mark.parametrize("seed", range(1, 4))
def test_another_letter_of_the_same_company_differs(seed: int) -> None:
    for query, transform in ((page(seed), SAME), (photographed(page(seed)), ON_TABLE)):
        found = agree(query, ORIGINAL, transform)
        assert found.is_copy is False and found.reason == "aligned, they differ in many places"


@pytest.mark.parametrize("number", ["4718", "4171", "4712"])
def test_one_digit_is_enough_to_doubt(number: str) -> None:
    other = page(0, number)
    for query, transform in ((resaved(other), SAME), (photographed(other), ON_TABLE)):
        found = agree(query, ORIGINAL, transform)
        assert found.is_copy is None and found.reason == "aligned, they differ in places"


def test_one_must_contain_the_other() -> None:
    part = cropped(ORIGINAL, 0, 0, 0, 120)
    down = np.diag([1, part.height / ORIGINAL.height, 1])
    assert agree(part, ORIGINAL, down).is_copy
    below = cropped(ORIGINAL, 0, 120, 0, 0)
    shift = np.array([[1, 0, 0], [0, 1, -120 / part.height], [0, 0, 1.0]])
    found = agree(part, below, shift)
    assert found.is_copy is None and "each shows something" in found.reason
    taller = banded(ORIGINAL)
    inside = np.array([[1, 0, 0], [0, taller.height / 800, -90 / 800], [0, 0, 1.0]])
    assert agree(taller, ORIGINAL, inside).is_copy


def test_another_colour_is_no_proof() -> None:
    red, green, blue = ORIGINAL.split()
    found = agree(Image.merge("RGB", (green, red, blue)), ORIGINAL)
    assert found.is_copy is None


def test_what_cannot_be_compared_proves_nothing() -> None:
    tiny = scaled(ORIGINAL, (SMALLEST - 10) / ORIGINAL.height)
    assert agree(tiny, ORIGINAL).is_copy is None
    blank = Image.new("RGB", (400, 500), "white")
    assert agree(blank, blank).is_copy is None
    away = np.array([[1, 0, 3.0], [0, 1, 0], [0, 0, 1]])
    assert agree(ORIGINAL, ORIGINAL, away).is_copy is None
