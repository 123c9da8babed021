"""The second stage of a bank: candidates are confirmed, outlined, and remembered if asked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sscd_vec import models
from sscd_vec.bank import Bank
from sscd_vec.bank.location import FEATURES
from sscd_vec.bank.pairs import ABOVE, BELOW
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
from sscd_vec.verify import FeatureStore, Verifier, Weights, features
from sscd_vec.verify.shared import FRAME
from tests.bank.conftest import OpenBank
from tests.tiny_encoder import TinyEncoder
from tests.verify.scenes import crop, paste, scene, window

COUNT = 6


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    folder = tmp_path / "scenes"
    folder.mkdir()
    for seed in range(COUNT):
        Image.fromarray(scene(seed)).save(folder / f"{seed}.png", compress_level=1)
    return folder


def name(match: Any) -> str:  # noqa: ANN401
    return Path(match.id).stem


def kept(bank: Bank) -> int:
    assert bank.location is not None
    with FeatureStore(bank.location.folder / FEATURES, read_only=True) as store:
        return len(store)


def test_a_crop_is_found_and_outlined(open_bank: OpenBank, scenes: Path, place: str) -> None:
    with open_bank(place, verify=True) as bank:
        bank.add(scenes)
        best, *others = bank.search(crop(scene(2), 0.1, 0.2, 0.7, 0.9))
        assert name(best) == "2" and best.is_copy and best.evidence is not None
        assert best.score == best.evidence.score and best.threshold == best.evidence.threshold
        assert best.evidence.relation == "part"
        assert best.region is not None
        corners = np.array(best.region.reference)
        assert corners.min(axis=0) == pytest.approx([0.1, 0.2], abs=0.03)
        assert corners.max(axis=0) == pytest.approx([0.7, 0.9], abs=0.03)
        assert len(others) == COUNT - 1
        assert not any(match.is_copy or match.region for match in others)


def test_every_image_of_a_collage_is_reported(open_bank: OpenBank, scenes: Path) -> None:
    page = paste(scene(1), np.full((480, 640, 3), 255, np.uint8), (10, 10, 310, 235))
    page = paste(scene(4), page, (330, 240, 630, 465))
    with open_bank(verify=True) as bank:
        bank.add(scenes)
        found = {name(m): m.region for m in bank.search(page) if m.is_copy}
    assert set(found) == {"1", "4"}
    centres = {key: np.mean(region.query, axis=0) for key, region in found.items() if region}
    assert centres["1"] == pytest.approx([0.25, 0.255], abs=0.03)
    assert centres["4"] == pytest.approx([0.75, 0.734], abs=0.03)


def test_one_search_may_be_verified_and_another_not(open_bank: OpenBank, scenes: Path) -> None:
    with open_bank() as bank:
        bank.add(scenes)
        plain = bank.search(scene(3))
        verified = bank.search(scene(3), verify=True)
        assert [m.evidence for m in plain] == [None] * COUNT
        assert all(m.evidence is not None for m in verified)
        assert name(plain[0]) == name(verified[0]) == "3"
        bank.verify = True
        assert bank.search(scene(3), verify=False) == plain
        (answer,) = bank.search_many([scene(3)])
        assert answer.matches == verified


def test_no_more_candidates_are_verified_than_asked_for(open_bank: OpenBank, scenes: Path) -> None:
    with open_bank(verify=2) as bank:
        bank.add(scenes)
        found = bank.search(scene(3))
        assert len(found) == COUNT
        assert [m.evidence is not None for m in found] == [True] * 2 + [False] * (COUNT - 2)


def test_another_look_at_the_query_brings_further_candidates(
    open_bank: OpenBank, scenes: Path
) -> None:
    # Each in the upper left tile of the page, where the whole page is like another image.
    pages = {str(n): paste(scene(n), scene(40, (640, 480)), (0, 0, 320, 240)) for n in range(COUNT)}
    with open_bank() as bank:
        bank.add(scenes)
        ranks = {n: [name(m) for m in bank.search(page)].index(n) for n, page in pages.items()}
        pasted = max(ranks, key=lambda n: ranks[n])
        page, limit = pages[pasted], ranks[pasted]
        assert limit > 0  # so many candidates of the whole page are other images
        assert not any(m.region for m in bank.search(page, limit, scales="one", verify=limit))
        for look in ({"tiles": 2}, {"scales": "both"}, {"scales": "auto"}):
            best = bank.search(page, limit, verify=limit, **look)[0]
            assert name(best) == pasted and best.is_copy and best.region is not None


def test_a_verified_copy_spares_the_second_look(
    open_bank: OpenBank, scenes: Path, encoder: TinyEncoder
) -> None:
    with open_bank(verify=True) as bank:
        bank.add(scenes)
        encoder.batches.clear()
        assert bank.search(scene(2))[0].is_copy
        assert encoder.batches == [1]
        assert not bank.search(scene(40))[0].is_copy
        assert encoder.batches == [1, 1, 1]


def test_kept_features_need_no_file(open_bank: OpenBank, scenes: Path, place: str) -> None:
    with open_bank(place, local=True) as bank:
        bank.add(scenes)
        assert kept(bank) == COUNT
        before = bank.search(crop(scene(2), 0.2, 0, 1, 1), verify=True)
    for file in scenes.iterdir():
        file.unlink()
    with open_bank(place) as bank:
        assert bank.search(crop(scene(2), 0.2, 0, 1, 1), verify=True) == before


def test_without_file_and_features_the_descriptors_decide(
    open_bank: OpenBank, scenes: Path
) -> None:
    with open_bank() as bank:
        bank.add(scenes)
        for file in scenes.iterdir():
            file.unlink()
        assert bank.search(scene(2), verify=True) == bank.search(scene(2))


@pytest.mark.parametrize("location", [None, "known.faiss"])
def test_images_without_a_file_are_verified_by_kept_features(
    open_bank: OpenBank, tmp_path: Path, location: str | None
) -> None:
    where = None if location is None else tmp_path / location
    with open_bank(where, local=True, verify=True) as bank:
        bank.add([scene(1), scene(2)], ids=["one", "two"])
        best = bank.search(crop(scene(2), 0.3, 0, 1, 1))[0]
        assert best.id == "two" and best.region is not None


def test_features_follow_the_images(open_bank: OpenBank, scenes: Path, tmp_path: Path) -> None:
    with open_bank(tmp_path / "known.faiss") as bank:
        bank.add(scenes)
    with open_bank(tmp_path / "known.faiss", local=True) as bank:
        assert bank.add(scenes).added == 0
        assert kept(bank) == COUNT  # of images that were there already
    with open_bank(tmp_path / "known.faiss", verify=True) as bank:
        Image.fromarray(scene(30)).save(scenes / "0.png")
        Image.fromarray(scene(1)).save(scenes / "equal.png", compress_level=1)
        bank.add(scenes)  # goes on keeping them
        assert kept(bank) == COUNT
        best = bank.search(crop(scene(30), 0, 0, 0.7, 1))[0]
        assert name(best) == "0" and best.region is not None
        bank.remove([str(scenes / "1.png"), str(scenes / "2.png")])
        assert kept(bank) == COUNT - 1  # the features of 1.png are those of equal.png too
        bank.remove(str(scenes / "equal.png"))
        assert kept(bank) == COUNT - 2


def test_a_bank_that_is_not_to_keep_features_does_not(
    open_bank: OpenBank, scenes: Path, tmp_path: Path
) -> None:
    with open_bank(tmp_path / "known.faiss", verify=True) as bank:
        bank.add(scenes)
        bank.search(scene(0))
        assert not (tmp_path / "known.faiss.bank" / FEATURES).exists()
    with open_bank(tmp_path / "known.faiss", local=True) as bank:
        bank.add(scenes / "0.png")
    with open_bank(tmp_path / "known.faiss", local=False) as bank:
        bank.add(scenes)
        assert kept(bank) == 1


def test_a_read_only_bank_is_verified(open_bank: OpenBank, scenes: Path, tmp_path: Path) -> None:
    with open_bank(tmp_path / "known.faiss", local=True) as bank:
        bank.add(scenes)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "known.faiss.bank").iterdir()}
    with open_bank(tmp_path / "known.faiss", read_only=True, normalizer=None) as bank:
        assert bank.search(scene(1), verify=True)[0].region is not None
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "known.faiss.bank").iterdir()}
    assert after == before


def test_files_a_stranger_names_are_not_read(
    open_bank: OpenBank, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bank(tmp_path / "known.faiss") as bank:
        bank.add(scenes)
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "of somebody else"))
    with open_bank(tmp_path / "known.faiss", normalizer=None, verify=True) as bank:
        assert all(match.evidence is None for match in bank.search(scene(1)))
    with open_bank(tmp_path / "known.faiss", normalizer=None, verify=True, trust=True) as bank:
        assert bank.search(scene(1))[0].evidence is not None


def test_without_the_extra_only_verification_is_missing(
    open_bank: OpenBank, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_bank(tmp_path / "known.faiss", local=True) as bank:
        bank.add(scenes / "0.png")

    def missing() -> None:
        raise ImportError("verifying copies needs OpenCV: pip install 'sscd-vec[verify]'")

    for module in ("features", "verifier"):
        monkeypatch.setattr(f"sscd_vec.verify.{module}.load_cv2", missing)
    monkeypatch.setattr("sscd_vec.bank.second_stage.load_cv2", missing)
    with open_bank(tmp_path / "known.faiss") as bank:
        assert bank.add(scenes).added == COUNT - 1
        assert name(bank.search(scene(3))[0]) == "3"
        assert kept(bank) == 1
        with pytest.raises(ImportError, match=r"sscd-vec\[verify\]"):
            bank.search(scene(3), verify=True)
    for options in ({"verify": True}, {"local": True}):
        with pytest.raises(ImportError, match=r"sscd-vec\[verify\]"):
            open_bank(tmp_path / "known.faiss", **options)


def test_a_threshold_of_the_user_is_that_of_verified_scores(
    open_bank: OpenBank, scenes: Path
) -> None:
    with open_bank(verify=True, threshold=1.5) as bank:
        bank.add(scenes)
        best = bank.search(scene(2))[0]
        assert best.threshold == 1.5 and best.is_copy is False and best.region is not None


def test_descriptor_scores_count_where_the_weights_know_them(
    open_bank: OpenBank, scenes: Path
) -> None:
    with open_bank(verify=True) as bank:
        bank.add(scenes / "0.png")
        (match,) = bank.search(scene(0))
        assert match.evidence is not None and match.evidence.descriptor_score is None
    with Bank(verify=True) as bank:
        bank.add(scenes / "0.png")
        (match,) = bank.search(scene(0))
        (plain,) = bank.search(scene(0), verify=False)
        assert match.evidence is not None
        assert match.evidence.descriptor_score == pytest.approx(plain.score)


def test_shipped_weights_belong_to_the_shipped_model() -> None:
    about = Weights.load(models.verifier_path()).about
    assert about["encoder"] == Encoder.from_pretrained().fingerprint
    assert about["normalizer"] == Normalizer.from_pretrained().reference_fingerprint


def test_duplicates_near_the_threshold_are_decided_by_geometry(
    open_bank: OpenBank, scenes: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    Image.fromarray(scene(1)).save(folder / "original.png")
    Image.fromarray(crop(scene(1), 0.15, 0.15, 1, 1)).save(folder / "crop.png")
    Image.fromarray(scene(2)).save(folder / "other.png")
    with open_bank() as bank:
        bank.add(folder)
        score = bank.duplicates(-2.0).groups[0]  # everything is one group
        scores = {Path(m.image.id).stem: m.score for m in score.members}
        threshold = scores["crop" if "crop" in scores else "original"] + 0.02
        limit = min(threshold, 0.99)
        assert not [g for g in bank.duplicates(limit).groups if len(g.members) == 2]
        found = bank.duplicates(limit, verify=True)
    (group,) = found.groups
    assert {Path(m.image.id).stem for m in group.members} == {"original", "crop"}
    assert Path(group.keep.image.id).stem == "original"
    (copy,) = group.copies
    assert copy.evidence is not None and copy.evidence.relation == "part"
    assert copy.evidence.region is not None


def test_geometry_refuses_pairs_just_above_the_threshold(
    open_bank: OpenBank, scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sscd_vec.bank.second_stage._knows_scores", lambda *_: True)
    with open_bank(verify=True) as bank:
        bank.add([scenes / "0.png", scenes / "1.png"])
        (pair,) = bank.duplicates(-1.0, verify=False).groups
        limit = pair.copies[0].score - ABOVE / 2
        assert bank.duplicates(limit, verify=False).pairs == 1
        assert bank.duplicates(limit).pairs == 0
        assert bank.duplicates(limit - ABOVE).pairs == 1  # too far above to be asked about


def test_geometry_alone_refuses_no_pair(open_bank: OpenBank, scenes: Path) -> None:
    with open_bank(verify=True) as bank:  # a model the weights do not know
        bank.add(scenes)
        plain = bank.duplicates(0.0, verify=False)
        assert plain.pairs > 0 and bank.duplicates(0.0).pairs >= plain.pairs


def test_a_shared_frame_is_to_be_looked_at(
    open_bank: OpenBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "windows"
    folder.mkdir()
    for seed in (1, 2):
        Image.fromarray(window(scene(seed))).save(folder / f"{seed}.png", compress_level=1)
    with open_bank(verify=True) as bank:
        bank.add(folder)
        same, other = bank.search(folder / "1.png")
        assert (name(same), same.verdict) == ("1", "copy")
        assert (name(other), other.verdict, other.is_copy) == ("2", "look", False)
        assert FRAME in other.reason and other.region is not None
        monkeypatch.setattr("sscd_vec.bank.second_stage._knows_scores", lambda *_: True)
        (pair,) = bank.duplicates(-1.0, verify=False).groups
        score = pair.copies[0].score
        for limit in (score - ABOVE / 2, score + BELOW / 2):  # either side of the threshold
            assert bank.duplicates(limit).pairs == 0


def test_relation_says_which_image_contains_which() -> None:
    verifier = Verifier.from_pretrained()
    whole, part = scene(1), crop(scene(1), 0.2, 0.2, 0.8, 0.8)
    assert verifier.relate(whole, whole).relation == "same"
    assert verifier.relate(part, whole).relation == "part"
    assert verifier.relate(whole, part).relation == "whole"
    left, right = crop(whole, 0, 0, 0.75, 1), crop(whole, 0.25, 0, 1, 1)
    assert verifier.relate(left, right).relation == "overlap"
    assert verifier.relate(whole, scene(2)).relation == "unknown"
    assert features.load_cv2() is not None
