"""What one image file shows."""

import io
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from sscd_vec.bank.quality import InspectedImage, inspect_image, load_grey, resolution
from sscd_vec.files import find_images

SIDE = 512


def look(path: Path) -> InspectedImage:
    return inspect_image(find_images(path)[0])


def _texture(seed: int) -> NDArray[np.float64]:
    """Power 1/f² through a lens that passes half at the last frequency; standard deviation 1."""
    noise = np.random.default_rng(seed).standard_normal((SIDE, SIDE))
    lens = 0.5 ** (2 * _cycles()) ** 2
    texture = np.fft.irfft2(np.fft.rfft2(noise) * lens / _cycles())
    return np.asarray((texture - texture.mean()) / texture.std())


def _cycles() -> NDArray[np.float64]:
    cycles = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.rfftfreq(SIDE)[None])
    cycles[0, 0] = 1
    return np.asarray(cycles)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about the metadata
def test_damaged_exif_does_not_break_the_picture(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    exif.get_ifd(0x8769)[0x9003] = "2020:01:01 00:00:00"
    image = Image.new("RGB", (90, 60))
    for place in range(6, len(exif.tobytes())):
        damaged = bytearray(exif.tobytes())
        damaged[place] ^= 0xFF
        image.save(tmp_path / "damaged.jpg", exif=bytes(damaged))
        seen = look(tmp_path / "damaged.jpg")
        assert {seen.width, seen.height} == {90, 60}


def test_orientation_transparency_and_thumbnail(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (300, 100), (10, 200, 10)).save(tmp_path / "turned.jpg", exif=exif)
    turned = look(tmp_path / "turned.jpg")
    assert (turned.width, turned.height) == (100, 300)
    with Image.open(io.BytesIO(turned.thumbnail)) as small:
        assert small.size == (100, 300)
    Image.new("RGBA", (50, 50), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    with Image.open(io.BytesIO(look(tmp_path / "clear.png").thumbnail)) as clear:
        assert np.asarray(clear).min() > 245  # transparent shows white, not red


@pytest.mark.parametrize("cut", [0.4, 0.6, 0.8])
def test_resolution_of_a_texture_cut_at_a_known_frequency(cut: float) -> None:
    spectrum = np.fft.rfft2(_texture(0))
    grey = np.fft.irfft2(np.where(_cycles() < cut / 2, spectrum, 0)).astype(np.float32)
    assert resolution(grey) == pytest.approx(cut, abs=0.05)


def test_resolution_where_nothing_is_cut_or_nothing_can_be_said() -> None:
    assert resolution(_texture(0).astype(np.float32)) == 1
    assert resolution(np.zeros((100, 100), np.float32)) == 1
    assert resolution(np.zeros((10, 300), np.float32)) == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(orientation: int, tmp_path: Path) -> None:
    """Grey levels, the small image and the grid of JPEG blocks, as Pillow turns them."""
    ramp = np.add.outer(np.arange(50) * 3, np.arange(70)).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.jpg"
    Image.fromarray(ramp).save(path, quality=95, exif=exif)
    with Image.open(path) as stored:
        upright = np.asarray(ImageOps.exif_transpose(stored))
    seen = look(path)
    assert np.array_equal(load_grey(seen.file), upright)
    assert np.array_equal(seen.small[..., 0], upright)
    assert (seen.height, seen.width) == upright.shape and seen.grid.steps is not None
    from_below, from_right = seen.grid.down, seen.grid.across
    assert from_below in (0, upright.shape[0] % 8) and from_right in (0, upright.shape[1] % 8)


def test_colour_format_and_notes(tmp_path: Path) -> None:
    grey = Image.fromarray(np.full((60, 60, 3), 90, np.uint8))
    grey.save(tmp_path / "grey.jpg", quality=60)
    red = grey.copy()
    red.paste((200, 40, 40), (0, 0, 30, 30))
    exif = Image.Exif()
    exif[0x010F] = "A camera"
    red.save(tmp_path / "red.png", exif=exif)
    assert not look(tmp_path / "grey.jpg").has_colour and look(tmp_path / "red.png").has_colour
    assert look(tmp_path / "red.png").has_camera_notes
    assert look(tmp_path / "red.png").format == "PNG"
    assert look(tmp_path / "red.png").grid.steps is None
