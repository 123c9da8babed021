"""``report.html`` and ``report.png``: a run at a glance, collapse included."""

import base64
import html
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from sscd_vec.plots import save, training_report
from sscd_vec.trainer.checkpoint import write_atomically
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.journal import METRICS, read_metrics
from sscd_vec.trainer.validation import Score

log = logging.getLogger(__name__)

VALIDATION = "validation.npz"  # the last validation's cosines and spectrum, for a resumed run

Values: TypeAlias = npt.NDArray[np.float32]
Distributions: TypeAlias = tuple[Values, Values, Values]

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Training run</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
img{{max-width:100%}} td{{padding:0 1rem 0 0}} .bad{{color:#a00;font-weight:bold}}</style>
<h1>Training run</h1>
{words}
{picture}
<h2>How to read it</h2>
<p>Copies (solid) should end far above the nearest other image (dashed). Both histograms should
barely overlap. The spectrum of a healthy descriptor falls slowly; one that drops to zero has
collapsed into fewer dimensions, one that is flat while copies are not near is uniform noise.</p>
<h2>Settings</h2>
<table>{settings}</table>
</html>
"""


def write_report(out: Path, config: TrainConfig, score: Score | None) -> None:
    """Write ``report.html`` (self-contained) and ``report.png`` from ``metrics.jsonl``.

    Args:
        out: The run's folder.
        config: Its settings.
        score: The last validation, for histograms and spectrum; None takes the one that an
            earlier report of this run showed.
    """
    metrics = read_metrics(out / METRICS)
    if not any("total" in line for line in metrics):
        return
    picture = _draw(out / "report.png", metrics, _distributions(out / VALIDATION, score))
    embedded = base64.b64encode(picture.read_bytes()).decode() if picture else ""
    page = PAGE.format(
        words="".join(
            f'<p class="{kind}">{html.escape(text)}</p>' for kind, text in summary(metrics)
        ),
        picture=f'<img alt="curves" src="data:image/png;base64,{embedded}">' if embedded else "",
        settings="".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in config.to_dict().items()
        ),
    )
    write_atomically(out / "report.html", lambda partial: partial.write_text(page))


def summary(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the figures say, as (``"good"`` or ``"bad"``, sentence)."""
    steps = [line for line in metrics if "total" in line]
    last = steps[-1]
    said = [
        (
            "good",
            f"{last['step'] + 1} steps. Copies have cosine {last['positive_similarity']:.3f}, "
            f"the nearest other image {last['negative_similarity']:.3f}.",
        )
    ]
    scores = [line["micro_ap"] for line in metrics if "micro_ap" in line]
    initial = [line["initial_micro_ap"] for line in metrics if "initial_micro_ap" in line]
    if scores:
        began = f", from {100 * initial[0]:.1f} before training" if initial else ""
        said.append(("good", f"µAP {100 * scores[-1]:.1f}, best {100 * max(scores):.1f}{began}."))
    if last.get("warning"):
        said.append(("bad", f"Now: {last['warning']}."))
    if last["skipped_steps"]:
        said.append(("bad", f"{last['skipped_steps']} steps skipped: gradients not finite."))
    return said


def _distributions(path: Path, score: Score | None) -> Distributions | None:
    """Cosines of copies, of the nearest others, and the spectrum: kept in ``path``."""
    if score is None:
        if not path.exists():
            return None
        with np.load(path) as saved:
            return saved["copies"], saved["others"], saved["spectrum"]

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:
            np.savez(file, copies=score.copies, others=score.others, spectrum=score.spectrum)

    write_atomically(path, write)
    return score.copies, score.others, score.spectrum


def _draw(
    path: Path, metrics: Sequence[Mapping[str, Any]], shown: Distributions | None
) -> Path | None:
    """Draw the curves, if matplotlib is installed."""
    try:
        save(training_report(metrics, shown), path)
    except ImportError:
        log.warning("no curves in the report: pip install 'sscd-vec[train]' brings matplotlib")
        return None
    return path
