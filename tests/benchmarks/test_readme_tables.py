import json
from pathlib import Path

import pytest

from release import readme_tables

RECORD = {"command": "python benchmarks/x.py", "date": "2026-01-02", "machine": {"cpu": "some CPU"}}


def put(folder: Path, name: str, figures: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**RECORD, "figures": figures}))


@pytest.mark.parametrize("page", readme_tables.pages(), ids=lambda page: page.name)
def test_every_page_agrees_with_the_results(page: Path) -> None:
    text = page.read_text()
    assert readme_tables.rewritten(text) == text, "run python benchmarks release/readme_tables"


def test_blocks_are_rewritten_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, "speed", [{"what": "decode", "ratio": 2.345}, {"what": "add", "ratio": 1}])
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- table:speed -->\nold\n<!-- /table -->\nafter\n")
    with pytest.raises(SystemExit, match="differs"):
        readme_tables.main(["--check", "--page", str(readme), "--results", str(tmp_path)])
    readme_tables.main(["--page", str(readme), "--results", str(tmp_path)])
    assert readme.read_text() == (
        "before\n<!-- table:speed -->\n"
        "| what | ratio |\n| --- | ---: |\n| decode | 2.35 |\n| add | 1 |\n\n"
        "`python benchmarks/x.py`, 2026-01-02, some CPU\n"
        "<!-- /table -->\nafter\n"
    )
    readme_tables.main(["--check", "--page", str(readme), "--results", str(tmp_path)])


def test_an_evaluation_is_shown_in_percent(tmp_path: Path) -> None:
    row = {"transform": "whitened", "dim": 512, "score_norm": "1.0[0,2]", "micro_ap": 0.7243}
    row |= {"recall_at_p90": 0.631, "accuracy_at_1": 0.782, "mrr": 0.8}
    worse = row | {"transform": "raw", "micro_ap": 0.6}
    put(tmp_path, "disc", {"models": [{"model": "ours", "rows": [worse, row]}]})
    best = "| ours | whitened 512d | yes | 72.4 | 63.1 | 78.2 | 80.0 |"
    everything = readme_tables.table("disc", tmp_path)
    assert best in everything and "raw 512d" in everything
    only = readme_tables.table("disc", tmp_path, "models")
    assert best in only and "raw 512d" not in only


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run the benchmark first"):
        readme_tables.rewritten("<!-- table:gone -->\n<!-- /table -->", tmp_path)
    with pytest.raises(ValueError, match="/table"):
        readme_tables.rewritten("<!-- table:open -->\n", tmp_path)
    put(tmp_path, "odd", {"a": {"b": 1}, "many": [1, 2]})
    with pytest.raises(ValueError, match="got list"):
        readme_tables.table("odd", tmp_path, "many")
    with pytest.raises(ValueError, match="no figures under 'a.c'"):
        readme_tables.table("odd", tmp_path, "a.c")
    with pytest.raises(ValueError, match="no column"):
        readme_tables.table("odd", tmp_path, None, ["b"])


def test_a_part_and_some_columns_can_be_chosen(tmp_path: Path) -> None:
    put(tmp_path, "load", {"requests": 349, "latency_ms": {"p50": 7.5, "p99": 90.0}, "raw": [1, 2]})
    text = "<!-- table:load latency_ms -->\n<!-- /table -->"
    assert "| p50 | 7.5 |\n| p99 | 90 |" in readme_tables.rewritten(text, tmp_path)
    text = "<!-- table:load columns=latency_ms p99;requests -->\n<!-- /table -->"
    assert "| latency ms p99 | 90 |\n| requests | 349 |" in readme_tables.rewritten(text, tmp_path)
    once = readme_tables.rewritten(text, tmp_path)
    assert readme_tables.rewritten(once, tmp_path) == once


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "imagenet:resnet50@gem_p=1,size=224,size_mode=square",
            "resnet50 of ImageNet, average, 224 px",
        ),
        ("imagenet:resnet50", "resnet50 of ImageNet, GeM"),
        ("me@work", "me@work"),
    ],
)
def test_models_are_named_in_words(model: str, words: str) -> None:
    assert readme_tables._shown(model) == words
