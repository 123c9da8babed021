"""Rates are counted as brute force counts them, and related pairs are left out."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import results
from accuracy import thresholds
from accuracy.dataset import Images
from accuracy.related import RelatedPairs
from accuracy.thresholds import Found
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer
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


def test_only_related_cells_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thresholds, "LOOKED_AT", 2)
    found = Found(
        np.array([[0.1, 0.9], [0.8, 0.2]], np.float32), np.array([[0, 1], [0, 1]], np.int64)
    )
    images = Images(("a", "b"), ("a.jpg", "b.jpg"))
    bank = Images(("x", "y"), ("x.jpg", "y.jpg"))
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
    rows = encoder.encode(sorted(map(str, photo_folder.iterdir())))
    fitted = Normalizer.fit(rows, eps="oas", encoder=encoder)
    replace(fitted, curves={"search": made_curve()}).save(model / "normalizer.safetensors")
    thresholds.main(
        f"--bank {photo_folder} --source photos={photo_folder} --sizes 5 10 --count 6 "
        f"--model {model} --cache {tmp_path / 'cache'} --name thresholds".split()
    )
    assert (tmp_path / "thresholds.svg").read_text().startswith("<?xml")
    assert '"promised": 0.01' in (tmp_path / "thresholds.json").read_text()
