"""The shipped threshold is checked by counting, here once more by brute force."""

import ast
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from accuracy.dataset import read_disc
from release import curves, domain, nonphotos, ship_model
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.checkpoint import load_model, read_checkpoint, write_pretrained
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.files import find_images
from sscd_vec.normalize import Normalizer, ScoreNorm, Whitening, precision_threshold
from sscd_vec.trainer.model import encode
from sscd_vec.trainer.pixels import MemoryPixels, Storage, as_squares


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
    strangers = ~copies.any(axis=1)
    assert figures["strangers"] == strangers.sum() > 0
    false = (kept[strangers] >= found.threshold.value).any(axis=1).mean()
    assert figures["false-match rate"] == pytest.approx(false, abs=1e-5)
    assert figures["precision"] == pytest.approx(labels[accepted].mean(), abs=1e-4)
    assert figures["recall"] == pytest.approx(labels[accepted].sum() / len(disc.matches), abs=1e-4)


def test_make_writes_a_folder_with_curves_for_every_kind(
    encoder_folder: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ship_model, "BACKGROUND_ROWS", 18)
    monkeypatch.setattr(curves, "VIEWED", 11)
    monkeypatch.setattr(domain, "FALSE_ALARM", 0.4)
    monkeypatch.setattr(domain, "PER_KIND", 1)
    background, strangers = tmp_path / "background", tmp_path / "strangers"
    for folder, files in zip(
        (background, strangers), np.split(sorted(photo_folder.iterdir()), [18]), strict=True
    ):
        folder.mkdir()
        for file in files:
            shutil.copy(file, folder)
    out = tmp_path / "shipped"
    ship_model.main(
        ["make", str(encoder_folder), str(out), "--whitened", "0.5"]
        + ["--background", str(background), "--strangers", str(strangers), "--force"]
    )
    fitted = Normalizer.load(out / "normalizer.safetensors")
    fitted.check_encoder(Encoder.from_pretrained(out))
    assert sorted(fitted.thresholds) == sorted(fitted.curves) == ["search", "symmetric", "tiled"]
    for threshold in fitted.thresholds.values():
        assert (threshold.rate, threshold.bank_size) == (1e-3, 1000)
    assert fitted.domain is not None
    assert fitted.domain.background.shape == (len(nonphotos.KINDS), fitted.dim)


def test_several_runs_are_averaged_and_different_models_refused(
    encoder_folder: Path, tmp_path: Path
) -> None:
    config, first = read_checkpoint(encoder_folder)
    second = {name: 3 * tensor for name, tensor in first.items()}
    write_pretrained(tmp_path / "second", config, second)
    _, mean = ship_model.averaged([encoder_folder, tmp_path / "second"])
    for name, tensor in first.items():
        torch.testing.assert_close(mean[name], 2 * tensor)
    write_pretrained(tmp_path / "other", config.replace(size=64), first)
    with pytest.raises(ValueError, match="other: expected the model of"):
        ship_model.averaged([encoder_folder, tmp_path / "other"])


def test_a_photo_under_two_names_is_left_out() -> None:
    photos = np.eye(6, dtype=np.float32)
    known = Normalizer.fit(photos[[5, 3]], whitening=None, score_norm=ScoreNorm(1.0, 1, 1))
    assert curves.strangers(known, photos[[0, 1, 0, 2, 3]]).tolist() == [0, 1, 3]


def features_of(model: SSCDModel, photos: Path) -> NDArray[np.float32]:
    size = model.config.size
    pixels = MemoryPixels(find_images(photos), Storage(size)).take(np.arange(40)).tensors()
    return encode(model, as_squares(pixels, size), model.pooled)


def test_a_whole_share_makes_the_head_the_shrunk_whitening_of_the_trunk(
    photo_folder: Path, encoder_folder: Path
) -> None:
    config, weights = read_checkpoint(encoder_folder)
    changed = ship_model.with_blended_head(config, weights, [photo_folder], share=1)
    assert {name for name in weights if not torch.equal(changed[name], weights[name])} == {
        "head.weight",
        "head.bias",
    }
    model = load_model(config, changed)
    features = features_of(model, photo_folder)
    whitened = Whitening.fit(features, eps=ship_model.HEAD_EPS).project(features)
    # The six strongest of its directions, and so its six leading principal components.
    left, strengths, _ = np.linalg.svd(whitened, full_matrices=False)
    expected = left[:, : config.dim] * strengths[: config.dim]
    ours = model.head(torch.from_numpy(features)).detach().numpy()
    ours *= np.linalg.norm(expected) / np.linalg.norm(ours)
    wanted = expected @ expected.T
    np.testing.assert_allclose(ours @ ours.T, wanted, atol=1e-4 * wanted.max())


def test_no_share_keeps_the_learned_similarities(photo_folder: Path, encoder_folder: Path) -> None:
    config, weights = read_checkpoint(encoder_folder)
    changed = ship_model.with_blended_head(config, weights, [photo_folder], share=0)
    model, before = load_model(config, changed), load_model(config, weights)
    features = torch.from_numpy(features_of(before, photo_folder))
    ours, theirs = (each.head(features).detach().numpy() for each in (model, before))
    theirs -= theirs.mean(axis=0)
    ours *= np.linalg.norm(theirs) / np.linalg.norm(ours)
    wanted = theirs @ theirs.T
    np.testing.assert_allclose(ours @ ours.T, wanted, atol=1e-4 * wanted.max())


def test_a_share_beyond_one_or_another_head_is_refused(encoder_folder: Path) -> None:
    config, weights = read_checkpoint(encoder_folder)
    with pytest.raises(ValueError, match="share from 0 to 1.*got 2"):
        ship_model.with_blended_head(config, weights, [], share=2)
    with pytest.raises(ValueError, match="linear head, got 0.5 and 'mlp'"):
        ship_model.with_blended_head(config.replace(head="mlp"), weights, [], share=0.5)
