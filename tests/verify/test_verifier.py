"""The verifier: copies are confirmed and outlined, strangers and shared logos are not."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from sscd_vec import models
from sscd_vec.verify import (
    Candidate,
    Combination,
    Evidence,
    Features,
    FeatureStore,
    Verifier,
    Weights,
    WeightsError,
)
from sscd_vec.verify.regions import area
from tests.verify.scenes import Pixels, crop, paste, scene, turn

ORIGINAL, OTHER = scene(1), scene(2)
LEVEL = 0.0  # a descriptor score that says little


def blurred(pixels: Pixels) -> Pixels:
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(3)))


def noisy(pixels: Pixels) -> Pixels:
    rng = np.random.default_rng(0)
    specks = rng.random(pixels.shape[:2]) < 0.08
    made = pixels.copy()
    made[specks] = np.where(rng.random((int(specks.sum()), 1)) < 0.5, 0, 255)
    return made


EDITS = {
    "itself": ORIGINAL,
    "crop": crop(ORIGINAL, 0.3, 0.2, 0.9, 0.8),
    "turned": turn(ORIGINAL, 37),
    "mirrored": np.ascontiguousarray(ORIGINAL[:, ::-1]),
    "upside down": np.ascontiguousarray(ORIGINAL[::-1]),
    "negative": 255 - ORIGINAL,
    "dark": (ORIGINAL * 0.35).astype(np.uint8),
    "blurred": blurred(ORIGINAL),
    "noisy": noisy(ORIGINAL),
    "pasted": paste(ORIGINAL, scene(3, (400, 400)), (30, 200, 230, 350)),
    "stretched": np.asarray(Image.fromarray(ORIGINAL).resize((420, 200))),
}


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    return Verifier.from_pretrained()


@pytest.fixture(scope="module")
def reference(verifier: Verifier) -> Features:
    return verifier.extract(ORIGINAL)


@pytest.mark.parametrize("edit", EDITS)
def test_copies_are_confirmed(verifier: Verifier, reference: Features, edit: str) -> None:
    found = verifier.compare(verifier.extract(EDITS[edit]), reference, LEVEL)
    assert found.is_copy and found.located, found
    assert found.mirrored == (edit in ("mirrored", "upside down"))
    assert verifier.compare(verifier.extract(EDITS[edit]), reference).is_copy


@pytest.mark.parametrize("edit", EDITS)
def test_strangers_are_not(verifier: Verifier, edit: str) -> None:
    other = verifier.extract(OTHER)
    found = verifier.compare(verifier.extract(EDITS[edit]), other, LEVEL)
    assert not found.is_copy and not found.located
    assert found.score < 0.2
    assert found.transform is None and found.query_region == found.reference_region == ()


def test_evidence_says_which_part_was_copied(verifier: Verifier, reference: Features) -> None:
    found = verifier.compare(verifier.extract(EDITS["crop"]), reference, LEVEL)
    assert found.query_coverage == pytest.approx(1, abs=0.05)
    assert found.reference_coverage == pytest.approx(0.36, abs=0.05)
    assert area(found.query_region) == pytest.approx(1, abs=0.05)
    assert area(found.reference_region) == pytest.approx(0.36, abs=0.04)
    corners = np.array(found.reference_region)
    assert corners.min(axis=0) == pytest.approx([0.3, 0.2], abs=0.03)
    assert corners.max(axis=0) == pytest.approx([0.9, 0.8], abs=0.03)
    assert found.transform is not None
    middle = np.array(found.transform) @ (0.5, 0.5, 1)
    assert middle[:2] / middle[2] == pytest.approx([0.6, 0.5], abs=0.02)


def test_evidence_says_where_an_image_was_pasted(verifier: Verifier, reference: Features) -> None:
    found = verifier.compare(verifier.extract(EDITS["pasted"]), reference, LEVEL)
    corners = np.array(found.query_region)
    assert corners.min(axis=0) == pytest.approx([30 / 400, 200 / 400], abs=0.03)
    assert corners.max(axis=0) == pytest.approx([230 / 400, 350 / 400], abs=0.03)
    assert found.reference_coverage == pytest.approx(1, abs=0.08)
    assert found.query_coverage == pytest.approx(200 * 150 / 400**2, abs=0.03)


def test_regions_of_a_mirrored_copy_are_those_of_the_image_as_it_is(
    verifier: Verifier, reference: Features
) -> None:
    query = np.ascontiguousarray(crop(ORIGINAL, 0, 0, 0.5, 1)[:, ::-1])
    page = paste(query, scene(5, (320, 240)), (160, 0, 320, 240))
    found = verifier.compare(verifier.extract(page), reference, LEVEL)
    assert found.mirrored and found.transform is not None
    # The right edge of the page shows the left edge of the original.
    right = np.array(found.transform) @ (1, 0.5, 1)
    assert right[:2] / right[2] == pytest.approx([0, 0.5], abs=0.03)


def test_a_shared_logo_is_not_a_copy(verifier: Verifier) -> None:
    logo = scene(9, (80, 60))
    first, second = (paste(logo, scene(seed), (220, 160, 300, 220)) for seed in (11, 12))
    found = verifier.compare(verifier.extract(first), verifier.extract(second), LEVEL)
    assert found.inliers > 5  # the logo is seen
    assert not found.is_copy
    assert found.agreeing < 0.5


def test_a_shared_texture_is_not_a_copy(verifier: Verifier) -> None:
    tile = scene(4, (32, 24))
    wall = np.tile(tile, (10, 10, 1))
    first = paste(scene(21), wall, (40, 30, 200, 150))
    second = paste(scene(22), wall, (100, 80, 300, 220))
    found = verifier.compare(verifier.extract(first), verifier.extract(second), LEVEL)
    assert not found.is_copy


def test_every_part_of_a_collage_is_reported(verifier: Verifier) -> None:
    images = {str(seed): scene(seed) for seed in range(31, 37)}
    page = paste(images["32"], np.full((480, 640, 3), 255, np.uint8), (10, 10, 310, 235))
    page = paste(images["35"], page, (330, 240, 630, 465))
    candidates = [Candidate(name, verifier.extract(px), LEVEL) for name, px in images.items()]
    verdicts = verifier.verify(page, candidates)
    assert {v.id for v in verdicts if v.evidence.is_copy} == {"32", "35"}
    assert [v.evidence.score for v in verdicts] == sorted(
        (v.evidence.score for v in verdicts), reverse=True
    )
    centre = {v.id: np.mean(v.evidence.query_region, axis=0) for v in verdicts[:2]}
    assert centre["32"] == pytest.approx([0.25, 0.255], abs=0.03)
    assert centre["35"] == pytest.approx([0.75, 0.734], abs=0.03)


def test_verify_looks_at_no_more_candidates_than_its_limit() -> None:
    verifier = Verifier.from_pretrained(candidates=2)
    asked = []

    def candidates() -> Iterator[Candidate]:
        for number in range(10):
            asked.append(number)
            yield Candidate(str(number), verifier.extract(OTHER))

    assert len(verifier.verify(ORIGINAL, candidates())) == 2
    assert asked == [0, 1]


def test_kept_features_give_the_same_evidence(
    verifier: Verifier, reference: Features, tmp_path: Path
) -> None:
    query = verifier.extract(EDITS["crop"])
    with FeatureStore(tmp_path / "local") as store:
        store.put({"image": reference.best(verifier.kept)})
        kept = store.get("image")
    assert kept is not None
    assert verifier.compare(query, kept, LEVEL) == verifier.compare(query, reference, LEVEL)
    assert len(kept.to_bytes()) < 75_000


def test_a_higher_descriptor_score_is_a_higher_score(
    verifier: Verifier, reference: Features
) -> None:
    query = verifier.extract(EDITS["blurred"])
    other = verifier.extract(OTHER)
    for features in (reference, other):
        scores = [verifier.compare(query, features, s).score for s in (-0.2, 0.1, 0.3, 0.6)]
        assert scores == sorted(scores) and scores[0] < scores[-1]
        assert all(0 <= score <= 1 for score in scores)


ODD = {
    "flat": np.full((100, 100, 3), 9, np.uint8),
    "one pixel wide": np.arange(600, dtype=np.uint8).reshape(200, 1, 3),
    "one pixel": np.zeros((1, 1, 3), np.uint8),
    "noise": np.random.default_rng(0).integers(0, 256, (700, 700, 3), np.uint8),
    "checks": np.repeat((np.indices((400, 400)).sum(0) // 8 % 2)[:, :, None] * 255, 3, 2).astype(
        np.uint8
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_images_are_compared_like_others(
    verifier: Verifier, reference: Features, kind: str
) -> None:
    odd = verifier.extract(ODD[kind])
    assert len(odd) <= verifier.keypoints
    for query, other in ((odd, reference), (reference, odd), (odd, odd)):
        found = verifier.compare(query, other, LEVEL)
        assert isinstance(found, Evidence) and 0 <= found.score <= 1
        assert not found.is_copy or query is other
        assert np.isfinite(
            [found.correlation, found.query_coverage, found.reference_coverage]
        ).all()


@pytest.mark.parametrize(
    "pixels",
    [
        np.zeros((5, 5), np.uint8),
        np.zeros((5, 5, 4), np.uint8),
        np.zeros((5, 5, 3), np.float32),
        np.zeros((0, 5, 3), np.uint8),
        "image.jpg",
    ],
)
def test_other_arrays_are_refused(verifier: Verifier, pixels: Pixels) -> None:
    with pytest.raises(ValueError, match=r"expected \(h, w, 3\) uint8 RGB, got"):
        verifier.extract(pixels)


@pytest.mark.parametrize(
    ("name", "value"), [("side", 8), ("keypoints", 0), ("kept", 10**6), ("candidates", -1)]
)
def test_limits_out_of_range_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected"):
        Verifier.from_pretrained(None, **{name: value})


def test_weights_are_read_as_they_were_written(verifier: Verifier, tmp_path: Path) -> None:
    verifier.weights.save(tmp_path / "w.json")
    assert Weights.load(tmp_path / "w.json") == verifier.weights
    assert Verifier.from_pretrained(tmp_path / "w.json").weights == verifier.weights


@pytest.mark.parametrize("change", ["format", "unknown", "missing", "nan", "text"])
def test_other_files_are_no_weights(verifier: Verifier, tmp_path: Path, change: str) -> None:
    file = tmp_path / "w.json"
    verifier.weights.save(file)
    plain = json.loads(file.read_text())
    if change == "format":
        plain["format"] = 9
    elif change == "unknown":
        plain["geometry"]["weights"]["descriptor"] = 1.0
    elif change == "missing":
        del plain["geometry"]
    elif change == "nan":
        plain["geometry"]["bias"] = float("nan")
    file.write_text("{" if change == "text" else json.dumps(plain))
    with pytest.raises(WeightsError, match="not the weights of a verifier"):
        Verifier.from_pretrained(file)


def test_a_model_without_weights_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no verifier\.json in"):
        Verifier.from_pretrained(tmp_path)


def test_shipped_weights_only_ever_speak_for_a_copy() -> None:
    weights = Weights.load(models.verifier_path())
    for combination in (weights.with_descriptor, weights.geometry):
        assert combination.weights and min(combination.weights.values()) >= 0
        assert 0.5 < combination.threshold < 1
    assert "descriptor" in weights.with_descriptor.weights


def test_score_is_the_logistic_of_the_sum() -> None:
    combination = Combination(-1.0, {"cells": 2.0}, 0.5)
    assert combination.score({"cells": 0.5, "agreeing": 9.0}) == pytest.approx(0.5)
    assert combination.score({"cells": 1e6}) <= 1
    assert combination.score({"cells": -1e6}) >= 0
