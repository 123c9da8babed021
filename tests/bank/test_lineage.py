"""The original of a group is kept, whatever was done to the copies; doubt is admitted."""

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont, ImageOps

from sscd_vec.bank import lineage
from sscd_vec.bank.generations import Grid, made_from, saved
from sscd_vec.bank.lineage import Choice, Rules, choose, choose_original
from sscd_vec.bank.quality import InspectedImage, inspect_image
from sscd_vec.bank.registration import align, turned
from sscd_vec.cli.pictures import draw
from sscd_vec.files import find_images

WIDE, HIGH = 288, 224
LANCZOS, BICUBIC = Image.Resampling.LANCZOS, Image.Resampling.BICUBIC


def photo(seed: int) -> Image.Image:
    """A drawn image with the texture of a photograph, sharp to the last pixel."""
    noise = np.random.default_rng(seed).standard_normal((HIGH, WIDE))
    cycles = np.hypot(np.fft.fftfreq(HIGH)[:, None], np.fft.rfftfreq(WIDE)[None])
    cycles[0, 0] = 1
    texture = np.fft.irfft2(np.fft.rfft2(noise) / cycles, (HIGH, WIDE))
    drawn = np.asarray(draw(seed).resize((WIDE, HIGH)), float)
    made = drawn + 25 * (texture / texture.std())[..., None]
    return Image.fromarray(np.clip(made, 0, 255).astype(np.uint8))


def bar_above(image: Image.Image) -> Image.Image:
    made = Image.new("RGB", (image.width, image.height + 60), "white")
    made.paste(image, (0, 60))
    font = ImageFont.load_default(18)
    ImageDraw.Draw(made).text((5, 15), "when nobody knows who took it", "black", font)
    return made


def caption(image: Image.Image) -> Image.Image:
    made = image.copy()
    font = ImageFont.load_default(30)
    ImageDraw.Draw(made).text((12, 150), "look at this", "white", font, stroke_width=1)
    return made


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "bar above": bar_above,
    "border": lambda image: ImageOps.expand(image, 18, (0, 0, 0)),
    "caption": caption,
    "crop": lambda image: image.crop((31, 22, 260, 200)),
    "mirrored": ImageOps.mirror,
    "turned": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "grey": lambda image: ImageOps.grayscale(image).convert("RGB"),
    "half size": lambda image: image.resize((WIDE // 2, HIGH // 2), LANCZOS),
    "enlarged": lambda image: image.resize((WIDE * 2, HIGH * 2), BICUBIC),
    "blurred": lambda image: image.filter(ImageFilter.GaussianBlur(1.5)),
    "saved again": lambda image: image,
}


def write(path: Path, image: Image.Image, quality: int = 93, **options: Any) -> InspectedImage:  # noqa: ANN401 - Pillow's
    image.save(path, quality=quality, **options)
    return inspect_image(find_images(path)[0])


def reopened(image: InspectedImage) -> Image.Image:
    with Image.open(io.BytesIO(image.file.read())) as opened:
        return opened.convert("RGB")


def kept(images: Sequence[InspectedImage]) -> str:
    choice = choose_original(images)
    assert choice.is_sure, choice
    return images[choice.keep].file.path.stem


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("quality", [70, 97])
def test_original_is_kept_beside_a_copy(name: str, quality: int, tmp_path: Path) -> None:
    """Also when the copy is larger, older, saved at a finer quality and comes first."""
    original = write(tmp_path / "zz-original.jpg", photo(8), 88)
    copy = write(tmp_path / "a.jpg", EDITS[name](reopened(original)), quality)
    os.utime(copy.file.path, (0, 0))
    assert kept([copy, original]) == "zz-original"
    assert kept([original, copy]) == "zz-original"


@pytest.mark.parametrize("name", EDITS)
def test_a_coarser_copy_is_never_kept(name: str, tmp_path: Path) -> None:
    """About twice the steps of the original hide where a copy came from: unsure is allowed."""
    original = write(tmp_path / "zz-original.jpg", photo(8), 88)
    copy = write(tmp_path / "a.jpg", EDITS[name](reopened(original)), 78)
    choice = choose_original([copy, original])
    assert choice.keep == 1 or not choice.is_sure, choice


def test_original_is_kept_among_all_its_copies(tmp_path: Path) -> None:
    original = write(tmp_path / "zz-original.jpg", photo(8), 88)
    images = [
        write(tmp_path / f"{name}.jpg", edit(reopened(original)), 95)
        for name, edit in EDITS.items()
    ]
    images.insert(4, original)
    choice = choose_original(images)
    assert choice.is_sure and choice.keep == 4, choice
    assert choice.reasons[4] == "" and all(choice.reasons[:4] + choice.reasons[5:])


def test_reasons_say_what_was_done(tmp_path: Path) -> None:
    """Of PNG files: no JPEG generation speaks first."""
    image = photo(8)
    image.save(tmp_path / "o.png")
    original = inspect_image(find_images(tmp_path / "o.png")[0])
    words = {
        "bar above": "margin or bar",
        "border": "margin or bar",
        "caption": "put on it",
        "crop": "crop",
        "grey": "without colour",
        "half size": "less detail",
        "enlarged": "enlarged",
        "blurred": "blurred",
    }
    for name, word in words.items():
        EDITS[name](image).save(tmp_path / "c.png")
        copy = inspect_image(find_images(tmp_path / "c.png")[0])
        choice = choose_original([copy, original])
        assert choice.is_sure and choice.keep == 1, (name, choice)
        assert word in choice.reasons[0], (name, choice)


def test_reasons_of_a_file_saved_again_say_what_was_done_too(tmp_path: Path) -> None:
    original = write(tmp_path / "o.jpg", photo(8), 88)
    words = {
        "bar above": "a margin or bar was added",
        "caption": "something was put on it",
        "crop": "a crop",
        "turned": "turned or mirrored",
        "grey": "without colour",
    }
    for name, word in words.items():
        copy = write(tmp_path / "c.jpg", EDITS[name](reopened(original)), 95)
        reason = choose_original([copy, original]).reasons[0]
        assert reason == f"{word}; made from another one and saved again", name


def test_what_cannot_be_told_is_unsure(tmp_path: Path) -> None:
    """A mirrored PNG has lost nothing; two shrunk and cropped copies have each lost something."""
    image = photo(8)
    image.save(tmp_path / "a.png")
    ImageOps.mirror(image).save(tmp_path / "b.png")
    twins = [inspect_image(file) for file in find_images(tmp_path)]
    assert not choose_original(twins).is_sure
    small = write(tmp_path / "small.png", EDITS["half size"](image))
    crop = write(tmp_path / "crop.png", EDITS["crop"](image))
    assert not choose_original([small, crop]).is_sure


def test_strangers_are_unsure(tmp_path: Path) -> None:
    images = [write(tmp_path / f"{seed}.jpg", photo(seed)) for seed in (7, 8)]
    assert not choose_original(images).is_sure


def test_camera_notes_decide_where_nothing_else_does(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x010F] = "A camera"
    plain = write(tmp_path / "a.png", photo(8))
    noted = write(tmp_path / "b.png", ImageOps.mirror(photo(8)), exif=exif)
    choice = choose_original([plain, noted])
    assert choice.is_sure and choice.keep == 1 and "EXIF" in choice.reason
    edited = write(tmp_path / "c.png", bar_above(photo(8)), exif=exif)
    assert kept([plain, edited]) == "a"  # an editor may keep the notes


def test_equal_files_count_once_and_the_shortest_path_is_kept(tmp_path: Path) -> None:
    names = ("a-long-name.jpg", "b.jpg", "another-name.jpg")
    images = [write(tmp_path / name, photo(8)) for name in names]
    choice = choose_original(images, ["same"] * 3)
    assert choice.is_sure and choice.keep == 1 and choice.reason == "all are the same file"
    assert choice.reasons == ("the same file", "", "the same file")


def test_groups_that_are_too_large_are_unsure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "MOST", 2)
    original = write(tmp_path / "o.jpg", photo(8), 88)
    copies = [write(tmp_path / f"{q}.jpg", reopened(original), q) for q in (93, 96)]
    choice = choose_original([original, *copies])
    assert not choice.is_sure and "more than 2" in choice.reason


def _twins(tmp_path: Path) -> list[InspectedImage]:
    """Two that nothing tells apart; the first is newer."""
    (tmp_path / "sub").mkdir()
    first = write(tmp_path / "first.png", photo(8))
    second = write(tmp_path / "sub" / "second.webp", ImageOps.mirror(photo(8)), lossless=True)
    for image, when in ((first, 2000), (second, 1000)):
        os.utime(image.file.path, (when, when))
    return [inspect_image(find_images(one.file.path)[0]) for one in (first, second)]


@pytest.mark.parametrize(
    ("preference", "keep"),
    [("oldest", 1), ("format:webp", 1), ("format:PNG", 0), ("path:*/sub/*", 1), ("largest", None)],
)
def test_preferences_decide_what_is_unsure(
    preference: str, keep: int | None, tmp_path: Path
) -> None:
    twins = _twins(tmp_path)
    choice = choose(twins, ["a", "b"], Rules(preference))
    assert choice.is_sure == (keep is not None)
    assert keep is None or choice.keep == keep


def test_a_preference_never_overrules_the_evidence(tmp_path: Path) -> None:
    original = write(tmp_path / "o.jpg", photo(8), 88)
    larger = write(tmp_path / "bar.jpg", bar_above(reopened(original)), 95)
    choice = choose([larger, original], ["a", "b"], Rules("largest"))
    assert choice.keep == 1 and "preferred" not in choice.reason


def test_wrong_preference_is_refused() -> None:
    with pytest.raises(ValueError, match="expected largest, oldest, format:heic, path:GLOB"):
        Rules("newest")


def test_a_person_has_the_last_word(tmp_path: Path) -> None:
    original = write(tmp_path / "o.jpg", photo(8), 88)
    copy = write(tmp_path / "bar.jpg", bar_above(reopened(original)), 95)
    choice = choose([copy, original], ["a", "b"], Rules(kept=frozenset({"a"})))
    assert choice == Choice(0, True, "chosen by a person", ("", "another one was chosen"))


def test_protected_images_are_kept_where_nothing_decides(tmp_path: Path) -> None:
    twins = _twins(tmp_path)
    rules = Rules(protected=(tmp_path / "sub",))
    choice = choose(twins, ["a", "b"], rules)
    assert choice.is_sure and choice.keep == 1
    assert rules.protects(twins[1].file) and not rules.protects(twins[0].file)


# ---------------------------------------------------------------------- what it rests on


def _grey(image: Image.Image) -> NDArray[np.float32]:
    return np.asarray(image.convert("L").resize((128, 100)), np.float32)


@pytest.mark.parametrize("turn", range(8))
def test_every_turn_is_found(turn: int) -> None:
    first = _grey(photo(8))
    second = np.ascontiguousarray(turned(first, turn))
    found = align(first, second)
    again = turned(second, found.turn)
    assert np.array_equal(again, first) and found.correlation == pytest.approx(1, abs=1e-3)


def test_place_and_scale_of_a_crop_are_found() -> None:
    first = _grey(photo(8))
    part = Image.fromarray(first[20:80, 30:110]).resize((120, 90), BICUBIC)
    found = align(first, np.asarray(part))
    assert found.fits and found.turn == 0
    assert found.scale == pytest.approx((60 / 90, 80 / 120), rel=0.01)
    assert found.shift == pytest.approx((20, 30), abs=0.5)


def test_two_scenes_do_not_fit() -> None:
    assert not align(_grey(photo(7)), _grey(photo(8))).fits


def _rules(length: int, breadth: int) -> NDArray[np.float32]:
    """A sheet with a few thin lines, as forms and charts have."""
    made = np.full((breadth, length), 255, np.float32)
    made[breadth // 5 :: 31, 4:-9] = 0
    return made


@pytest.mark.parametrize("shape", [(1, 128), (128, 2), (9, 128), (128, 128)])
def test_strips_and_flat_images_are_refused_without_a_warning(shape: tuple[int, int]) -> None:
    """A sliver of overlap once left the equations singular."""
    odd = [
        np.zeros(shape, np.float32),
        np.tile(np.arange(shape[1], dtype=np.float32), (shape[0], 1)),
    ]
    for one in (*odd, _rules(*shape[::-1])):
        for other in (_grey(photo(8)), _rules(128, 96), np.full((128, 7), 9, np.float32)):
            for found in (align(one, other), align(other, one)):
                assert np.isfinite([*found.scale, *found.shift, found.correlation]).all()


def test_saving_a_grid_of_its_own_changes_nothing_more() -> None:
    """Coefficients that are multiples of the steps stay; the grid may begin anywhere."""
    grid = Grid(3, 5, np.full((8, 8), 12.0))
    once = saved(np.asarray(photo(8).convert("L"), np.float32), grid)
    twice = saved(once, grid)
    inside = np.s_[8:-8, 8:-8]  # blocks that the edge cuts are filled up, and do change
    assert np.abs(once - twice)[inside].mean() < 0.05


@pytest.mark.parametrize("moved", [(0, 0), (3, 5)])
def test_steps_of_the_first_file_are_found_in_the_second(moved: tuple[int, int]) -> None:
    pixels = np.asarray(photo(8).convert("L"), np.float32)
    coarse, fine = Grid(0, 0, np.full((8, 8), 16.0)), Grid(*moved, np.full((8, 8), 5.0))
    first = np.asarray(saved(pixels, coarse), np.float32)
    second = np.asarray(saved(first, fine), np.float32)
    alone = np.asarray(saved(pixels, fine), np.float32)
    assert made_from(second, fine, coarse).evidence > 100
    assert made_from(second, fine, coarse).place > 0.5
    assert made_from(alone, fine, coarse).evidence < -100
    assert abs(made_from(alone, fine, coarse).place) < 0.25
    assert made_from(alone, fine, Grid()).evidence == 0  # not a JPEG: nothing to find
