"""Which of several copies is kept, and what the report needs of them."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from sscd_vec.bank.quality import InspectedImage, choose_best, inspect_image, resolution
from sscd_vec.cli.pictures import EDITS, draw
from sscd_vec.files import find_images

SEEDS = [1, 7, 8, 10, 11]
SIDE = 512
OLD, NEW = 1_500_000_000, 1_600_000_000  # seconds: the original is older than its copies


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


def _photo(seed: int) -> Image.Image:
    """A drawn picture with the texture of a photograph, sharp to the last pixel."""
    drawn = np.asarray(draw(seed).resize((SIDE, SIDE)), float)
    return Image.fromarray(np.clip(drawn + 40 * _texture(seed)[..., None], 0, 255).astype(np.uint8))


def _scaled(image: Image.Image, factor: float, filter_: Image.Resampling) -> Image.Image:
    return image.resize((round(image.width * factor), round(image.height * factor)), filter_)


def _cropped(image: Image.Image, part: float) -> Image.Image:
    width, height = image.size
    cut = round(width * (1 - part)), round(height * (1 - part))
    return image.crop((cut[0] // 3, cut[1] // 2, width - cut[0] + cut[0] // 3, height))


def _drawn(name: str) -> Callable[[Image.Image], Image.Image]:
    return lambda image: EDITS[name](image, np.random.default_rng(0))


COPIES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "enlarged a little": lambda image: _scaled(image, 1.3, Image.Resampling.BICUBIC),
    "enlarged": lambda image: _scaled(image, 2, Image.Resampling.LANCZOS),
    "enlarged a lot": lambda image: _scaled(image, 3, Image.Resampling.BILINEAR),
    "crop": lambda image: _cropped(image, 0.9),
    "crop enlarged": lambda image: _cropped(image, 0.75).resize(image.size),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    "shrunk": lambda image: _scaled(image, 0.6, Image.Resampling.LANCZOS),
    "shrunk and enlarged again": lambda image: _scaled(image, 0.5, Image.Resampling.LANCZOS).resize(
        image.size
    ),
    "saved again": lambda image: image,
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "captioned": _drawn("captioned"),
    "framed": _drawn("framed"),
}


def _save(image: Image.Image, path: Path, quality: int, seconds: int) -> Path:
    image.save(path, quality=quality)
    os.utime(path, (seconds, seconds))
    return path


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COPIES)
def test_original_beats_a_copy_whose_file_is_larger(name: str, seed: int, tmp_path: Path) -> None:
    original = _save(_photo(seed), tmp_path / "a-much-longer-name.jpg", 85, OLD)
    with Image.open(original) as decoded:
        copy = _save(COPIES[name](decoded.convert("RGB")), tmp_path / "copy.jpg", 97, NEW)
    if name != "shrunk":
        assert copy.stat().st_size > original.stat().st_size * 0.9
    images = [look(copy), look(original)]
    assert choose_best(images) == 1, [(p.resolution, p.true_side) for p in images]


@pytest.mark.parametrize("seed", SEEDS)
def test_original_beats_all_its_copies_together(seed: int, tmp_path: Path) -> None:
    original = _save(_photo(seed), tmp_path / "original.jpg", 85, OLD)
    with Image.open(original) as decoded:
        image = decoded.convert("RGB")
    copies = [
        _save(edit(image), tmp_path / f"{name}.jpg", 95, NEW) for name, edit in COPIES.items()
    ]
    copies.append(_save(image, tmp_path / "hard.jpg", 40, NEW))
    images = [look(path) for path in [*copies[:5], original, *copies[5:]]]
    assert images[choose_best(images)].file.path == original


@pytest.mark.parametrize("seed", SEEDS)
def test_true_side_does_not_grow_by_enlarging(seed: int, tmp_path: Path) -> None:
    image = _photo(seed)
    original = look(_save(image, tmp_path / "original.png", 0, OLD))
    for factor in (1.5, 2, 3):
        larger = _scaled(image, factor, Image.Resampling.BICUBIC)
        enlarged = look(_save(larger, tmp_path / "enlarged.jpg", 90, NEW))
        assert enlarged.width > 1.4 * original.width
        assert enlarged.true_side < 1.25 * original.true_side


def test_strong_compression_loses_even_if_it_is_older(tmp_path: Path) -> None:
    hard = _save(draw(8), tmp_path / "a.jpg", 30, OLD)
    fine = _save(draw(8), tmp_path / "finer.jpg", 80, NEW)
    assert choose_best([look(hard), look(fine)]) == 1


def test_camera_notes_then_age_then_the_shorter_path_decide(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "A camera"
    long = _save(draw(8), tmp_path / "long-name.jpg", 90, NEW)
    short = _save(draw(8), tmp_path / "short.jpg", 90, NEW)
    old = _save(draw(8), tmp_path / "the-old-one.jpg", 90, OLD)
    draw(8).save(tmp_path / "taken.jpg", quality=90, exif=exif)
    images = [look(path) for path in (long, short, old, tmp_path / "taken.jpg")]
    assert choose_best(images[:2]) == 1
    assert choose_best(images[:3]) == 2
    assert choose_best(images) == 3


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
        assert small.size == (80, 240)
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
