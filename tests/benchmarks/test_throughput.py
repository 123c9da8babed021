import json
from pathlib import Path

import numpy as np
import pytest

from speed import throughput
from sscd_vec.normalize import Normalizer


def test_every_stage_is_measured_against_the_paper_code(
    disc_like: Path, encoder_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(throughput, "BACKGROUND", 200)
    monkeypatch.setattr(throughput, "QUERIES", 10)
    throughput.run(
        str(encoder_folder),
        disc_like,
        "speed",
        images=8,
        sizes=(50,),
        rounds=2,
        backends=("torch",),
        folder=tmp_path,
    )
    rows = json.loads((tmp_path / "speed.json").read_text())["figures"]["rows"]
    stages = {row["stage"] for row in rows}
    assert stages == {"decode", "encode", "normalize", "search", "add", "end to end"}
    assert {row["ratio"] for row in rows if row["candidate"] == throughput.PAPER} == {1.0}
    assert all(row["per_second"] > 0 and row["ratio"] > 0 for row in rows)
    assert {r["candidate"] for r in rows if r["stage"] == "search"} == {
        "paper code",
        "ours, FAISS",
        "ours, Milvus Lite",
    }
    assert (tmp_path / "speed.svg").read_text().rstrip().endswith("</svg>")


def test_the_paper_code_and_ours_give_the_same_scores() -> None:
    """Otherwise their speeds could not be compared."""
    rng = np.random.default_rng(0)
    background, references, queries = (throughput._unit_rows(n, 8, rng) for n in (300, 40, 9))
    paper, ours = throughput.PaperSearch(background), Normalizer.fit(background)
    expected = paper.queries(queries) @ paper.references(references).T
    np.testing.assert_allclose(ours.scores(queries, references), expected, atol=1e-4)
