"""Drawn images repeat and differ; the benchmark counts what verdicts say; the domain is kept."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from accuracy import domains, kinds
from accuracy.kinds.copies import COPIES
from release import domain as release_domain
from release import nonphotos
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Domain, Normalizer

RULES = Normalizer.identity(2).with_threshold(0.5).with_threshold(0.5, "symmetric")


@pytest.mark.parametrize("kind", nonphotos.KINDS)
def test_background_images_repeat_and_differ(kind: str) -> None:
    first, same_style, other = (nonphotos.draw(kind, number) for number in (0, 1, 2))
    assert first.mode == "RGB" and min(first.size) >= 64
    assert first.tobytes() == nonphotos.draw(kind, 0).tobytes()
    assert len({image.tobytes() for image in (first, same_style, other)}) == 3
    assert first.tobytes() != nonphotos.draw(kind, 0, seed=1).tobytes()


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_test_images_repeat_and_differ(kind: str) -> None:
    first, same_look, other = (kinds.draw(kind, number) for number in (0, kinds.LOOKS, 1))
    assert first.mode == "RGB" and min(first.size) >= 64
    assert first.tobytes() == kinds.draw(kind, 0).tobytes()
    assert len({image.tobytes() for image in (first, same_look, other)}) == 3


def test_there_are_enough_kinds_and_they_share_no_code() -> None:
    assert len(nonphotos.KINDS) >= 15 and len(kinds.KINDS) >= 15
    for file in Path(kinds.__file__).parent.glob("*.py"):
        assert "release" not in [line.split()[1].split(".")[0] for line in imports(file)]
    for name in ("nonphotos", "sheet", "paper", "screens", "charts", "graphics"):
        file = Path(nonphotos.__file__).with_name(f"{name}.py")
        assert not any("accuracy" in line for line in imports(file))


def imports(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]


@pytest.mark.parametrize("copy", COPIES)
def test_copies_repeat_and_change_the_image(copy: str) -> None:
    image = kinds.draw("logos", 3)
    first, again = (COPIES[copy](image, random.Random(5)) for _ in range(2))
    assert first.tobytes() == again.tobytes() != image.tobytes()


def described(
    rows: list[list[float]], outside: list[bool], images: list[Image.Image], shift: float = 0.0
) -> domains.Described:
    z = np.array(rows, dtype=np.float32)
    flat: NDArray[np.float32] = np.zeros(len(z), dtype=np.float32)
    return domains.Described(
        z, flat, flat + np.float32(shift), np.array(outside), lambda row: images[row]
    )


@pytest.fixture(scope="module")
def chats() -> list[Image.Image]:
    return [kinds.draw("chats", number) for number in (0, kinds.LOOKS)]


def test_pairs_outside_are_copies_by_their_pixels_only(chats: list[Image.Image]) -> None:
    alike = [[1.0, 0.0], [0.96, 0.28], [0.8, 0.6]]
    images = [chats[0], COPIES["resaved"](chats[0], random.Random(0)), chats[1]]
    out = described(alike, [True] * 3, images)
    inside = described(alike, [False] * 3, images)
    mixed = described(alike, [True, True, False], images)
    pairs = [domains.copy_pairs(RULES, one, one.symmetric_scores()) for one in (out, inside, mixed)]
    assert pairs == [{(0, 1)}, {(0, 1), (0, 2), (1, 2)}, {(0, 1), (0, 2), (1, 2)}]


def test_what_is_common_decides_between_unsure_and_no(chats: list[Image.Image]) -> None:
    bank = described([[1.0, 0.0]], [True], chats[:1])
    for shift, expected in ((0.2, {0: "unsure"}), (0.4, {})):
        query = described([[0.8, 0.6]], [True], chats[1:], shift)
        graded = domains.grades(RULES, "search", query, bank, query.directed_scores(bank))
        assert graded == [expected]


def test_groups_counts_what_does_not_belong_together() -> None:
    true = {(0, 1), (2, 3), (8, 9)}
    assert domains.groups({(0, 1), (2, 3)}, true) == {
        "false groups": 0, "largest false group": 0, "copies found": 2,
    }  # fmt: skip
    assert domains.groups({(0, 1), (1, 2), (2, 3), (5, 6)}, true) == {
        "false groups": 2, "largest false group": 4, "copies found": 2,
    }  # fmt: skip


def test_a_whole_run_writes_every_figure(
    encoder_folder: Path, disc_like: Path, photo_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(encoder_folder, model)
    encoder = Encoder.from_pretrained(model)
    rows = encoder.encode(sorted(map(str, photo_folder.iterdir())))
    fitted = Normalizer.fit(rows, eps="oas", encoder=encoder)
    fitted = fitted.with_threshold(0.2, "search").with_threshold(0.2, "symmetric")
    path = model / "normalizer.safetensors"
    z = fitted.whiten(rows)
    fitted.with_domain(Domain.fit(np.tile(z, (60, 1)), -z[:6])).save(path)
    monkeypatch.setattr(domains, "PHONE", {"logos": 3})
    monkeypatch.setattr(domains, "PHONE_PHOTOS", 4)
    monkeypatch.setattr(domains, "PHONE_COPIES", 2)
    asked = (
        f"{photo_folder} --model {model} --kinds logos words --images 4 --strangers 2 --copies 2"
    )
    domains.main([*asked.split(), "--disc", str(disc_like), "--cache", str(tmp_path / "cache")])
    shown = capsys.readouterr().out
    for figure in (
        "'strangers, before'",
        "'photographed, unsure'",
        "'false groups'",
        "'µAP, before'",
    ):
        assert figure in shown


def test_a_domain_is_fitted_and_stored_with_a_model(
    encoder_folder: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_domain, "FALSE_ALARM", 0.4)
    monkeypatch.setattr(release_domain, "PER_KIND", 1)
    model = tmp_path / "model"
    shutil.copytree(encoder_folder, model)
    encoder = Encoder.from_pretrained(model)
    rows = encoder.encode(sorted(map(str, photo_folder.iterdir())))
    fitted = Normalizer.fit(rows, eps="oas", encoder=encoder).with_threshold(0.2)
    fitted.save(model / "normalizer.safetensors")
    for _ in range(2):  # storing again replaces it
        release_domain.main([str(model), str(photo_folder)])
        stored = Normalizer.from_pretrained(model)
        assert stored.domain is not None and stored.thresholds == fitted.thresholds
        assert stored.domain.background.shape == (len(nonphotos.KINDS), fitted.dim)
        assert stored.reference_fingerprint == fitted.reference_fingerprint
