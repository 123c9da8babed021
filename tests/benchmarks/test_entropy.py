import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from accuracy import entropy
from accuracy.dataset import DiscSet, Images, read_disc
from sscd_vec.encoder import Encoder
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import build_model


def test_distances_leave_the_match_out_of_the_nearest_non_matches() -> None:
    images = Images(("a", "b"), ("a", "b"))
    disc = DiscSet(images, images, images, frozenset({("a", "a")}))
    queries = np.array([[1, 0], [0, 1]], np.float32)
    references = np.array([[1, 0], [0, -1]], np.float32)
    matches, others = entropy.distances(queries, references, disc)
    assert matches.tolist() == [0.0]
    assert others.tolist() == pytest.approx([2**0.5, 2**0.5])  # a to b, b to a


def test_principal_values_of_a_known_spread() -> None:
    points = np.array([[3, 0], [-3, 0], [0, 1], [0, -1]], np.float32) + 5
    assert entropy.principal_values(points).tolist() == pytest.approx([4.5**0.5, 0.5**0.5])


def test_a_linear_classifier_learns_what_is_linear_and_not_the_rest() -> None:
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    linear, crossed = (x[:, 0] > 0).long(), (x[:, 0] * x[:, 1] > 0).long()
    fitted = entropy.fit_linear(x[:300], linear[:300], 2, 1e-3)
    assert entropy.accuracy(fitted, x[300:], linear[300:]) > 0.95
    fitted = entropy.fit_linear(x[:300], crossed[:300], 2, 1e-3)
    assert entropy.accuracy(fitted, x[300:], crossed[300:]) < 0.65


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 4)):
        for name, value in (("dark", 40), ("light", 200)):
            folder = tmp_path / "labelled" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(value - 30, value + 30, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "labelled"


def test_the_figures_of_a_run_are_written_and_drawn(
    disc_like: Path, labelled: Path, tmp_path: Path
) -> None:
    run = tmp_path / "work" / "linear-seed0"
    torch.manual_seed(0)
    config = EncoderConfig(trunk="resnet18_w16", dim=8, size=32, size_mode="square")
    Encoder(build_model(config)).save_pretrained(run)
    view = {"features": "projected", "gem_p": 3.0, "raw": 0.1, "micro_ap_normalized": 0.2}
    (run / "measured.json").write_text(json.dumps([view]))
    arguments = ["--work", str(tmp_path / "work"), "--disc", str(disc_like)]
    arguments += ["--labelled", str(labelled), "--name", "entropy", "--results", str(tmp_path)]
    entropy.main(arguments)
    (row,) = json.loads((tmp_path / "entropy.json").read_text())["figures"]["rows"]
    assert row["entropy weight"] == 0 and row["µAP with score norm"] == 0.2
    assert row["classes"] == 1.0  # brightness is all that differs
    assert sum(row["matches"]) == len(read_disc(disc_like).matches)
    for plot in ("weights", "distances", "principal_values"):
        assert (tmp_path / f"entropy_{plot}.svg").stat().st_size > 1000


def test_a_folder_without_measured_runs_is_refused(disc_like: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no measured run"):
        entropy.main(["--work", str(tmp_path), "--disc", str(disc_like)])
