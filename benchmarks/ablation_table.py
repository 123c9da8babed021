"""The ablations as text and as a plot."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt  # noqa: E402 - the backend comes first


def text(figures: Mapping[str, Any]) -> str:
    """All tables, µAP in percent, with the paper's figures beside ours."""
    lines = []
    table = ""
    for row in figures["rows"]:
        if row["table"] != table:
            table = row["table"]
            heads = f"{'µAP':>7}{'µAP SN':>8}{'256d':>7}{'acc@1':>7}{'MRR':>7}"
            lines += ["", f"{table:28}{heads}  {'change':18}paper"]
        values = [row[key] for key in ("micro_ap", "micro_ap_normalized", "micro_ap_256")]
        values += [row["accuracy_at_1"], row["mrr"]]
        widths = (7, 8, 7, 7, 7)
        numbers = "".join(
            f"{'–':>{w}}" if v is None else f"{100 * v:{w}.1f}"
            for v, w in zip(values, widths, strict=True)
        )
        figure = row["paper_micro_ap_normalized"]
        paper = "" if figure is None else f"{row['paper_micro_ap']} / {figure}"
        lines.append(f"{row['label']:28}{numbers}  {row['change']:18}{paper}")
    deviation = figures["seed_deviation"]
    if deviation is not None:
        lines += ["", f"standard deviation over seeds: {100 * deviation:.2f} µAP points"]
    if figures["agreement"]:
        parts = figures["agreement"]
        shares = (
            f"{key} {100 * parts[key]:.1f} %" for key in parts if key not in ("first", "second")
        )
        lines.append(
            f"first result right, {parts['first']} and {parts['second']}: {', '.join(shares)}"
        )
    return "\n".join(lines)


def records(figures: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The same tables as records by name, in percent, for the pages that show them."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in figures["rows"]:
        tables.setdefault(row["table"], []).append(
            {
                "row": row["label"],
                "µAP": _percent(row["micro_ap"]),
                "with score norm": _percent(row["micro_ap_normalized"]),
                "accuracy@1": _percent(row["accuracy_at_1"]),
                "runs": row["seeds"],
                "change": row["change"],
                "paper µAP": row["paper_micro_ap"],
                "paper with score norm": row["paper_micro_ap_normalized"],
            }
        )
    return tables


def _percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """µAP of the stepwise rows, ours and the paper's, with two standard deviations."""
    rows = [row for row in figures["rows"] if row["table"] == "steps"]
    labels = [row["label"] for row in rows]
    figure, axis = plt.subplots(figsize=(8, 0.8 + 0.4 * len(rows)), layout="constrained")
    places = list(range(len(rows)))
    error = 200 * (figures["seed_deviation"] or 0)
    ours = [100 * row["micro_ap_normalized"] for row in rows]
    axis.barh(places, ours, 0.6, xerr=error or None, label="here, µAP with score norm")
    paper = [row["paper_micro_ap_normalized"] for row in rows]
    axis.plot(paper, places, "D", color="0.2", label="paper, DISC2021")
    axis.set_yticks(places, labels)
    axis.invert_yaxis()
    axis.set_xlabel("µAP, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)
