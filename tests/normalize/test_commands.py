import json
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import save_file
from typer.testing import CliRunner

from sscd_vec.cli.calibrate import calibrate_threshold
from sscd_vec.cli.descriptors import read_descriptors
from sscd_vec.cli.normalize import fit, table
from sscd_vec.normalize import Normalizer
from tests.normalize.made import descriptors


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command("fit")(fit)
    made.command("calibrate")(calibrate_threshold)
    made.command("table")(table)
    return made


def run(app: typer.Typer, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout if "--json" in arguments else result.output


def test_fit_then_calibrate(app: typer.Typer, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", descriptors(600))
    save_file({"descriptors": descriptors(600, seed=1)}, tmp_path / "b.safetensors")
    np.save(tmp_path / "held.npy", descriptors(600, seed=2))
    out, calibrated = tmp_path / "n.safetensors", tmp_path / "c.safetensors"
    code, text = run(
        app, "fit", tmp_path / "a.npy", tmp_path / "b.safetensors", "-o", out, "--half", "--json"
    )
    assert code == 0 and json.loads(text)["background"] == 1200
    plot = tmp_path / "scores.png"
    arguments = ["--queries", tmp_path / "held.npy", "--false-match-rate", "0.05", "--plot", plot]
    code, text = run(app, "calibrate", out, "-o", calibrated, *arguments, "--json")
    assert code == 0 and plot.stat().st_size > 1000
    before, after = Normalizer.load(out), Normalizer.load(calibrated)
    assert json.loads(text)["thresholds"][0]["value"] == after.threshold()
    assert before.reference_fingerprint == after.reference_fingerprint
    code, text = run(
        app,
        "calibrate",
        calibrated,
        "-o",
        calibrated,
        "--false-match-rate",
        "0.05",
        "--kind",
        "symmetric",
    )
    assert code == 0 and "threshold (symmetric)" in text
    assert set(Normalizer.load(calibrated).thresholds) == {"search", "symmetric"}


def test_the_papers_table(app: typer.Typer, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    references = descriptors(200, seed=1)
    queries = references[:40] + 0.15 * random.normal(size=(40, 24))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    np.save(tmp_path / "r.npy", references)
    np.save(tmp_path / "q.npy", np.concatenate([queries, descriptors(40, seed=3)]))
    np.save(tmp_path / "b.npy", descriptors(900, seed=2))
    rows = "\n".join(f"{i},{i}" for i in range(40))
    (tmp_path / "truth.csv").write_text(f"query_id,reference_id\n{rows}\n")
    files = [
        f"--{n}={tmp_path / f}"
        for n, f in (
            ("queries", "q.npy"),
            ("references", "r.npy"),
            ("background", "b.npy"),
            ("truth", "truth.csv"),
        )
    ]
    code, text = run(app, "table", *files, "--json")
    assert code == 0
    found = {(r["beta"], r["n"], r["n_end"]): r["micro_ap"] for r in json.loads(text)}
    assert {(1.0, n, n) for n in range(1, 6)} <= set(found)
    assert {(1.0, 1, n_end) for n_end in range(1, 6)} <= set(found)
    assert {(b, 1, 3) for b in (0.0, 0.5, 0.75, 1.0, 1.25, 1.5)} <= set(found)
    assert all(0 <= value <= 1 for value in found.values())
    assert len(set(found.values())) > 3
    # One entry the long way round.
    from sscd_vec.metrics import micro_average_precision
    from sscd_vec.predictions import GroundTruth, Predictions

    scores = Normalizer.fit(np.load(tmp_path / "b.npy")).scores(
        np.load(tmp_path / "q.npy"), references
    )
    best = np.argsort(-scores, axis=1)[:, :10]
    predictions = Predictions(
        np.repeat(np.arange(80), 10), best.ravel(), np.take_along_axis(scores, best, 1).ravel()
    )
    expected = micro_average_precision(predictions, GroundTruth(np.arange(40), np.arange(40)))
    assert found[1.0, 1, 3] == pytest.approx(expected, abs=1e-6)


def test_errors_are_sentences(app: typer.Typer, tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", descriptors(5))
    code, text = run(app, "fit", tmp_path / "few.npy", "-o", tmp_path / "n")
    assert code == 1 and text.startswith("error: ") and "Traceback" not in text
    assert "vary in 4 directions" in text and "--dim 2, or shrink with --shrink" in text
    code, text = run(app, "fit", tmp_path / "few.txt", "-o", tmp_path / "n")
    assert code == 1 and "expected a .npy, .safetensors or .parquet file" in text
    assert not (tmp_path / "n").exists()
    code, text = run(app, "calibrate", tmp_path / "few.npy", "-o", tmp_path / "n")
    assert code == 1 and "not a normalizer" in text
    save_file({"a": descriptors(2), "b": descriptors(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ValueError, match="one named 'descriptors'"):
        read_descriptors(tmp_path / "two.safetensors")
