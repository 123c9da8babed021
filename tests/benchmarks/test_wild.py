import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import results
from accuracy import make_wild, wild
from accuracy.dataset import read_disc
from accuracy.families import SEEN, UNSEEN
from accuracy.make_wild import EDITS
from sscd_vec.trainer.augment.colour import FILTERS
from sscd_vec.trainer.augment.compose import compose
from sscd_vec.trainer.augment.distort import DISTORTIONS
from tests.benchmarks.conftest import jpeg, synthetic_photo


@pytest.fixture(scope="module")
def wild_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two queries of every family, one of them without a match, among 40 references."""
    folder = tmp_path_factory.mktemp("images")
    for seed in range(80):
        (folder / f"{seed:03d}.jpg").write_bytes(jpeg(synthetic_photo(seed)))
    out = tmp_path_factory.mktemp("wild") / "set"
    sizes = ["--references", "40", "--backgrounds", "4", "--matched", "1", "--unmatched", "1"]
    training = ["--training", str(folder), "--training-images", "20"]
    make_wild.main([str(folder), str(out), *sizes, *training])
    return out


def test_at_least_eight_families_are_held_out_of_training() -> None:
    assert len(UNSEEN) >= 8 and not set(SEEN) & set(UNSEEN)
    assert tuple(EDITS) == SEEN + UNSEEN
    trained = {edit.__name__ for edit in (*FILTERS, *DISTORTIONS, compose)}
    assert not trained & set(UNSEEN)


@pytest.mark.parametrize("family", EDITS)
def test_an_edit_changes_the_image_and_follows_its_seed(family: str) -> None:
    image = synthetic_photo(3)

    def edited(seed: int) -> Image.Image:
        return EDITS[family](image, np.random.default_rng(seed), lambda: synthetic_photo(4))

    first = edited(1)
    assert first.mode == "RGB" and min(first.size) >= 16
    assert first.tobytes() == edited(1).tobytes()
    assert image.tobytes() == synthetic_photo(3).tobytes(), "the source is left alone"
    assert first.size != image.size or first.tobytes() != image.tobytes()


def test_a_set_has_every_family_with_and_without_a_match(wild_set: Path) -> None:
    disc = read_disc(wild_set)
    families = wild.read_families(wild_set)
    assert len(disc.references) == 40 and len(disc.training) == 20
    assert len(disc.queries) == 2 * len(EDITS) == len(families)
    matched = [families[query] for query, _ in disc.matches]
    assert sorted(matched) == sorted(EDITS)
    lines = (wild_set / "query_edits.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    names = [[edit["name"] for edit in record["edits"]] for record in records]
    assert {len(edits) for edits in names} == {1, 2}
    assert all(record["family"] in edits for record, edits in zip(records, names, strict=True))


def test_no_source_is_used_twice(wild_set: Path) -> None:
    references = [reference for _, reference in read_disc(wild_set).matches]
    assert len(set(references)) == len(references)


def test_too_few_images_are_refused(wild_set: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="there are 40"):
        make_wild.main([str(wild_set / "references"), str(tmp_path), "--training", str(wild_set)])


def test_measuring_writes_both_columns_and_every_family(
    wild_set: Path, encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    monkeypatch.setattr(results.write, "__defaults__", (tmp_path,))
    sizes = ["--scales", "32", "48", "--cache", str(tmp_path / "cache")]
    for _ in range(2):  # the second time from the cache
        wild.main([str(wild_set), "--model", str(encoder_folder), *sizes, "--name", "w"])
    figures = json.loads((tmp_path / "w.json").read_text())["figures"]
    assert {"32", "48", "32+48"} <= set(figures)
    both = figures["32+48"]
    assert both["seen"]["pairs"] == len(SEEN) and both["unseen"]["pairs"] == len(UNSEEN)
    assert list(both["families"]) == list(EDITS)
    assert both["families"]["flip"]["recall@50"] == 100, "there are only 40 references"


def test_recalls_by_hand() -> None:
    best = np.array([[4, 1, 2], [3, 0, 1]])
    found = wild.recalls(best, np.array([4, 1]))
    assert found == {"pairs": 2, "recall@1": 50.0, "recall@10": 100.0, "recall@50": 100.0}
