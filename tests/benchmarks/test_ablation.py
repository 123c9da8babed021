import json
from pathlib import Path

import pytest

from accuracy import ablation
from accuracy.ablation_table import TABLE, TRAININGS, train_config
from accuracy.dataset import read_disc

SMALL = {"trunk": "resnet18", "init_from": "", "frozen_stages": 0, "size": 32, "stored_size": 40}
SMALL |= {"inference_size": 32, "batch": 6, "steps": 2, "dim": 6, "learning_rate": 1e-3}


def overrides() -> list[str]:
    return [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]


def test_rows_are_trained_measured_and_never_repeated(
    disc_like: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    arguments = ["--photos", str(photo_folder), "--disc", str(disc_like), "--work", str(work)]
    arguments += ["--rows", "simclr", "linear", "--seeds", "0", "1", "--name", "ablation"]
    arguments += ["--results", str(tmp_path), *overrides()]
    ablation.main(arguments)
    runs = sorted(folder.name for folder in work.iterdir())
    assert runs == ["linear-seed0", "linear-seed1", "simclr-seed0"]
    figures = json.loads((tmp_path / "ablation.json").read_text())["figures"]
    steps = {row["label"]: row for row in figures["rows"] if row["table"] == "steps"}
    assert "SimCLR, trunk features" in steps and "+ linear projection" in steps
    assert steps["SimCLR, trunk features"]["dim"] == 512  # the trunk's, not the head's
    assert steps["+ linear projection"]["seeds"] == 2
    shown = {row["row"]: row for row in figures["tables"]["steps"]}
    assert shown["+ linear projection"]["runs"] == 2
    assert shown["+ linear projection"]["paper with score norm"] == 51.6
    assert shown["SimCLR, projection"]["µAP"] == round(
        100 * steps["SimCLR, projection"]["micro_ap"], 1
    )
    assert figures["seed_deviation"] is not None
    assert (tmp_path / "ablation.svg").exists()

    def never(*_: object) -> None:
        raise AssertionError("a finished row was trained again")

    monkeypatch.setattr(ablation, "train", never)
    ablation.main(arguments)


def test_a_run_that_is_too_long_says_how_many_steps_fit(photo_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [json.dumps({"step": step, "seconds": 30.0}) for step in range(4)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = train_config("simclr", 0, SMALL)
    with pytest.raises(ablation.TooLong, match="--set steps=2"):
        ablation.train(config, [photo_folder], run, minutes=1)


def test_every_table_row_has_a_run_and_a_valid_configuration() -> None:
    assert {row.training for row in TABLE} == set(TRAININGS)
    for training in TRAININGS:
        config = train_config(training, 1, {})
        assert config.seed == 1 and config.trunk == "efficientnet_lite0"
    assert train_config("length_0.5", 0, {}).steps * 2 == train_config("advanced", 0, {}).steps
    plain, twice = (train_config(row, 0, {}) for row in ("advanced", "batch_2.0"))
    assert (twice.batch, twice.steps) == (2 * plain.batch, plain.steps // 2)  # as many epochs
    assert train_config("mixup", 0, {}).augmentations == "advanced+mixup"
    assert train_config("linear", 0, {}).entropy_weight == 0


def test_differences_below_two_deviations_are_undecided() -> None:
    before, after = {"micro_ap_normalized": 0.50}, {"micro_ap_normalized": 0.52}
    assert ablation.verdict(None, after, 0.01) == ""
    assert ablation.verdict(before, after, 0.009) == "+2.0"
    assert ablation.verdict(before, after, 0.011) == "undecided"
    assert "one seed" in ablation.verdict(before, after, None)


def test_the_pooled_deviation_of_the_repeated_runs() -> None:
    def runs(*values: float) -> dict[int, list[ablation.Figures]]:
        return {seed: [{"micro_ap_normalized": value}] for seed, value in enumerate(values)}

    measured = {"linear": runs(0.1, 0.2, 0.3), "entropy": runs(0.4, 0.4, 0.4), "mixup": runs(0.5)}
    assert ablation.seed_deviation(measured) == pytest.approx((0.01 / 2) ** 0.5)
    assert ablation.seed_deviation({"linear": runs(0.1)}) is None


def test_agreement_counts_queries_by_who_is_right() -> None:
    shares = ablation.agreement({"a", "b", "c"}, {"b", "d"}, 10)
    assert shares == {"both": 0.1, "first_only": 0.2, "second_only": 0.1, "neither": 0.6}


def test_first_is_right_uses_the_first_result_only(disc_like: Path) -> None:
    from accuracy.evaluation import Row
    from sscd_vec.metrics import evaluate
    from sscd_vec.predictions import GroundTruth, Predictions

    disc = read_disc(disc_like)
    (query, reference), (second, other) = sorted(disc.matches)[:2]
    predictions = Predictions(
        [query, query, second, second], [reference, other, other, reference], [0.9, 0.8, 0.1, 0.7]
    )
    truth = GroundTruth.from_pairs(sorted(disc.matches))
    row = Row("raw", 4, "none", evaluate(predictions, truth), predictions)
    assert ablation.first_is_right(row, disc) == [query]
