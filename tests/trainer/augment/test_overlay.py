import importlib.util
import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import ImageFont

from sscd_vec.trainer.augment import overlay
from sscd_vec.trainer.augment.choices import draw, generator
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.augment.recipe import SIMCLR
from sscd_vec.trainer.augment.views import augment
from tests.trainer.images import encoded, photo


def test_without_assets_text_and_stickers_are_still_drawn() -> None:
    bare = Overlays()
    texts = [bare.text(seed, 20) for seed in range(8)]
    stickers = [bare.emoji(seed, 24) for seed in range(40)]
    for sprite in texts + stickers:
        assert sprite.dtype == np.float32 and sprite.shape[2] == 4
        assert 0 <= sprite.min() and sprite.max() <= 1
        assert sprite[..., 3].max() > 0.5, "something can be seen"
        assert (sprite[..., :3] <= sprite[..., 3:] + 1e-6).all(), "colours are multiplied by alpha"
    assert {s.shape[0] for s in stickers} == {24}
    assert len({t.tobytes() for t in texts}) == 8
    assert len({s.tobytes() for s in stickers}) > 20


def test_sprites_follow_their_seed() -> None:
    assert np.array_equal(Overlays().text(5, 20), Overlays().text(5, 20))
    assert np.array_equal(Overlays().emoji(5, 20), Overlays().emoji(5, 20))


def test_folders_given_are_used(tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "only.png").write_bytes(encoded(photo(3, 20, 10).convert("RGBA")))
    found = Overlays.find(emoji=str(tmp_path / "e"))
    assert [p.name for p in found.emojis] == ["only.png"]
    assert found.emoji(1, 16).shape == (16, 32, 4), "the aspect ratio is kept"


def test_a_folder_without_fonts_or_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no fonts"):
        Overlays.find(fonts=str(tmp_path))
    with pytest.raises(ValueError, match="no emoji"):
        Overlays.find(emoji=str(tmp_path))


def test_a_font_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    sprite = Overlays.find(fonts=str(tmp_path)).text(1, 20)
    assert sprite[..., 3].max() > 0.5


def test_sprites_are_rendered_at_sane_sizes() -> None:
    assert overlay.rendered_size(0.3) == overlay.SMALLEST_SPRITE
    assert overlay.rendered_size(1e6) == overlay.LARGEST_SPRITE
    assert overlay.rendered_size(33.4) == 33


@pytest.mark.parametrize("kind", ["text", "emoji"])
def test_overlays_change_only_part_of_the_view(kind: str) -> None:
    quiet: dict[str, object] = {"jitter": 0.0, "grayscale": 0.0, "blur": 0.0, "flip": 0.0}
    quiet |= {"crop_area": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}
    plain, covered = (
        draw(SIMCLR.with_changes(quiet | changes), 20, generator(0, 0))
        for changes in ({}, {kind: 1.0, f"{kind}_opacity": (1.0, 1.0)})
    )
    source = torch.full((20, 48, 48, 3), 90, dtype=torch.uint8)
    aspects = np.ones(20, dtype=np.float32)
    before, after = (augment(source, aspects, c, 48, Overlays()) for c in (plain, covered))
    changed = ((before - after).abs().amax(dim=1) > 0.02).float().mean(dim=(1, 2))
    assert (changed > 0).float().mean() > 0.8
    assert changed.mean() < 0.5


FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def test_a_font_without_these_letters_is_passed_over(tmp_path: Path) -> None:
    symbols = tmp_path / "symbols"
    symbols.mkdir()
    shutil.copy(FONTS / "DejaVuSansDisplay.ttf", symbols)
    only_symbols = Overlays.find(fonts=str(symbols))
    for seed in range(5):
        assert np.array_equal(only_symbols.text(seed, 20), Overlays().text(seed, 20))
    letters = tmp_path / "letters"
    letters.mkdir()
    shutil.copy(FONTS / "DejaVuSerif.ttf", letters)
    shown = Overlays.find(fonts=str(letters)).text(1, 20)
    assert not np.array_equal(shown, Overlays().text(1, 20)), "a font with letters is used"


def test_a_row_of_boxes_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    font = str(shutil.copy(FONTS / "DejaVuSans.ttf", tmp_path))
    assert any(bytes(ImageFont.truetype(font, 20).getmask("漢"))), "a box, not nothing"
    monkeypatch.setattr(overlay, "LETTERS", "AB漢字")
    assert overlay._write(font, 20, "AB") is not None
    assert overlay._write(font, 20, "A漢") is None


def test_auglys_files_are_found_and_its_code_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "augly" / "assets"
    for folder in ("fonts", "twemojis/smileys"):
        (assets / folder).mkdir(parents=True)
    (tmp_path / "augly" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    shutil.copy(FONTS / "DejaVuSans.ttf", assets / "fonts")
    (assets / "twemojis" / "smileys" / "a.png").write_bytes(encoded(photo(1)))
    monkeypatch.syspath_prepend(tmp_path)
    found = Overlays.find()
    assert [file.name for file in found.fonts + found.emojis] == ["DejaVuSans.ttf", "a.png"]
    assert all(tmp_path in file.parents for file in found.fonts + found.emojis)


def test_without_augly_fonts_are_matplotlibs_and_stickers_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    absent = {"augly"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    found = Overlays.find()
    assert {file.parent for file in found.fonts} == {FONTS} and not found.emojis
    absent.add("matplotlib")
    assert Overlays.find() == Overlays()
