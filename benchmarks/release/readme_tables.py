"""Write the tables of README and docs from ``benchmarks/results/*.json``.

    python benchmarks release/readme_tables            # rewrite README.md and docs/*.md
    python benchmarks release/readme_tables --check    # say whether they agree, change nothing

A table stands between a line ``<!-- table:NAME -->`` and ``<!-- /table -->`` and is made from
``results/NAME.json``; ``<!-- table:NAME part.of.it -->`` takes a part of its figures, and
``columns=a;b`` only some columns or entries. A list of records becomes a table as it is, a record
one of names and values; records inside these get the names of both, lists are left out. An
evaluation shows all its rows; its part ``models`` each model's best.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results import BENCHMARKS, RESULTS

NAME = "release/readme_tables"
README = BENCHMARKS.parent / "README.md"
OPENING = (
    r"^<!-- table:(?P<name>[\w.-]+)(?: (?!columns=)(?P<part>\S+))?"
    r"(?: columns=(?P<columns>.+?))? -->"
)
BLOCK = re.compile(
    rf"({OPENING}\n)(?P<body>.*?)(?P<closing><!-- /table -->)", re.DOTALL | re.MULTILINE
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the tables of README and docs from results.")
    parser.add_argument("--check", action="store_true", help="only say whether they agree")
    parser.add_argument("--page", type=Path, nargs="+", default=pages(), help="all by default")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for page in options.page:
        old = page.read_text()
        new = rewritten(old, options.results)
        if new == old:
            continue
        if options.check:
            sys.exit(
                f"{page.name} differs from the results: run python benchmarks release/readme_tables"
            )
        partial = page.with_name(page.name + ".tmp")
        partial.write_text(new)
        os.replace(partial, page)
        print(f"{page.name}: rewritten")


def pages() -> list[Path]:
    """The pages of the project that hold tables."""
    every = [README, *sorted(README.parent.glob("docs/*.md"))]
    return [page for page in every if "\n<!-- table:" in page.read_text()]


def rewritten(text: str, folder: Path = RESULTS) -> str:
    """The text with every marked block made anew from the results.

    Raises:
        FileNotFoundError: If a block names results that are not there.
        ValueError: If a block is not closed, or its figures have no table form.
    """
    opened = [match["name"] for match in re.finditer(OPENING, text, re.MULTILINE)]
    closed = [match["name"] for match in BLOCK.finditer(text)]
    if opened != closed:
        unclosed = sorted(set(opened) - set(closed)) or opened
        raise ValueError(f"table {', '.join(unclosed)}: expected <!-- /table --> after it")

    def replace(match: re.Match[str]) -> str:
        columns = match["columns"].split(";") if match["columns"] else None
        body = table(match["name"], folder, match["part"], columns)
        return f"{match[1]}{body}\n{match['closing']}"

    return BLOCK.sub(replace, text)


def table(
    name: str, folder: Path = RESULTS, part: str | None = None, columns: Sequence[str] | None = None
) -> str:
    """One table in Markdown, with a line on where its figures come from.

    Args:
        name: File name of the results without its ending.
        folder: Where they are.
        part: Names that lead to a part of the figures, joined by dots.
        columns: Which columns, or entries of a single record, to show.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no results of that name; run the benchmark first")
    record = json.loads(path.read_text())
    figures = record["figures"]
    for key in part.split(".") if part else ():
        if not isinstance(figures, dict) or key not in figures:
            raise ValueError(f"{path}: no figures under {part!r}")
        figures = figures[key]
    form = next((make for fits, make in FORMS if fits(figures)), None)
    if form is None:
        raise ValueError(
            f"{path}: expected records, a record or an evaluation to make a table of, "
            f"got {type(figures).__name__}"
        )
    source = f"`{record['command']}`, {record['date']}, {record['machine']['cpu']}"
    return f"{form(figures, columns)}\n\n{source}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; numbers stand right, missing values are a dash."""
    numeric = [
        all(isinstance(row[i], int | float) or row[i] is None for row in rows)
        for i in range(len(columns))
    ]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [[str(column) for column in columns], rule]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _evaluation(models: Sequence[Mapping[str, Any]], best: bool) -> str:
    """Rows of ``disc.py``: all of them, or each model's best by µAP."""
    rows = []
    for model in models:
        shown = model["rows"]
        if best:
            shown = [max(shown, key=lambda row: float(row["micro_ap"]))]
        for row in shown:
            norm = "no" if row["score_norm"] == "none" else "yes"
            percents = [
                f"{100 * row[key]:.1f}"
                for key in ("micro_ap", "recall_at_p90", "accuracy_at_1", "mrr")
            ]
            rows.append(
                [_shown(model["model"]), f"{row['transform']} {row['dim']}d", norm, *percents]
            )
    columns = ["model", "descriptor", "score norm", "µAP", "recall@P90", "accuracy@1", "MRR"]
    lines = markdown(columns, rows).splitlines()
    lines[1] = "| --- | --- | --- | ---: | ---: | ---: | ---: |"
    return "\n".join(lines)


def _shown(model: str) -> str:
    """A model's name as a reader knows it: ``imagenet:TRUNK@gem_p=1,size=224`` in words."""
    name, _, settings = model.partition("@")
    own = dict(part.partition("=")[::2] for part in settings.split(",") if part)
    if not name.startswith("imagenet:"):
        return model
    pooling = {"1": "average"}.get(own.get("gem_p", ""), "GeM")
    size = f", {own['size']} px" if "size" in own else ""
    return f"{name.removeprefix('imagenet:')} of ImageNet, {pooling}{size}"


def _are_models(figures: object) -> bool:
    return isinstance(figures, list) and all(
        isinstance(model, dict) and "model" in model and "rows" in model for model in figures
    )


def _records(figures: Sequence[Mapping[str, Any]], columns: Sequence[str] | None) -> str:
    flat = [dict(_leaves(record)) for record in figures]
    present = list(dict.fromkeys(key for record in flat for key in record))
    chosen = _chosen(present, columns)
    rows = [[record.get(column) for column in chosen] for record in flat]
    return markdown([column.replace("_", " ") for column in chosen], rows)


def _record(figures: Mapping[str, Any], columns: Sequence[str] | None) -> str:
    entries = dict(_leaves(figures))
    chosen = _chosen(list(entries), columns)
    return markdown(["", "value"], [[key.replace("_", " "), entries[key]] for key in chosen])


def _leaves(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values; nested records by their joined names, lists left out."""
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{above}{key} ")
        elif not isinstance(value, list):
            yield f"{above}{key}", value


def _chosen(present: Sequence[str], columns: Sequence[str] | None) -> Sequence[str]:
    missing = [column for column in columns or () if column not in present]
    if missing:
        raise ValueError(f"no column {missing}: expected among {list(present)}")
    return columns or present


def _is_records(figures: object) -> bool:
    return (
        isinstance(figures, list)
        and bool(figures)
        and all(isinstance(record, dict) for record in figures)
    )


Form = Callable[[Any, Sequence[str] | None], str]
FORMS: Sequence[tuple[Callable[[Any], bool], Form]] = (
    (
        lambda figures: isinstance(figures, dict) and _are_models(figures.get("models")),
        lambda figures, _: _evaluation(figures["models"], best=False),
    ),
    (
        lambda figures: bool(figures) and _are_models(figures),
        lambda f, _: _evaluation(f, best=True),
    ),
    (_is_records, _records),
    (
        lambda figures: isinstance(figures, dict) and _is_records(figures.get("rows")),
        lambda figures, columns: _records(figures["rows"], columns),
    ),
    (lambda figures: isinstance(figures, dict) and bool(dict(_leaves(figures))), _record),
)


if __name__ == "__main__":
    main()
