"""``sscd-vec normalize fit``, ``normalize table`` and ``calibrate``: descriptors in, one file out.

``fit`` and ``calibrate`` take folders of images too, which are encoded first.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from sscd_vec import plots
from sscd_vec.cli.console import (
    FAILED,
    SOME_UNREADABLE,
    CacheOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    print_json,
    print_rows,
    say,
    warn,
)
from sscd_vec.cli.decisions import threshold_from
from sscd_vec.cli.descriptors import (
    ImageReader,
    Rows,
    batches,
    holds_images,
    read_descriptors,
    read_halves,
    read_rows,
)
from sscd_vec.metrics import micro_average_precision
from sscd_vec.normalize import (
    Kind,
    Normalizer,
    ScoreNorm,
    calibrate,
    nearest_neighbours,
    nearest_similarities,
)
from sscd_vec.predictions import GroundTruth, Predictions, read_ground_truth
from sscd_vec.shards import DescriptorFiles, holds_descriptors

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.encoder import Encoder

WANTED_PRECISION = 0.95  # of a threshold from decisions, unless told otherwise
DescriptorFile = Annotated[Path, typer.Option(help="Descriptors: .npy, .safetensors, .parquet.")]
OptionalDescriptors = Annotated[
    Path | None,
    typer.Option(help="Descriptors (.npy, .safetensors, .parquet), or a folder of images."),
]
OptionalGroups = Annotated[
    Path | None,
    typer.Option(help="With --kind tiled and a descriptor file: .npy with the image of each row."),
]
Tiles = Annotated[
    int, typer.Option(min=1, max=4, help="With --kind tiled and images: crops per side.")
]


def fit(
    background: Annotated[
        list[Path],
        typer.Argument(help="Descriptors of background images, or folders of such images."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The normalizer file to write.")],
    whitening: Annotated[
        Literal["whiten", "centre", "none"], typer.Option(help="The paper's is whiten.")
    ] = "whiten",
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
    images = ImageReader(partial(_load, model, device), cache)
    try:
        normalizer = Normalizer.fit(
            batches(background, images),
            whitening=None if whitening == "none" else whitening,
            dim=dim,
            eps="oas" if shrink else 0.0,
            l2_before=l2_before,
            score_norm=None if score_norm == "none" else ScoreNorm.parse(score_norm),
            encoder=_encoder_of(background, images, encoder),
            keep_background="float16" if half else "float32",
            background_size=background_size,
        )
        normalizer.save(out)
    except (OSError, ValueError, TypeError) as error:
        raise _failed(error) from error
    _report(normalizer, out, as_json)
    if images.list_unreadable():
        raise typer.Exit(SOME_UNREADABLE)


def calibrate_threshold(
    normalizer: Annotated[Path, typer.Argument(help="The normalizer file; read.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the calibrated one goes.")],
    queries: OptionalDescriptors = None,
    references: OptionalDescriptors = None,
    labels: Annotated[
        Path | None, typer.Option(help=".npy of 0/1 per row: with --precision.")
    ] = None,
    from_decisions: Annotated[
        Path | None,
        typer.Option(
            "--from-decisions", help="What you decided in a report: with --precision, symmetric."
        ),
    ] = None,
    false_match_rate: Annotated[float | None, typer.Option(help="Such as 0.001.")] = None,
    precision: Annotated[float | None, typer.Option(help="Such as 0.9.")] = None,
    per: Annotated[
        Literal["query", "comparison"], typer.Option(help="What the rate counts.")
    ] = "query",
    bank_size: Annotated[int | None, typer.Option(help="References in the bank in use.")] = None,
    kind: Annotated[
        Literal["search", "symmetric", "tiled"],
        typer.Option(help="Which score: search, symmetric for dedup and compare, tiled."),
    ] = "search",
    tiles: Tiles = 2,
    reference_tiles: Tiles = 1,
    query_groups: OptionalGroups = None,
    reference_groups: OptionalGroups = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the scores and the threshold.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Store a threshold that would be refused.")
    ] = False,
    model: ModelOption = None,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Find the threshold for a false-match rate or a precision, and store it.

    Without --queries the normalizer's own background is split and used; one folder of images is
    split into queries and references. The images must not be copies of each other. With
    --precision, row i of queries, references and labels is one labelled candidate pair.

    --from-decisions takes a file saved by a report or by `sscd-vec decisions --out` and finds the
    threshold of dedup and compare, with its interval.

    Tiled scores (search --tiles, index --tiles) are calibrated for the crops they are used with:
    --tiles of the queries, --reference-tiles of the bank.

        sscd-vec calibrate fitted -o done --queries held/ --false-match-rate 1e-3
        sscd-vec calibrate fitted -o done --queries held/ --false-match-rate 1e-3
            --kind tiled --tiles 2
        sscd-vec calibrate fitted -o done --from-decisions decisions.json --precision 0.95
    """
    chosen: Kind = kind
    images = ImageReader(partial(_load, model, device), cache)
    crops = (tiles, reference_tiles) if kind == "tiled" else (1, 1)
    try:
        before = Normalizer.load(normalizer)
        given = [path for path in (queries, references) if path is not None]
        made_by = _encoder_of(given, images, None)
        if made_by is not None:
            before.check_encoder(made_by)
        sides: list[Rows | None] = [None, None]
        if kind == "tiled" and queries is not None and holds_images(queries) and references is None:
            sides = [*read_halves(queries, images, *crops)]
        else:
            for side, (path, groups) in enumerate(
                ((queries, query_groups), (references, reference_groups))
            ):
                if path is not None:
                    sides[side] = read_rows(path, images, crops[side], groups)
        asked, bank = sides
        result = (
            threshold_from(from_decisions, before, precision or WANTED_PRECISION)
            if from_decisions is not None
            else calibrate(
                before,
                None if asked is None else asked.descriptors,
                None if bank is None else bank.descriptors,
                None if labels is None else np.load(labels),
                false_match_rate=false_match_rate,
                precision=precision,
                per=per,
                bank_size=bank_size,
                kind=chosen,
                query_groups=None if asked is None else asked.groups,
                reference_groups=None if bank is None else bank.groups,
                force=force,
            )
        )
        found = result.threshold
        if kind == "tiled":
            found = replace(found, note="; ".join(filter(None, (found.note, _layout(asked, bank)))))
        after = before.with_calibration(replace(result, threshold=found))
        after.save(out)
        if plot is not None:
            figure = plots.score_histogram(
                result.nonmatch_scores,
                result.match_scores,
                result.threshold.value,
                result.threshold.interval,
                str(result.threshold),
            )
            plots.save(figure, plot)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise _failed(error) from error
    for warning in result.warnings:
        warn(f"warning: {warning}")
    if found.note:
        say(found.note)
    _report(after, out, as_json)
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
        raise _failed(error) from error
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


def _load(model: str | None, device: str | None) -> "Encoder":
    from sscd_vec.encoder import Encoder

    return Encoder.from_pretrained(model, device=device)


def _encoder_of(
    paths: Sequence[Path], images: ImageReader, given: str | None
) -> "str | ImageEncoder | None":
    """Who made these descriptors: the model of folders of images, or what Parquet files say."""
    if any(map(holds_images, paths)):
        return images.encoder
    files = [path for path in paths if holds_descriptors(path)]
    return (files and DescriptorFiles(files, encoder=given).encoder) or given


def _layout(queries: Rows | None, references: Rows | None) -> str:
    """How many crops an image has, on either side, for the note of a tiled threshold."""
    sizes = [
        1
        if rows is None or rows.groups is None
        else np.unique(rows.groups, return_counts=True)[1].max()
        for rows in (queries, references)
    ]
    return f"crops per image: {sizes[0]} of a query, {sizes[1]} of a reference"


def _ids(path: Path | None, count: int) -> list[str]:
    if path is None:
        return [str(row) for row in range(count)]
    names = path.read_text(encoding="utf-8").splitlines()
    if len(names) != count:
        raise ValueError(f"{path}: expected {count} ids, one per descriptor, got {len(names)}")
    return names


def _report(normalizer: Normalizer, path: Path, as_json: bool) -> None:
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


def _failed(error: Exception) -> typer.Exit:
    """Say what went wrong in this command's words: the library's arguments are options here."""
    text = re.sub(r"\bdim=(\d+)", r"--dim \1", str(error)).replace("eps='oas'", "--shrink")
    warn(f"error: {text}")
    return typer.Exit(FAILED)
