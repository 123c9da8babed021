"""Which of several copies is kept, and what the report needs of them."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sscd_vec.cli.pictures import EDITS, draw
from sscd_vec.photos.quality import keep, look, sharpness


@pytest.mark.parametrize("seed", [1, 7, 8, 11])
def test_sharp_original_beats_its_edits(seed: int, tmp_path: Path) -> None:
    original = draw(seed)
    original.save(tmp_path / "original.png")
    original.resize((150, 110)).resize(original.size).save(tmp_path / "enlarged.png")
    original.filter(ImageFilter.GaussianBlur(2)).save(tmp_path / "blurred.png")
    original.resize((200, 150)).save(tmp_path / "small.png")
    rng = np.random.default_rng(0)
    EDITS["captioned"](original, rng).save(tmp_path / "captioned.jpg", quality=85)
    EDITS["framed"](original, rng).save(tmp_path / "framed.jpg", quality=85)
    names = ["enlarged.png", "blurred.png", "original.png", "small.png", "captioned.jpg"]
    names.append("framed.jpg")
    pictures = [look(tmp_path / name) for name in names]
    assert names[keep(pictures)] == "original.png"


def test_larger_file_then_shorter_path_breaks_ties(tmp_path: Path) -> None:
    draw(8).save(tmp_path / "long-name.png", compress_level=9)
    draw(8).save(tmp_path / "short.png", compress_level=9)
    draw(8).save(tmp_path / "bigger-file.png", compress_level=1)
    pictures = [look(tmp_path / f"{n}.png") for n in ("long-name", "short", "bigger-file")]
    assert keep(pictures) == 2
    assert keep(pictures[:2]) == 1


def test_orientation_transparency_and_thumbnail(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (300, 100), (10, 200, 10)).save(tmp_path / "turned.jpg", exif=exif)
    turned = look(tmp_path / "turned.jpg")
    assert (turned.width, turned.height) == (100, 300)
    with Image.open(io.BytesIO(turned.thumbnail)) as small:
        assert small.size == (80, 240)
    Image.new("RGBA", (50, 50), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    with Image.open(io.BytesIO(look(tmp_path / "clear.png").thumbnail)) as clear:
        assert np.asarray(clear).min() > 245  # transparent shows white, not red


def test_sharpness_of_a_checkerboard() -> None:
    board = (np.indices((9, 9)).sum(0) % 2 * 255).astype(np.uint8)
    # The Laplacian is ±4·255 on alternating squares: 25 of one sign and 24 of the other.
    expected = (4 * 255) ** 2 * (1 - (1 / 49) ** 2)
    assert np.isclose(sharpness(Image.fromarray(board)), expected, rtol=1e-5)
    assert sharpness(Image.new("RGB", (20, 20), (9, 9, 9))) == 0
    assert sharpness(Image.new("RGB", (2, 20))) == 0
