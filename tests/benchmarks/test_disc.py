import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

import disc
from accuracy.dataset import Images, Shards, describe, edits_of_queries, read_disc
from accuracy.evaluation import (
    Row,
    Transform,
    dimension_sweep,
    evaluate_transform,
    standard_transforms,
    without_unfit,
)
from sscd_vec.normalize import Normalizer, ScoreNorm
from sscd_vec.normalize.whitening import Mode
from sscd_vec.predictions import read_predictions
from tests.benchmarks.tiny_pictures import TinyPictures, TinyRecipe


@pytest.fixture(scope="module")
def shards(disc_like: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Shards]:
    data, folder = read_disc(disc_like), tmp_path_factory.mktemp("shards")
    return {
        split: describe(getattr(data, split), TinyPictures(), folder / split, shard_rows=4)
        for split in ("queries", "references", "training")
    }


def rows_of(
    transform: Transform, disc_like: Path, shards: dict[str, Shards], k: int | None = 10
) -> tuple[Row, Row]:
    data = read_disc(disc_like)
    plain, normalized = evaluate_transform(
        transform,
        data,
        shards["queries"],
        shards["references"],
        shards["training"],
        score_norm=ScoreNorm(),
        k=k,
        best=10**6,
    )
    return plain, normalized


@pytest.mark.parametrize(
    ("name", "mode", "eps"),
    [
        ("raw", None, 0),
        ("centred", "centre", 0),
        ("whitened", "whiten", 0),
        ("whitened", "whiten", 0.3),
    ],
)
def test_scores_are_those_of_the_normalizer(
    name: str, mode: Mode | None, eps: float, disc_like: Path, shards: dict[str, Shards]
) -> None:
    data = read_disc(disc_like)
    z = {split: part.array() for split, part in shards.items()}
    dim = None if name == "raw" else 6
    plain, normalized = rows_of(Transform(name, dim, shrinkage=eps), disc_like, shards, k=None)
    for row, norm in ((plain, None), (normalized, ScoreNorm())):
        fitted = Normalizer.fit(z["training"], whitening=mode, dim=dim, eps=eps, score_norm=norm)
        expected = fitted.scores(z["queries"], z["references"])
        assert len(row.predictions) == expected.size
        q = [data.queries.ids.index(query) for query in row.predictions.query_ids]
        r = [data.references.ids.index(reference) for reference in row.predictions.reference_ids]
        np.testing.assert_allclose(row.predictions.scores, expected[q, r], atol=2e-5)


def test_metrics_agree_with_an_independent_calculation_on_the_predictions_file(
    disc_like: Path, tmp_path: Path, encoder_folder: Path
) -> None:
    """The file is split by hand and judged by scikit-learn and by counting."""
    file = tmp_path / "predictions.csv"
    arguments = ["--disc", str(disc_like), "--model", str(encoder_folder), "--cache", str(tmp_path)]
    arguments += ["--predictions", str(file), "--name", "disc", "--reduced", "4", "--k", "3"]
    arguments += ["--results", str(tmp_path)]
    disc.main(arguments)
    figures = json.loads((tmp_path / "disc.json").read_text())["figures"]
    rows = figures["models"][0]["rows"]
    best = max(rows, key=lambda row: float(row["micro_ap"]))
    lines = [line.split(",") for line in file.read_text().splitlines()[1:]]
    truth = read_disc(disc_like).matches
    hit = np.array([(query, reference) in truth for query, reference, _ in lines])
    score = np.array([float(value) for _, _, value in lines])
    assert len(set(score)) == len(score), "ties would make the two definitions differ"
    # scikit-learn's recall counts the true pairs in the list; ours all true pairs.
    expected = average_precision_score(hit, score) * hit.sum() / len(truth)
    assert best["micro_ap"] == pytest.approx(expected, abs=1e-9)
    order = np.argsort(-score)
    precision = np.cumsum(hit[order]) / np.arange(1, len(hit) + 1)
    recall = np.cumsum(hit[order]) / len(truth)
    good = recall[precision >= 0.9]
    assert best["recall_at_p90"] == pytest.approx(good.max() if len(good) else 0)
    first: dict[str, tuple[float, bool]] = {}
    for (query, _, _), value, right in zip(lines, score, hit, strict=True):
        first[query] = max(first.get(query, (-np.inf, False)), (value, bool(right)))
    matched = {query for query, _ in truth}
    assert best["accuracy_at_1"] == pytest.approx(np.mean([first[q][1] for q in matched]))
    np.testing.assert_allclose(read_predictions(file).scores, score)


def test_edits_of_the_best_row_worst_first(disc_like: Path, shards: dict[str, Shards]) -> None:
    data, edits = read_disc(disc_like), edits_of_queries(disc_like)
    rows = list(rows_of(Transform("raw"), disc_like, shards))
    table = disc.edits_table(data, disc.Judged("tiny", rows), edits)
    singles = [row for row in table if not str(row["edit"]).endswith("at a time")]
    matched = {query for query, _ in data.matches}
    for row in singles:
        assert row["pairs"] == sum(row["edit"] in edits[query] for query in matched)
    assert sum(int(str(row["pairs"])) for row in table[len(singles) :]) == len(matched)
    recalls = [float(str(row["recall@P90"])) for row in singles]
    assert recalls == sorted(recalls) and 0 <= recalls[0] <= recalls[-1] <= 100
    assert disc.edits_table(data, disc.Judged("tiny", rows), {}) == []


def test_transforms_of_the_paper() -> None:
    assert [(t.name, t.dim) for t in standard_transforms(512)] == [
        ("raw", None), ("centred", None), ("whitened", None), ("centred", 256), ("whitened", 256),
    ]  # fmt: skip
    assert [t.dim for t in standard_transforms(128)] == [None, None, None]
    assert [t.label for t in standard_transforms(128, shrinkages=[0.1, 0.85])[2:]] == [
        "whitened", "whitened, shrunk by 0.1", "whitened, shrunk by 0.85",
    ]  # fmt: skip
    assert [t.dim for t in dimension_sweep(512)] == [512, 384, 256, 128, 64]


def test_a_small_training_split_falls_back_to_the_shipped_whitening() -> None:
    wanted = standard_transforms(512, shrinkages=[0.3])
    shipped = Normalizer.from_pretrained().whitening
    assert without_unfit(wanted, 5120, 512, shipped) == wanted
    few = without_unfit(wanted, 300, 512, shipped)
    assert [(t.label, t.dim) for t in few] == [
        ("raw", None), ("centred", None), ("whitened, shrunk by 0.3", None), ("centred", 256),
        ("whitened", 256), ("whitened as shipped", None),
    ]  # fmt: skip
    assert few[-1].fit([]) is shipped
    # Badly fitted is still shown; only what cannot be fitted is left out.
    assert [t.label for t in without_unfit(wanted, 600, 512, None)] == [t.label for t in wanted]


def test_a_run_on_few_training_images_ends_with_figures(
    disc_like: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few"
    shutil.copytree(disc_like, few)
    for path in sorted((few / "training").iterdir())[5:]:
        path.unlink()
    disc.main(
        ["--disc", str(few), "--model", "sscd_lite0", "--cache", str(tmp_path / "cache"),
         "--name", "few", "--results", str(tmp_path)]
    )  # fmt: skip
    assert "5 training images are few for 512 dimensions" in capsys.readouterr().out
    rows = json.loads((tmp_path / "few.json").read_text())["figures"]["models"][0]["rows"]
    assert {row["transform"] for row in rows} == {"raw", "centred", "whitened as shipped"}


def test_descriptors_are_computed_once_and_continue_after_an_interruption(
    photo_folder: Path, tmp_path: Path
) -> None:
    paths = tuple(str(path) for path in sorted(photo_folder.iterdir())[:10])
    images = Images(tuple(map(str, range(10))), paths)
    describe(Images(images.ids[:8], paths[:8]), TinyPictures(), tmp_path, shard_rows=4)
    TinyPictures.described.clear()
    shards = describe(images, TinyPictures(), tmp_path, shard_rows=4)
    assert TinyPictures.described == list(paths[8:])
    np.testing.assert_array_equal(shards.array(), TinyPictures()(paths))
    assert [len(block) for block in shards.blocks(5)] == [8, 2]


def test_parts_make_a_whole(photo_folder: Path, tmp_path: Path) -> None:
    paths = tuple(str(path) for path in sorted(photo_folder.iterdir())[:10])
    images = Images(tuple(map(str, range(10))), paths)
    with pytest.raises(FileNotFoundError, match="1 of 3 shards are missing"):
        describe(images, TinyPictures(), tmp_path, part=(0, 2), shard_rows=4)
    whole = describe(images, TinyPictures(), tmp_path, part=(1, 2), shard_rows=4)
    np.testing.assert_array_equal(whole.array(), TinyPictures()(paths))


def test_processes_share_the_shards(photo_folder: Path, tmp_path: Path) -> None:
    paths = tuple(str(path) for path in sorted(photo_folder.iterdir())[:10])
    images = Images(tuple(map(str, range(10))), paths)
    TinyPictures.described.clear()
    shards = describe(
        images, TinyPictures(), tmp_path, recipe=TinyRecipe(), processes=2, shard_rows=4
    )
    assert TinyPictures.described == []  # all of it was done elsewhere
    np.testing.assert_array_equal(shards.array(), TinyPictures()(paths))


def test_the_paper_row_of_a_released_model_is_shown() -> None:
    assert any("61.5" in line and "72.5" in line for line in disc.paper_lines("sscd_disc_mixup"))
    assert any("72.43" in line for line in disc.paper_lines("sscd_disc_mixup.torchvision.pt"))
    assert any("Multigrain" in line for line in disc.paper_lines("mine"))


def test_part_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        disc.main(["--disc", "x", "--model", "y", "--part", "4/4"])
    assert "0 <= i < n" in capsys.readouterr().err
