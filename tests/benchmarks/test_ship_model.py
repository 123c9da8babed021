"""The shipped threshold is checked by counting, here once more by brute force."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest

import ship_model
from disc_layout import read_disc
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.images import load_pixels
from sscd_vec.normalize import Normalizer, precision_threshold
from sscd_vec.photos.tiles import crops


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


def test_a_tiled_score_is_the_best_of_all_tiles(disc_like: Path, encoder_folder: Path) -> None:
    encoder, disc = Encoder.from_pretrained(encoder_folder), read_disc(disc_like)
    fitted = Normalizer.fit(
        encoder.encode(list(disc.training.paths)), eps="oas", encoder=encoder, score_norm=None
    )
    found, matched = ship_model.scored_by_tiles(fitted, encoder, disc, count=4)
    asked = sorted(set(found.queries.tolist()))
    assert asked[0] == 0 and asked[-1] == len(disc.queries) - 1 and len(asked) == 4
    references = encoder.encode(list(disc.references.paths))
    for query in asked:
        tiles = encoder.encode(crops(load_pixels(disc.queries.paths[query]), ship_model.TILES))
        expected = np.sort(fitted.scores(tiles, references).max(axis=0))[::-1]
        scores = found.scores[found.queries == query]
        assert scores == pytest.approx(expected[: len(scores)], abs=1e-5)
    pairs = zip(found.queries, found.references, strict=True)
    assert matched.tolist() == [
        (disc.queries.ids[query], disc.references.ids[row]) in disc.matches for query, row in pairs
    ]
