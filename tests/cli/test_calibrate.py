"""Thresholds from labels: as a CSV of pairs, as a truth file, and what is refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sscd_vec.bank import Bank
from sscd_vec.normalize import Normalizer
from tests.cli.conftest import small
from tests.cli.test_commands import fails, run

COPIES, OTHERS = range(12), range(100, 130)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SSCD_VEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pairs(tmp_path: Path, model: Path) -> Path:
    """A CSV file of judged pairs beside its images, and the model's normalizer as ``n``."""
    shutil.copy(model / "normalizer.safetensors", "n")
    (tmp_path / "images").mkdir()
    for seed in (*COPIES, *OTHERS):
        small(seed).save(f"images/{seed}.png")
    for seed in COPIES:
        small(seed).save(f"images/{seed}-copy.jpg", quality=60)
    lines = [f"{seed}-copy.jpg,{seed}.png,1" for seed in COPIES]
    lines += [f"{seed}.png,{seed + 1}.png,no" for seed in OTHERS[:-1]]
    path = tmp_path / "images" / "pairs.csv"
    path.write_text("query,reference,is_copy\n" + "\n".join(lines) + "\n")
    return path


def test_labels_as_a_csv_of_pairs_give_a_precision(pairs: Path, model: Path) -> None:
    found = run(
        "calibrate", "n", "-o", "m", "--labels", pairs, "--precision", 0.9, "--model", model
    )
    stored = {each["kind"]: each for each in found["thresholds"]}["search"]
    assert stored["target"] == "precision" and stored["samples"] == 41
    rules = Normalizer.load("m")
    with Bank(model=model, normalizer=rules) as bank:
        bank.add([pairs.parent / f"{seed}.png" for seed in COPIES])
        for seed in COPIES:
            best = bank.search(pairs.parent / f"{seed}-copy.jpg", k=1, scales="one")[0]
            assert best.is_copy == (best.score >= rules.threshold("search"))
    # The model's folder stands for its normalizer, as everywhere.
    by_model = run(
        "calibrate",
        model,
        "-o",
        "by-model",
        "--labels",
        pairs,
        "--precision",
        0.9,
        "--model",
        model,
    )
    assert by_model["thresholds"] == found["thresholds"]
    said = fails("calibrate", "sscd_lite1", "-o", "no", "--labels", pairs, "--precision", 0.9)
    assert "a shipped model (sscd_lite0)" in said and not Path("no").exists()
    # Names are also paths inside --queries and --references.
    moved = shutil.copy(pairs, "pairs.csv")
    asked = "--precision", 0.9, "--model", model, "--queries", "images"
    assert run("calibrate", "n", "-o", "again", "--labels", moved, *asked) == found | {
        "file": "again"
    }
    lost = fails("calibrate", "n", "-o", "no", "--labels", "pairs.csv", *asked[:4])
    assert "expected 0-copy.jpg to be an image" in lost and not Path("no").exists()


def test_labels_of_descriptor_files_are_row_numbers(pairs: Path, model: Path) -> None:
    from sscd_vec.encoder import Encoder

    files = sorted(map(str, pairs.parent.glob("*.*g")))
    np.save("rows.npy", Encoder.from_pretrained(model).encode(files))
    row = {Path(name).name: number for number, name in enumerate(files)}
    header, *lines = pairs.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    numbered = [f"{row[query]},{row[reference]},{label}" for query, reference, label in cells]
    Path("rows.csv").write_text("\n".join([header, *numbered]))
    asked = "--precision", 0.9, "--model", model
    by_name = run("calibrate", "n", "-o", "a", "--labels", pairs, *asked)
    by_row = run(
        "calibrate", "n", "-o", "b", "--labels", "rows.csv", "--queries", "rows.npy", *asked
    )
    values = [found["thresholds"][0]["value"] for found in (by_name, by_row)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)
    Path("bad.csv").write_text("query,reference,is_copy\n0,one.png,1\n")
    said = fails(
        "calibrate", "n", "-o", "c", "--labels", "bad.csv", "--queries", "rows.npy", *asked
    )
    assert "expected row numbers" in said


def test_few_labels_are_refused_unless_forced(pairs: Path, model: Path) -> None:
    few = pairs.with_name("few.csv")
    few.write_text("\n".join(pairs.read_text().splitlines()[:16]))
    asked = "--labels", few, "--precision", 0.9, "--model", model
    said = fails("calibrate", "n", "-o", "no", *asked)
    assert "expected at least 20 labelled pairs" in said and "got 12 copies and 3 others" in said
    assert not Path("no").exists()
    run("calibrate", "n", "-o", "no", *asked, "--force")
    assert Path("no").exists()


def test_known_copies_must_be_found_and_are_not_strangers(pairs: Path, model: Path) -> None:
    asked = (
        "--queries", "images", "--false-match-rate", 0.01, "--per", "comparison", "--model", model,
        "--pictures", "pairs.png", "--force",
    )  # fmt: skip
    blind = run("calibrate", "n", "-o", "blind", *asked, "--leave-out", 0)
    told = run("calibrate", "n", "-o", "told", *asked, "--leave-out", 0, "--labels", pairs)
    value = {n: found["thresholds"][0]["value"] for n, found in (("b", blind), ("t", told))}
    assert value["t"] < value["b"]  # twelve copies among the strangers raise the threshold
    samples = [found["thresholds"][0]["samples"] for found in (blind, told)]
    assert samples[0] - samples[1] == 2 * len(COPIES)
    with Image.open("pairs.png") as sheet:
        assert sheet.width == 800 and sheet.height >= 220
        assert np.asarray(sheet).std() > 10


def test_the_highest_pairs_are_named_also_when_refused(pairs: Path, model: Path) -> None:
    asked = "--queries", "images", "--false-match-rate", 1e-9, "--model", model
    said = fails("calibrate", "n", "-o", "no", *asked, "--pictures", "seen.png")
    assert "refused" in said and "-copy.jpg" in said
    assert Path("seen.png").exists() and not Path("no").exists()
    np.save("rows.npy", np.eye(512, dtype=np.float32)[:60])
    text = fails(
        "calibrate", "n", "-o", "no", "--queries", "rows.npy", *asked[2:], "--pictures", "x.png"
    )
    assert "x.png was not drawn" in text and not Path("x.png").exists()


def test_eval_stores_the_threshold_it_chose(pairs: Path, model: Path) -> None:
    for folder, names in (("q", "*-copy.jpg"), ("r", "*.png")):
        Path(folder).mkdir()
        for path in pairs.parent.glob(names):
            shutil.copy(path, folder)
    truth = [f"{seed}-copy,{seed}" for seed in COPIES]
    Path("truth.csv").write_text("query_id,reference_id\n" + "\n".join(truth))
    folders = "--queries", "q", "--references", "r", "--model", model, "--write", "found.csv"
    run("eval", "truth.csv", *folders, "--store", "mine", "--precision", 0.8)
    stored = Normalizer.load("mine").thresholds["search"]
    assert stored.target == "precision" and stored.wanted == 0.8 and stored.samples == 120
    scores = [line.split(",") for line in Path("found.csv").read_text().splitlines()[1:]]
    accepted = [row for row in scores if float(row[2]) >= stored.value]
    right = sum(f"{query},{reference}" in truth for query, reference, _ in accepted)
    assert right / len(accepted) >= 0.8
    # Scores from a file do not say who made them.
    found = "eval", "truth.csv", "--predictions", "found.csv"
    assert "which --normalizer" in fails(*found, "--store", "x")
    again = "--normalizer", "n", "--store", "again", "--precision", 0.8
    run(*found, *again)
    assert Normalizer.load("again").threshold("search") == pytest.approx(stored.value, abs=1e-5)
    Path("short.csv").write_text("\n".join(Path("found.csv").read_text().splitlines()[:8]))
    result = fails_after_figures("eval", "truth.csv", "--predictions", "short.csv", *again[:2])
    assert "nothing was stored" in result and not Path("refused").exists()


def fails_after_figures(*arguments: object) -> str:
    """What ``eval --store`` says when it prints its figures and refuses the threshold."""
    from typer.testing import CliRunner

    from sscd_vec.cli import app

    result = CliRunner().invoke(app, [*map(str, arguments), "--store", "refused"])
    assert result.exit_code == 1 and "micro_ap" in result.stdout
    return result.stderr
