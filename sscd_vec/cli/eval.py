"""``sscd-vec eval``: how good is this model on labelled copies?"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sscd_vec.cli.console import (
    FAILED,
    CacheOption,
    DeviceOption,
    Failure,
    JsonOption,
    ModelOption,
    NormalizerOption,
    print_json,
    print_rows,
    say,
    warn,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.normalize import Normalizer
    from sscd_vec.predictions import GroundTruth, Predictions


def evaluate(
    truth: Annotated[
        Path, typer.Argument(help="CSV with columns query_id,reference_id (empty: no match).")
    ],
    predictions: Annotated[
        Path | None,
        typer.Option("--predictions", help="CSV with columns query_id,reference_id,score."),
    ] = None,
    queries: Annotated[
        Path | None, typer.Option("--queries", help="Folder of query images; ids are file names.")
    ] = None,
    references: Annotated[
        Path | None, typer.Option("--references", help="Folder of reference images.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Candidates per query.")] = 10,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the predictions here, as CSV.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Write the normalizer with the threshold of --precision."),
    ] = None,
    precision: Annotated[
        float, typer.Option(min=0, max=1, help="Of the threshold that --store puts in.")
    ] = 0.9,
    force: Annotated[
        bool, typer.Option("--force", help="Store a threshold that would be refused.")
    ] = False,
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Measure copy detection: µAP, recall at 90 % precision with its threshold, accuracy@1, MRR.

    Either on predictions you have, or on folders of images, which are encoded and searched
    exhaustively. Files named R000123.jpg have the id R000123. A truth file that lists queries
    without a match lists all that count: candidates of other queries are left out.

    --store chooses the lowest threshold with the wanted precision on these candidates and writes
    the normalizer with it, for search, serve and Bank. Too few candidates are refused. With
    --predictions say which --normalizer made the scores.

        sscd-vec eval truth.csv --predictions mine.csv
        sscd-vec eval truth.csv --queries queries/ --references references/
        sscd-vec eval truth.csv --queries queries/ --references references/
            --store mine.safetensors --precision 0.95
    """
    from sscd_vec.metrics import evaluate as measure
    from sscd_vec.normalize import Normalizer as Rules
    from sscd_vec.predictions import read_ground_truth, read_predictions, write_predictions

    known = read_ground_truth(truth)
    rules = None
    if predictions is not None:
        if store is not None and normalizer is None:
            raise Failure("--store with --predictions: say which --normalizer made the scores")
        candidates = read_predictions(predictions)
    elif queries is not None and references is not None:
        candidates, rules = _search(queries, references, k, model, normalizer, device, cache)
    else:
        raise Failure("give --predictions FILE, or --queries FOLDER and --references FOLDER")
    if write is not None:
        write_predictions(write, candidates)
    counting = known.counting(candidates)
    left_out = len(set(candidates.query_ids)) - len(set(counting.query_ids))
    if known.judged is not None and len(candidates) and not len(counting):
        raise Failure(
            f"{truth} lists none of the queries: it has ids such as {known.judged[0]}, the "
            f"candidates such as {candidates.query_ids[0]}"
        )
    if left_out:
        warn(f"{truth} does not list {left_out:,} of the queries: they do not count")
    summary = asdict(measure(counting, known)) | {"queries_left_out": left_out}
    if as_json:
        print_json(summary)
    else:
        print_rows(["figure", "value"], [(name, value) for name, value in summary.items()])
    if store is not None:
        if rules is None:
            rules = Rules.from_pretrained(normalizer)
        _store(store, rules, counting, known, precision, force)


def _store(
    path: Path,
    rules: "Normalizer",
    candidates: "Predictions",
    truth: "GroundTruth",
    precision: float,
    force: bool,
) -> None:
    """Write the normalizer with the threshold of a precision on these candidates."""
    from sscd_vec.normalize import CalibrationError, precision_threshold
    from sscd_vec.normalize.calibration.precision import trusted

    ids = candidates.query_ids.tolist(), candidates.reference_ids.tolist()
    true = set(zip(truth.query_ids.tolist(), truth.reference_ids.tolist(), strict=True))
    is_copy = [pair in true for pair in zip(*ids, strict=True)]
    try:
        found = precision_threshold(candidates.scores, is_copy, precision, query_ids=ids[0])
        found = trusted(found, rules.largest_score, force)
    except CalibrationError as error:
        warn(f"error: {error}; nothing was stored")
        raise typer.Exit(FAILED) from error
    rules.with_calibration(found).save(path)
    for warning in found.warnings:
        warn(f"warning: {warning}")
    say(f"{found.threshold}; {found.threshold.note}")
    say(f"stored in {path}: give it to search and serve as --normalizer")


def _search(
    queries: Path,
    references: Path,
    k: int,
    model: str | None,
    normalizer: str | None,
    device: str | None,
    cache: bool,
) -> "tuple[Predictions, Normalizer]":
    import numpy as np

    from sscd_vec.adapters.faiss import FaissIndex
    from sscd_vec.bank.setup import Setup
    from sscd_vec.predictions import Predictions

    setup = Setup.without_bank(model, normalizer, device=device)
    index = FaissIndex(setup.normalizer)
    index.add(*_describe(setup.encoder, references, cache))
    asked, rows = _describe(setup.encoder, queries, cache)
    matches = index.search(rows, k=k)
    names = np.array(asked)[matches.queries]
    return Predictions(names, matches.ids.astype(str), matches.scores), setup.normalizer


def _describe(
    encoder: "ImageEncoder", folder: Path, cache: bool
) -> tuple[list[str], "NDArray[np.float32]"]:
    import numpy as np

    from sscd_vec.cli.descriptors import ImageReader

    reader = ImageReader(lambda: encoder, cache)
    files = reader.find(folder)
    described = reader.describe(files)
    ids = [one.source.file.path.stem for one in described if one.source.file is not None]
    reader.list_unreadable()
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise Failure(f"{folder}: two files have the id {twice}; ids are file names without ending")
    if not ids:
        raise Failure(f"{folder}: no image could be read")
    return ids, np.concatenate([one.descriptors for one in described if one.reason == ""])
