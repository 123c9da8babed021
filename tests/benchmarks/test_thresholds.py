"""Rates are counted as brute force counts them, and related pairs are left out."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import results
from accuracy import thresholds
from accuracy.copies import drawn_thresholds, edited, recall
from accuracy.edits.mix import draw
from accuracy.related import RelatedPairs
from accuracy.thresholds import Found
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import FalseMatchCurve, Kind, Normalizer
from tests.normalize.made import descriptors
from tests.normalize.test_verdict import made_curve


def test_the_best_of_every_bank_is_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "PART", 10)
    monkeypatch.setattr(thresholds, "BLOCK", 7)
    rules = Normalizer.fit(descriptors(400))
    queries, bank = descriptors(20, seed=1), descriptors(47, seed=2)
    found, plain = Found.search(rules, queries, bank), rules.scores(queries, bank)
    for size, banks in ((10, 4), (20, 2), (40, 1)):
        best = found.best_in(size)
        expected = plain[:, : size * banks].reshape(20, banks, size).max(2)
        np.testing.assert_allclose(best, expected, atol=1e-6)
    assert found.best_in(80).shape == (20, 0)
    np.testing.assert_array_equal(found.rows[:, 1], plain[:, 10:20].argmax(1) + 10)


def test_what_is_counted_stands_beside_what_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "PART", 1000)
    rules = Normalizer(24, curves={"search": made_curve()})
    scores = np.full((500, 2), -0.5, dtype=np.float32)
    scores[:6, 0], scores[:2, 1] = 0.3, 0.21
    found = Found(scores, np.zeros((500, 2), dtype=np.int64))
    rows = thresholds.measure(rules, found, [1000, 2000, 100_000])
    assert [(row["bank"], row["promised"], row["false matches"]) for row in rows] == [
        (1000, 1e-2, 8), (1000, 1e-3, 6), (2000, 1e-2, 6), (2000, 1e-3, 6),
    ]  # fmt: skip
    assert rows[0]["measured"] == pytest.approx(8 / 1000)
    assert rows[1]["measured / promised"] == pytest.approx(6.0)
    assert rows[2]["searches"] == 500
    left = found.without(np.array([[0, 0], [1, 0]]))
    assert thresholds.measure(rules, left, [1000])[1]["false matches"] == 4


def test_the_best_view_counts() -> None:
    scores = np.array([[1, 5], [4, 2], [0, 0], [3, 1]], np.float32)
    best = Found(scores, np.arange(8).reshape(4, 2)).best_of(2)
    assert best.scores.tolist() == [[4, 5], [3, 1]] and best.rows.tolist() == [[2, 1], [6, 7]]


def test_only_related_cells_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "LOOKED_AT", 2)
    found = Found(
        np.array([[0.1, 0.9], [0.8, 0.2]], np.float32), np.array([[0, 1], [0, 1]], np.int64)
    )
    images, bank = ["a.jpg", "b.jpg"], ["x.jpg", "y.jpg"]
    monkeypatch.setattr("accuracy.related.are_related", lambda a, b: (a, b) == ("b.jpg", "x.jpg"))
    cells = thresholds.related_cells(found, images, bank, RelatedPairs())
    assert cells.tolist() == [[1, 0]]


def test_a_whole_run_writes_figures_and_a_plot(
    encoder_folder: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "PART", 5)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results, "write", partial(results.write, folder=tmp_path))
    model = tmp_path / "model"
    shutil.copytree(encoder_folder, model)
    encoder = Encoder.from_pretrained(model)
    files = sorted(photo_folder.iterdir())
    (tmp_path / "bank").mkdir()
    for path in files[10:]:
        shutil.copy(path, tmp_path / "bank")
    rows = encoder.encode(list(map(str, files[:12])))  # two of them are in the bank too
    fitted = Normalizer.fit(rows, eps="oas", encoder=encoder)
    whole, tiled = made_curve(), made_curve(kind="tiled", views=10)
    higher = replace(tiled, scores=tiled.scores + 0.05, high=tiled.high + 0.05)
    curves: dict[Kind, FalseMatchCurve] = {"search": whole, "tiled": higher}
    replace(fitted, curves=curves).save(model / "normalizer.safetensors")
    thresholds.main(
        f"--bank {tmp_path / 'bank'} --source photos={photo_folder} --sizes 5 10 --count 6 "
        f"--bank-count {len(files) - 10} --copies 4 --views 3 "
        f"--model {model} --cache {tmp_path / 'cache'} --name thresholds".split()
    )
    assert (tmp_path / "thresholds.svg").read_text().startswith("<?xml")
    figures = json.loads((tmp_path / "thresholds.json").read_text())["figures"]
    assert figures["bank"] == {"photos": len(files) - 12, "in the background": 2}
    assert {row["promised"] for row in figures["photos"]["rates"]} == {0.01, 0.001}
    looks = [figures["photos"][name][0] for name in ("one look", "second look", "tiled")]
    assert [row["searches"] for row in looks] == [3 * ((len(files) - 12) // 5)] * 3
    assert looks[0]["false matches"] <= looks[1]["false matches"]
    thresholds_of = [row["threshold"] for row in looks]  # crops are judged by their own curve
    assert thresholds_of == pytest.approx([thresholds_of[0]] * 2 + [thresholds_of[0] + 0.05])
    found = figures["photos"]["recall"]
    assert [row["copies"] for row in found["2 edits"]] == [4] * 4
    # The second time nothing is edited or encoded again.
    monkeypatch.setattr("accuracy.copies.edited", None)
    thresholds.main(
        f"--bank {tmp_path / 'bank'} --source photos={photo_folder} --sizes 5 --count 6 "
        f"--bank-count {len(files) - 10} --copies 4 --model {model} --cache {tmp_path / 'cache'}"
        "".split()
    )


def test_recall_is_counted_at_the_threshold_of_each_bank() -> None:
    rules = replace(Normalizer.fit(descriptors(400)), curves={"search": made_curve()})
    originals = descriptors(40, seed=1)
    noise = np.random.default_rng(0).normal(size=originals.shape) * np.linspace(0, 0.4, 40)[:, None]
    copies = originals + noise
    copies = (copies / np.linalg.norm(copies, axis=1, keepdims=True)).astype(np.float32)
    scores = np.diagonal(rules.scores(copies, originals))
    rows = recall(rules, copies, originals, [1000, 100_000], [1e-2, 1e-3])
    for row, (size, rate) in zip(
        rows, [(n, r) for n in (1000, 100_000) for r in (1e-2, 1e-3)], strict=True
    ):
        limit = rules.threshold_for(rate, size)
        assert row["recall"] == pytest.approx((scores >= limit).mean())
    shares = [row["recall"] for row in rows]
    assert shares[0] > shares[3] > 0


def test_edited_copies_have_as_many_edits_as_asked(photo_folder: Path) -> None:
    paths = sorted(map(str, photo_folder.iterdir()))[:4]
    assert [len(draw(np.random.default_rng(seed), 2)) for seed in range(20)] == [2] * 20
    first, again = edited(paths, 1, seed=3), edited(paths, 1, seed=3)
    for path, one, other in zip(paths, first, again, strict=True):
        with Image.open(path) as original:
            assert one.size != original.size or one.tobytes() != original.tobytes()
        assert one.tobytes() == other.tobytes()


def test_draws_say_how_far_thresholds_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accuracy.copies.SIZES", (100, 200))
    monkeypatch.setattr("accuracy.copies.DRAWS", 3)
    rules = replace(Normalizer.fit(descriptors(400)), curves={"search": made_curve()})
    held, copied = descriptors(300, seed=1), descriptors(50, seed=2)
    monkeypatch.setattr("accuracy.copies.RATE", 0.05)
    monkeypatch.setattr("accuracy.copies.BANK", 10)
    small, large = drawn_thresholds(rules, held, copied, copied)
    assert (small["photos"], large["photos"]) == (100, 200)
    for found in (small, large):
        assert found["refused"] == [] and found["lowest"] < found["median"] < found["highest"] <= 1
        assert found["lowest recall"] == pytest.approx(
            found["lowest / best"] * found["best recall"], abs=1e-3
        )
    # A rate that no draw can show is refused, and not counted.
    monkeypatch.setattr("accuracy.copies.RATE", 1e-12)
    with pytest.raises(ValueError, match="refused all 3 draws of 100"):
        drawn_thresholds(rules, held, copied, copied)
