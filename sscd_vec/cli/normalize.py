"""``sscd-vec normalize fit`` and ``normalize table``: descriptors in, one file or table out.

``fit`` takes folders of images too, which are encoded first.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from sscd_vec.cli.console import (
    FAILED,
    SOME_UNREADABLE,
    CacheOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    print_json,
    print_rows,
    warn,
)
from sscd_vec.cli.descriptors import (
    ImageReader,
    batches,
    holds_images,
    read_descriptors,
)
from sscd_vec.metrics import micro_average_precision
from sscd_vec.normalize import (
    Normalizer,
    ScoreNorm,
    nearest_neighbours,
    nearest_similarities,
)
from sscd_vec.predictions import GroundTruth, Predictions, read_ground_truth
from sscd_vec.shards import DescriptorFiles, holds_descriptors

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.encoder import Encoder

DescriptorFile = Annotated[Path, typer.Option(help="Descriptors: .npy, .safetensors, .parquet.")]


def fit(
    background: Annotated[
        list[Path],
        typer.Argument(help="Descriptors of background images, or folders of such images."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The normalizer file to write.")],
    whitening: Annotated[
        Literal["auto", "whiten", "centre", "none"],
        typer.Option(help="auto whitens, but keeps the model's own whitening for few images."),
    ] = "auto",
    dim: Annotated[int | None, typer.Option(help="Keep this many dimensions.")] = None,
    score_norm: Annotated[
        str, typer.Option(help="Beta and neighbours (counted from 0), or none.")
    ] = "1.0[0,2]",
    shrink: Annotated[bool, typer.Option(help="Shrink variances: for small backgrounds.")] = False,
    l2_before: Annotated[bool, typer.Option(help="L2-normalize first: trunk features.")] = False,
    half: Annotated[bool, typer.Option("--half", help="Keep the background in 16 bits.")] = False,
    background_size: Annotated[
        int | None, typer.Option(help="Keep a sample of this many rows for the bias.")
    ] = None,
    encoder: Annotated[str | None, typer.Option(help="Fingerprint of the encoder.")] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Fit whitening and score normalization on images like yours that are not among yours.

    A few thousand images are enough. Thresholds are found afterwards, with `sscd-vec calibrate`.

        sscd-vec normalize fit ~/other-photos --out normalizer.safetensors
        sscd-vec normalize fit background.npy --out normalizer.safetensors
    """
    images = ImageReader(partial(load_encoder, model, device), cache)
    try:
        normalizer = Normalizer.fit(
            batches(background, images),
            whitening=None if whitening == "none" else whitening,
            dim=dim,
            eps="oas" if shrink else 0.0,
            l2_before=l2_before,
            score_norm=None if score_norm == "none" else ScoreNorm.parse(score_norm),
            encoder=encoder_of(background, images, encoder),
            keep_background="float16" if half else "float32",
            background_size=background_size,
        )
        normalizer.save(out)
    except (OSError, ValueError, TypeError) as error:
        raise failed(error) from error
    report(normalizer, out, as_json)
    if images.list_unreadable():
        raise typer.Exit(SOME_UNREADABLE)


@dataclass(frozen=True)
class TableRow:
    """One setting of score normalization and what it gives.

    Attributes:
        beta: Weight.
        n: First neighbour, counted from 1.
        n_end: Last neighbour.
        micro_ap: µAP with this setting.
    """

    beta: float
    n: int
    n_end: int
    micro_ap: float


# The paper's three columns: a single neighbour, an average of the first, and the weight.
PAPER_SETTINGS: tuple[ScoreNorm, ...] = (
    *(ScoreNorm(1.0, n, n) for n in range(1, 6)),
    *(ScoreNorm(1.0, 1, n_end) for n_end in range(2, 6)),
    *(ScoreNorm(beta, 1, 3) for beta in (0.0, 0.5, 0.75, 1.25, 1.5)),
)


def table(
    queries: DescriptorFile,
    references: DescriptorFile,
    background: Annotated[list[Path], typer.Option(help="Descriptors; give it several times.")],
    truth: Annotated[Path, typer.Option(help="CSV with columns query_id,reference_id.")],
    query_ids: Annotated[
        Path | None, typer.Option(help="One id per line; row numbers otherwise.")
    ] = None,
    reference_ids: Annotated[
        Path | None, typer.Option(help="One id per line; row numbers otherwise.")
    ] = None,
    whitening: Annotated[
        Literal["whiten", "centre", "none"], typer.Option(help="The paper's is whiten.")
    ] = "whiten",
    k: Annotated[int, typer.Option("-k", help="Candidates per query.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """The paper's table of beta, n and n_end against µAP, on any descriptors.

    Whitening and bias are fitted on the background.

        sscd-vec normalize table --queries q.npy --references r.npy
            --background b.npy --truth truth.csv
    """
    try:
        z_queries, z_references = read_descriptors(queries), read_descriptors(references)
        rows = score_norm_table(
            z_queries,
            z_references,
            np.concatenate([read_descriptors(path) for path in background]),
            read_ground_truth(truth),
            _ids(query_ids, len(z_queries)),
            _ids(reference_ids, len(z_references)),
            whitening=None if whitening == "none" else whitening,
            k=k,
        )
    except (OSError, ValueError, TypeError) as error:
        raise failed(error) from error
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        columns = ("beta", "n", "n_end", "µAP")
        print_rows(columns, [(r.beta, r.n, r.n_end, r.micro_ap) for r in rows])


def score_norm_table(
    queries: NDArray[Any],
    references: NDArray[Any],
    background: NDArray[Any],
    truth: GroundTruth,
    query_ids: Sequence[object],
    reference_ids: Sequence[object],
    *,
    whitening: Literal["whiten", "centre"] | None = "whiten",
    k: int = 10,
    settings: Sequence[ScoreNorm] = PAPER_SETTINGS,
) -> list[TableRow]:
    """µAP for each setting. A bias reorders no query's results, so one search serves them all."""
    normalizer = Normalizer.fit(background, whitening=whitening, score_norm=None)
    whitened = normalizer.whiten(queries)
    similarities, rows = nearest_neighbours(
        whitened, normalizer.whiten(references), min(k, len(references))
    )
    deepest = max(norm.n_end for norm in settings)
    nearest = nearest_similarities(whitened, normalizer.whiten(background), deepest)
    width = rows.shape[1]
    names = np.repeat(np.asarray(query_ids), width), np.asarray(reference_ids)[rows.ravel()]
    found = []
    for norm in settings:
        scores = similarities - norm.bias_from_neighbours(nearest)[:, None]
        micro_ap = micro_average_precision(Predictions(*names, scores.ravel()), truth)
        found.append(TableRow(norm.beta, norm.n, norm.n_end, micro_ap))
    return found


def load_encoder(model: str | None, device: str | None) -> "Encoder":
    """The model that folders of images are encoded with."""
    from sscd_vec.encoder import Encoder

    return Encoder.from_pretrained(model, device=device)


def encoder_of(
    paths: Sequence[Path], images: ImageReader, given: str | None
) -> "str | ImageEncoder | None":
    """Who made these descriptors: the model of folders of images, or what Parquet files say."""
    if any(map(holds_images, paths)):
        return images.encoder
    files = [path for path in paths if holds_descriptors(path)]
    return (files and DescriptorFiles(files, encoder=given).encoder) or given


def _ids(path: Path | None, count: int) -> list[str]:
    if path is None:
        return [str(row) for row in range(count)]
    names = path.read_text(encoding="utf-8").splitlines()
    if len(names) != count:
        raise ValueError(f"{path}: expected {count} ids, one per descriptor, got {len(names)}")
    return names


def report(normalizer: Normalizer, path: Path, as_json: bool) -> None:
    """Print what was written."""
    facts: dict[str, object] = {
        "file": str(path),
        "dim_in": normalizer.dim_in,
        "dim": normalizer.dim,
        "score_norm": None if normalizer.score_norm is None else str(normalizer.score_norm),
        "background": 0 if normalizer.background is None else len(normalizer.background),
        "encoder": normalizer.encoder,
        "reference_fingerprint": normalizer.reference_fingerprint,
        "query_fingerprint": normalizer.query_fingerprint,
    }
    if as_json:
        print_json(facts | {"thresholds": [t.to_dict() for t in normalizer.thresholds.values()]})
        return
    stored = [(f"threshold ({kind})", str(t)) for kind, t in normalizer.thresholds.items()]
    print_rows(("", ""), [*facts.items(), *stored])


def failed(error: Exception) -> typer.Exit:
    """Say what went wrong in this command's words: the library's arguments are options here."""
    text = re.sub(r"\bdim=(\d+)", r"--dim \1", str(error)).replace("eps='oas'", "--shrink")
    warn(f"error: {text}")
    return typer.Exit(FAILED)
