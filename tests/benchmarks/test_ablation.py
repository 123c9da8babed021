import json
from pathlib import Path

import pytest

from accuracy import ablation
from accuracy.ablation_table import TABLE, TRAININGS, train_config
from accuracy.dataset import read_disc
from sscd_vec.trainer import TrainConfig

SMALL = {"trunk": "resnet18", "init_from": "", "frozen_stages": 0, "size": 32, "stored_size": 40}
SMALL |= {"inference_size": 32, "batch": 6, "steps": 2, "dim": 6, "learning_rate": 1e-3}
SMALL |= {"decoded": "memory"}


def overrides() -> list[str]:
    return [part for name, value in SMALL.items() for part in ("--set", f"{name}={value}")]


def test_rows_are_trained_measured_and_never_repeated(
    disc_like: Path, photo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    arguments = ["--photos", str(photo_folder), "--work", str(work)]
    arguments += ["--disc", str(disc_like), "--choose", str(disc_like)]
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
    views = json.loads((work / "linear-seed0" / "measured.json").read_text())
    (measured,) = [
        view for view in views if (view["features"], view["gem_p"]) == ("projected", 3.0)
    ]
    assert set(measured["all"]["report"]) >= {"raw", "centred", "whitened"}
    assert measured["raw"] == measured["all"]["report"]["raw"][0]
    assert measured["micro_ap_normalized"] == measured["all"]["report"][measured["transform"]][1]
    logs = sorted(path.name for path in (tmp_path / "ablation").iterdir())
    assert logs == ["linear-seed0.jsonl", "linear-seed1.jsonl", "simclr-seed0.jsonl"]

    def never(*_: object) -> None:
        raise AssertionError("a finished row was trained again")

    monkeypatch.setattr(ablation, "train", never)
    ablation.main(arguments)


def test_a_run_that_is_too_long_says_how_many_steps_fit(photo_folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lines = [json.dumps({"step": step, "seconds": 30.0}) for step in range(4)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = train_config("scratch", "simclr", 0, SMALL)
    with pytest.raises(ablation.TooLong, match="--set steps=2"):
        ablation.train(config, [photo_folder], run, minutes=1)


@pytest.mark.parametrize(
    ("start", "trunk"), [("scratch", "resnet18_w32"), ("imagenet", "efficientnet_lite0")]
)
def test_every_table_row_has_a_run_and_a_valid_configuration(start: str, trunk: str) -> None:
    def config(training: str, seed: int = 0) -> TrainConfig:
        return train_config(start, training, seed, {})

    assert {row.training for row in TABLE} == set(TRAININGS)
    for training in TRAININGS:
        assert config(training, 1).seed == 1 and config(training).trunk == trunk
    assert config("length_0.5").steps * 2 == config("advanced").steps
    plain, twice = config("advanced"), config("batch_2.0")
    assert (twice.batch, twice.steps) == (2 * plain.batch, plain.steps // 2)  # as many epochs
    assert config("mixup").augmentations == "advanced+mixup"
    assert config("linear").entropy_weight == 0
    assert config("linear").train_gem_p == 1 and config("linear_gem").train_gem_p == 3


def test_no_row_projects_to_more_dimensions_than_its_trunk_has() -> None:
    assert train_config("scratch", "dim_1024", 0, {}).dim == 256
    assert train_config("imagenet", "dim_1024", 0, {}).dim == 1024


def test_a_difference_is_decided_at_two_deviations_of_a_difference() -> None:
    before, after = {"micro_ap_normalized": 0.50}, {"micro_ap_normalized": 0.53}
    assert ablation.verdict(None, after, 0.01) == ""
    assert ablation.verdict(before, after, 0.0105) == "+3.0"  # 2√2 σ = 0.0297
    assert ablation.verdict(before, after, 0.0107) == "undecided"  # 0.0303
    assert "one seed" in ablation.verdict(before, after, None)


def test_post_processing_is_chosen_by_its_score_on_the_choosing_set() -> None:
    choose = {"raw": (0.5, 0.2), "centred": (0.1, 0.4), "whitened": (0.2, 0.3)}
    choose |= {ablation.SMALL: (0.9, 0.9)}  # a column of its own, never the chosen one
    assert ablation.choose_transform(choose, choose) == "centred"
    assert ablation.choose_transform(choose, {"raw", "whitened", ablation.SMALL}) == "whitened"


def test_the_pooled_deviation_of_the_repeated_runs() -> None:
    def runs(*values: float) -> dict[int, list[ablation.Figures]]:
        trunk = {"features": "trunk", "gem_p": 3.0, "micro_ap_normalized": 0.9}
        projected = {"features": "projected", "gem_p": 3.0}
        return {
            seed: [{**projected, "micro_ap_normalized": value}, trunk]
            for seed, value in enumerate(values)
        }

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
