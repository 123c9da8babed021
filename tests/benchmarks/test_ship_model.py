"""The shipped threshold is checked by counting, here once more by brute force."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest

import ship_model
from disc_layout import read_disc
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Normalizer, precision_threshold


def test_check_counts_accepted_pairs(
    disc_like: Path, encoder_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(encoder_folder, model)
    encoder, disc = Encoder.from_pretrained(model), read_disc(disc_like)
    fitted = Normalizer.fit(
        encoder.encode(list(disc.training.paths)), eps="oas", encoder=encoder, score_norm=None
    )
    scores = fitted.scores(
        encoder.encode(list(disc.queries.paths)), encoder.encode(list(disc.references.paths))
    )
    copies = np.array(
        [[(q, r) in disc.matches for r in disc.references.ids] for q in disc.queries.ids]
    )
    best = np.argsort(-scores, axis=1)[:, : ship_model.CANDIDATES]
    kept, labels = np.take_along_axis(scores, best, 1), np.take_along_axis(copies, best, 1)
    assert 0 < labels.sum() < labels.size
    found = precision_threshold(kept.ravel(), labels.ravel(), float(labels.mean()))
    fitted.with_threshold(found.threshold).save(model / "normalizer.safetensors")

    ship_model.main(["check", str(model), str(disc_like)])

    figures = ast.literal_eval(capsys.readouterr().out.strip().splitlines()[-1])
    accepted = kept >= found.threshold.value
    assert figures["accepted pairs"] == accepted.sum()
    assert figures["precision"] == pytest.approx(labels[accepted].mean(), abs=1e-4)
    assert figures["recall"] == pytest.approx(labels[accepted].sum() / len(disc.matches), abs=1e-4)
