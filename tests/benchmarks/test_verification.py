"""The benchmark of the second stage and the fit of its weights, on a set of drawn images."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from accuracy import false_friends, verification, verify
from accuracy.dataset import DiscSet, list_images
from photos import find_photos
from release import fit_verifier
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
from sscd_vec.verify import Verifier
from tests.verify.scenes import crop, scene, turn


@pytest.fixture(scope="module")
def disc(tmp_path_factory: pytest.TempPathFactory) -> DiscSet:
    folder = tmp_path_factory.mktemp("set")
    for name in ("references", "queries", "training"):
        (folder / name).mkdir()
    for number in range(4):
        Image.fromarray(scene(number)).save(folder / "references" / f"R{number}.png")
    queries = [crop(scene(0), 0.2, 0, 1, 1), turn(scene(2), 20), scene(50)]
    for number, query in enumerate(queries):
        Image.fromarray(query).save(folder / "queries" / f"Q{number}.png")
    return DiscSet(
        list_images(folder / "references"),
        list_images(folder / "queries"),
        list_images(folder / "references"),
        frozenset({("Q0", "R0"), ("Q1", "R2")}),
    )


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder.from_pretrained()


@pytest.fixture(scope="module")
def measured(
    disc: DiscSet, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> verification.Measurements:
    cache = tmp_path_factory.mktemp("cache")
    normalizer = Normalizer.from_pretrained()
    first = verification.measure_set(disc, encoder, normalizer, cache, k=2, further=1, look="tiled")
    again = verification.measure_set(disc, encoder, normalizer, cache, k=2, further=1, look="tiled")
    for field in fields(first):  # the second time from the cache
        assert np.array_equal(getattr(first, field.name), getattr(again, field.name))
    return first


def test_measurements_are_those_of_every_candidate(
    disc: DiscSet, measured: verification.Measurements
) -> None:
    assert sorted(set(measured.query.tolist())) == [0, 1, 2]
    assert [int(row) for row in np.bincount(measured.within(2).query)] == [2, 2, 2]
    assert (measured.within(0, 1).further_rank == 0).all()
    copies = verification.are_copies(measured, disc)
    supports = list(verification.supports(measured))
    assert copies.sum() == 2
    assert min(s.cells for s, copy in zip(supports, copies, strict=True) if copy) > 20
    assert max(s.cells for s, copy in zip(supports, copies, strict=True) if not copy) < 10


def test_the_benchmark_sees_that_both_copies_are_confirmed(
    disc: DiscSet, measured: verification.Measurements
) -> None:
    verifier = Verifier.from_pretrained()
    table = verify.rows(measured, disc, verifier, [1, 2], 1)
    assert [row["search"] for row in table][1:] == [
        "verified, 1 candidates",
        "verified, 2 candidates",
        "verified, 2 candidates and 1 of another look",
    ]
    assert table[2]["µAP"] == table[2]["recall@P99"] == 100
    limits = verify.at_threshold(measured, disc, verifier)
    assert limits["precision"] == limits["recall"] == 1
    assert limits["unmatched queries"] == 1 and limits["unmatched queries called a copy"] == 0
    again = verify.doubted(measured.within(2), disc, verifier)
    assert again == {"accepted copies compared again": 2, "of them to be looked at": 0}


def test_odd_images_have_bounded_features() -> None:
    verifier = Verifier.from_pretrained()
    counts = {kind: len(verifier.extract(px)) for kind, px in verify.odd_images().items()}
    assert counts["flat"] == 0
    assert counts["noise"] == counts["tiled texture"] == verifier.keypoints


def test_false_friends_share_a_template_and_nothing_else(disc: DiscSet) -> None:
    photos = find_photos([Path(disc.references.paths[0]).parent])
    for kind in false_friends.KINDS:
        first, second = (false_friends.make(kind, photos, 2, seed=3) for _ in range(2))
        assert [len(images) for images in first] == [2, 2]
        for ours, theirs in zip(sum(first, []), sum(second, []), strict=True):
            assert ours.tobytes() == theirs.tobytes()
        assert first[0][0].tobytes() != first[0][1].tobytes()


def test_regression_finds_the_weights_and_leaves_out_what_speaks_against_a_copy() -> None:
    rng = np.random.default_rng(0)
    figures = rng.normal(size=(20_000, 3))
    chance = 1 / (1 + np.exp(-(figures @ (2.0, 0.5, 0.0) - 1)))
    copy = rng.random(len(figures)) < chance
    bias, weights = fit_verifier._regress(figures, copy)
    assert bias == pytest.approx(-1, abs=0.1)
    assert weights[:2] == pytest.approx([2, 0.5], abs=0.1)
    _, weights = fit_verifier._regress(np.column_stack([figures, -figures[:, 0]])[:, 1:], copy)
    assert weights[-1] == 0 and (weights >= 0).all()


def test_thresholds_keep_every_promise() -> None:
    scores = np.array([0.99, 0.98, 0.97, 0.96, 0.5, 0.9, 0.95])
    pairs = fit_verifier.Labelled(
        np.zeros((7, 1)),
        np.array([True, True, True, False, True, False, False]),
        np.array([0, 1, 2, 3, 4, 5, -1]),
        np.array(["", "", "", "", "", "", "logo"]),
    )
    # Query 3 has a match elsewhere, query 5 has none, the last is a false friend.
    found = fit_verifier._threshold(scores, pairs, np.array([5]))
    assert 0.96 < found <= 0.97
    without = fit_verifier._precise(scores[:3], pairs.copy[:3])
    assert without == 0.97
    assert 0.9 < fit_verifier._rare(scores[5:6], pairs.query[5:6], 1) < 0.91
    assert fit_verifier._rare(scores[5:6], pairs.query[5:6], 10_000) == 0
