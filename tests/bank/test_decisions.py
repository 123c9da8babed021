"""What a person decided is remembered by content and respected everywhere."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sscd_vec.bank import Bank
from sscd_vec.bank.decisions import Decision, Decisions
from sscd_vec.bank.groups import find_pairs, group_pairs
from sscd_vec.bank.location import BankError
from sscd_vec.cli.decisions import threshold_from
from sscd_vec.normalize import Normalizer
from tests.bank.conftest import OpenBank

A, B, C = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def pair(images: Path) -> tuple[str, str]:
    """Ids of an image and a copy of it, which is another file."""
    with Image.open(images / "image-03.png") as image:
        image.save(images / "copy.png", compress_level=9)
    return str(images / "image-03.png"), str(images / "copy.png")


def grouped(bank: Bank) -> list[set[str]]:
    found = bank.duplicates(show_progress=False)
    return [{member.image.id for member in group.members} for group in found.groups]


def test_rejected_pair_is_no_group_and_no_match(
    images: Path, pair: tuple[str, str], open_bank: OpenBank, place: str
) -> None:
    with open_bank(place) as bank:
        bank.add(images, show_progress=False)
        assert set(pair) in grouped(bank)
        bank.decide(*pair, is_copy=False)
        assert not any(set(pair) <= group for group in grouped(bank))
    with open_bank(place) as bank:  # also after it was closed
        matches = {match.id: match for match in bank.search(pair[0], 8)}
        assert matches[pair[1]].decision is False and matches[pair[1]].is_copy is False
        assert matches[pair[1]].score >= (matches[pair[1]].threshold or 0)
        assert matches[pair[0]].is_copy and matches[pair[0]].decision is None
        bank.decide(*pair, is_copy=True)
        assert set(pair) in grouped(bank)


def test_decision_holds_under_another_name(
    images: Path, pair: tuple[str, str], open_bank: OpenBank
) -> None:
    with open_bank() as bank:
        bank.add(images, show_progress=False)
        bank.decide(*pair, is_copy=False)
        moved = images / "renamed.png"
        shutil.move(pair[1], moved)
        bank.remove(pair[1])
        bank.add(images, show_progress=False)
        assert not any({pair[0], str(moved)} <= group for group in grouped(bank))


def test_accepted_pair_is_a_group_whatever_it_scores(images: Path, open_bank: OpenBank) -> None:
    first, second = str(images / "image-00.png"), str(images / "image-05.png")
    with open_bank() as bank:
        bank.add(images, show_progress=False)
        assert not any({first, second} <= group for group in grouped(bank))
        bank.decide(first, second, is_copy=True)
        assert any({first, second} <= group for group in grouped(bank))


def test_images_apart_never_meet_in_a_group_by_others() -> None:
    """Of three that are copies of each other two are said not to be: they end in two groups."""
    z = np.ones((3, 1), np.float32)
    biases = np.zeros(3, np.float32)
    pairs = find_pairs(z, biases, 0.5)
    assert [group.members for group in group_pairs(z, biases, 0.5, pairs)] == [(0, 1, 2)]
    apart = {0: {2}, 2: {0}}
    found = group_pairs(z, biases, 0.5, pairs, {(0, 2): False}, apart)
    assert len(found) == 1 and not {0, 2} <= set(found[0].members)


def test_chosen_image_is_kept(images: Path, pair: tuple[str, str], open_bank: OpenBank) -> None:
    with open_bank() as bank:
        bank.add(images, show_progress=False)
        for name in pair:
            image = bank.get(name)
            assert image is not None
            bank.storage.records.decide(Decisions(kept={image.digest}), 0.0)
            [group] = [
                one
                for one in bank.duplicates(show_progress=False).groups
                if {member.image.id for member in one.members} == set(pair)
            ]
            if name == pair[0]:
                assert group.keep.image.id == name and group.reason == "chosen by a person"
            else:  # both were chosen: that is no choice
                assert group.reason != "chosen by a person"


def test_decisions_are_exported_with_scores(
    images: Path, pair: tuple[str, str], open_bank: OpenBank, tmp_path: Path
) -> None:
    with open_bank() as bank:
        bank.add(images, show_progress=False)
        bank.decide(*pair, is_copy=True)
        bank.decide(A, B, is_copy=False)  # of images that are elsewhere
        bank.decisions().save(tmp_path / "d.json")
        fingerprint = bank.normalizer.query_fingerprint
    found = Decisions.load(tmp_path / "d.json")
    scores = {one.is_copy: one.score for one in found}
    assert scores[True] == pytest.approx(1, abs=1e-4) and scores[False] is None
    assert found.normalizer == fingerprint and found.about(B, A) is False
    assert found.about(A, C) is None
    with open_bank() as other:
        other.add_decisions(found)
        assert len(other.decisions()) == 2


def test_unknown_names_and_read_only_banks_are_refused(
    images: Path, open_bank: OpenBank, tmp_path: Path
) -> None:
    with open_bank(tmp_path / "b.faiss") as bank:
        bank.add(images, show_progress=False)
        with pytest.raises(ValueError, match="expected an id of .* or a SHA-256"):
            bank.decide("nobody.jpg", A, is_copy=False)
    with (
        open_bank(tmp_path / "b.faiss", normalizer=None, read_only=True) as bank,
        pytest.raises(BankError, match="read-only"),
    ):
        bank.decide(A, B, is_copy=False)


@pytest.mark.parametrize(
    "content",
    [
        "not JSON",
        "[]",
        '{"format": "else", "pairs": [], "keep": []}',
        '{"format": "sscd-vec decisions 1", "pairs": [{"first": "x"}], "keep": []}',
        '{"format": "sscd-vec decisions 1", "pairs": [], "keep": ["../etc"]}',
    ],
)
def test_files_that_are_no_decisions_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(ValueError, match=r"d\.json: expected decisions as the report"):
        Decisions.load(tmp_path / "d.json")


def test_score_must_be_a_number(tmp_path: Path) -> None:
    made = Decisions()
    made.add([Decision(A, B, True, 0.5)])
    content = made.to_dict()
    content["pairs"][0]["score"] = "high"
    (tmp_path / "d.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a decision"):
        Decisions.load(tmp_path / "d.json")


# ---------------------------------------------------------------------- thresholds


def _labelled(normalizer: Normalizer, path: Path, count: int = 40) -> Path:
    """Copies score 0.5 and above, others below."""
    made = Decisions(normalizer=normalizer.query_fingerprint)
    for number in range(count):
        score = number / count
        made.add([Decision(f"{number:064x}", A, score >= 0.5, score)])
    made.save(path)
    return path


def test_threshold_from_decisions(normalizer: Normalizer, tmp_path: Path) -> None:
    found = threshold_from(_labelled(normalizer, tmp_path / "d.json"), normalizer, 0.95).threshold
    assert found.kind == "symmetric" and found.target == "precision" and found.samples == 40
    # The lowest that keeps 95 %: one wrong one of 21 passes.
    assert 0.45 < found.value < 0.5
    assert found.interval is not None and found.interval[0] <= found.value <= found.interval[1]


def test_too_few_or_foreign_decisions_are_refused(normalizer: Normalizer, tmp_path: Path) -> None:
    few = _labelled(normalizer, tmp_path / "few.json", 10)
    message = "at least 20 labelled pairs, .* got 5 copies and 5 others"
    with pytest.raises(ValueError, match=message):
        threshold_from(few, normalizer, 0.95)
    other = _labelled(normalizer, tmp_path / "other.json")
    foreign = Decisions.load(other)
    foreign.normalizer = "f" * 16
    foreign.save(other)
    with pytest.raises(ValueError, match="made with normalizer ffff"):
        threshold_from(other, normalizer, 0.95)
