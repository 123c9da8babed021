"""What a run says about itself: figures of every step, a report page, a contact sheet."""

import base64
import html
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from sscd_vec.files import staging, write_whole, writing
from sscd_vec.plots import save, training_report
from sscd_vec.trainer.config import TrainConfig
from sscd_vec.trainer.validation import Score

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
SKIPPED = "skipped.txt"
VALIDATION = "validation.npz"  # the last validation's cosines and spectrum, for a resumed run

SHEET_COLUMNS = 4
SHEET_GAP = 6

Values: TypeAlias = npt.NDArray[np.float32]
Distributions: TypeAlias = tuple[Values, Values, Values]
Record: TypeAlias = Callable[[int, Mapping[str, Any]], None]

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Training run</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
img{{max-width:100%}} td{{padding:0 1rem 0 0}} .bad{{color:#a00;font-weight:bold}}</style>
<h1>Training run</h1>
{words}
{curves}
<h2>How to read it</h2>
<p>Copies (solid) should end far above the nearest other image (dashed), and the two histograms
should barely overlap. The spectrum of a healthy descriptor falls slowly. If it drops to zero, the
descriptor has collapsed into fewer dimensions; if it is flat and copies are not near, it is uniform
noise.</p>
<h2>Settings</h2>
<table>{settings}</table>
</html>
"""


@contextmanager
def journal(out: Path, from_step: int, writes: bool = True) -> Iterator[Record]:
    """Open ``out/metrics.jsonl``, one JSON object per line, and TensorBoard if it is installed.

    Lines of steps not taken yet are dropped: a resumed run writes them again.

    Args:
        out: The run's folder.
        from_step: The first step to come.
        writes: False on every rank but the first.

    Yields:
        A function that records the figures of a step.
    """
    if not writes:
        yield lambda step, figures: None
        return
    path = out / METRICS
    kept = [line for line in read_metrics(path) if line["step"] < from_step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
    with open(path, "a") as file, _tensorboard(out, from_step) as draw:

        def record(step: int, figures: Mapping[str, Any]) -> None:
            file.write(json.dumps({"step": step, **figures}) + "\n")
            file.flush()
            draw(step, figures)

        yield record


@contextmanager
def _tensorboard(out: Path, from_step: int) -> Iterator[Record]:
    if importlib.util.find_spec("tensorboard") is None:
        yield lambda step, figures: None
        return
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter(str(out / "tensorboard"), purge_step=from_step)

    def draw(step: int, figures: Mapping[str, Any]) -> None:
        for name, value in figures.items():
            if isinstance(value, int | float):
                board.add_scalar(name, value, step)

    try:
        yield draw
    finally:
        board.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read ``metrics.jsonl``; a last line cut short by a crash is left out."""
    file = Path(path)
    if not file.exists():
        return []
    lines = []
    for line in file.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def write_report(
    out: Path, config: TrainConfig, score: Score | None, skipped: Mapping[str, str] | None = None
) -> None:
    """Write ``report.html`` (self-contained) and ``report.png`` from ``metrics.jsonl``.

    Args:
        out: The run's folder.
        config: Its settings.
        score: The last validation, for histograms and spectrum; None takes the one of this run's
            previous report.
        skipped: Unreadable images and why, listed in a file of their own if there are any.
    """
    if skipped:
        lines = (f"{name}\t{reason}\n" for name, reason in sorted(skipped.items()))
        write_whole(out / SKIPPED, "".join(lines))
    metrics = read_metrics(out / METRICS)
    if not any("total" in line for line in metrics):
        return
    drawn = _draw(out / "report.png", metrics, _distributions(out / VALIDATION, score))
    embedded = base64.b64encode(drawn.read_bytes()).decode() if drawn else ""
    page = PAGE.format(
        words="".join(
            f'<p class="{kind}">{html.escape(text)}</p>' for kind, text in summary(metrics)
        ),
        curves=f'<img alt="curves" src="data:image/png;base64,{embedded}">' if embedded else "",
        settings="".join(
            f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
            for name, value in config.to_dict().items()
        ),
    )
    write_whole(out / "report.html", page)


def summary(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What the figures say, as (``"good"`` or ``"bad"``, sentence)."""
    last = [line for line in metrics if "total" in line][-1]
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
    if scores and initial and max(scores) <= initial[0]:
        said.append(("bad", "Training did not help: the weights written are those of the start."))
    if last.get("warning"):
        said.append(("bad", f"Now: {last['warning']}."))
    if last["skipped_steps"]:
        said.append(("bad", f"{last['skipped_steps']} steps skipped: gradients not finite."))
    return said


def write_preview(views: Tensor, path: Path) -> None:
    """Write a contact sheet of pairs: ``(2n, 3, h, w)``, all first views, then all second ones."""
    first, second = views.chunk(2)
    sheet = contact_sheet(torch.cat([first, second], dim=3))
    kind = Image.registered_extensions().get(path.suffix.lower(), "PNG")
    with staging(path) as staged:
        Image.fromarray(sheet).save(staged, format=kind)


def contact_sheet(pairs: Tensor) -> npt.NDArray[np.uint8]:
    """Lay out views ``(n, 3, h, w)`` in [0, 1] as one image, with white gaps."""
    images = (pairs * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    count, height, width, _ = images.shape
    rows = -(-count // SHEET_COLUMNS)
    shape = (rows * (height + SHEET_GAP), SHEET_COLUMNS * (width + SHEET_GAP), 3)
    sheet = np.full(shape, 255, dtype=np.uint8)
    for i, image in enumerate(images):
        top = i // SHEET_COLUMNS * (height + SHEET_GAP)
        left = i % SHEET_COLUMNS * (width + SHEET_GAP)
        sheet[top : top + height, left : left + width] = image
    return sheet[:-SHEET_GAP, :-SHEET_GAP]


def _distributions(path: Path, score: Score | None) -> Distributions | None:
    """Cosines of copies, of the nearest others, and the spectrum; saved in ``path``."""
    if score is None:
        if not path.exists():
            return None
        with np.load(path) as saved:
            return saved["copies"], saved["others"], saved["spectrum"]
    with writing(path) as file:
        np.savez(file, copies=score.copies, others=score.others, spectrum=score.spectrum)
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
