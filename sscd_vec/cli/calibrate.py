"""``sscd-vec calibrate``: the threshold for a false-match rate or a precision, or why not.

Images that are not copies of each other give a rate; pairs that people labelled give a precision,
and say which copies a threshold must still find.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from sscd_vec import plots
from sscd_vec.cli.console import (
    SOME_UNREADABLE,
    CacheOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    count,
    plain,
    say,
    warn,
)
from sscd_vec.cli.decisions import threshold_from
from sscd_vec.cli.descriptors import (
    ImageReader,
    Rows,
    holds_images,
    read_descriptors,
    read_halves,
    read_rows,
)
from sscd_vec.cli.normalize import encoder_of, failed, load_encoder, report
from sscd_vec.files import find_images, printable_path
from sscd_vec.normalize import Calibration, CalibrationError, Normalizer, calibrate
from sscd_vec.predictions import read_labels

if TYPE_CHECKING:
    from sscd_vec.files import ImageFile

WANTED_PRECISION = 0.95  # of a threshold from decisions, unless told otherwise
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


def calibrate_threshold(
    normalizer: Annotated[
        str, typer.Argument(help="A normalizer file, or a model's name or folder; only read.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the calibrated one goes.")],
    queries: OptionalDescriptors = None,
    references: OptionalDescriptors = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="CSV of judged pairs, query,reference,is_copy; or, with --precision, a .npy of "
            "0/1 per row."
        ),
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
    leave_out: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Leave so many of the highest pairs to you; by default those far above the rest.",
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the scores and the threshold.")] = None,
    pictures: Annotated[
        Path | None, typer.Option(help="Show the highest-scoring pairs, side by side, as a PNG.")
    ] = None,
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
    compared with itself. The images must not be copies of each other: the highest-scoring pairs
    are listed, and --pictures shows them, because they are mostly copies or shots of one scene.

    --labels names judged pairs. With --precision they give the threshold. With --false-match-rate
    a threshold that misses more than 5 % of their copies is refused, and pairs of copies among
    the images are left out. Names are paths inside --queries and --references, else beside the
    CSV file.

    --from-decisions takes a file saved by a report or by `sscd-vec decisions --out` and finds the
    threshold of dedup and compare, with its interval.

    Tiled scores (search --tiles, index --tiles) are calibrated for the crops they are used with:
    --tiles of the queries, --reference-tiles of the bank.

        sscd-vec calibrate sscd_lite0 -o mine --queries held/
            --false-match-rate 1e-3
        sscd-vec calibrate fitted -o done --labels pairs.csv --precision 0.95
        sscd-vec calibrate fitted -o done --queries held/ --false-match-rate 1e-3
            --kind tiled --tiles 2
        sscd-vec calibrate fitted -o done --from-decisions decisions.json
            --precision 0.95
    """
    images = ImageReader(partial(load_encoder, model, device), cache)
    crops = (tiles, reference_tiles) if kind == "tiled" else (1, 1)
    asked: Rows | None = None
    bank: Rows | None = None
    try:
        before = Normalizer.from_pretrained(normalizer)
        judged = None
        if labels is not None and labels.suffix.lower() == ".csv":
            judged = _read_pairs(labels, queries, references, images)
            before.check_encoder(images.encoder)
        made_by = encoder_of([p for p in (queries, references) if p is not None], images, None)
        if made_by is not None:
            before.check_encoder(made_by)
        if from_decisions is not None:
            result = threshold_from(from_decisions, before, precision or WANTED_PRECISION, force)
        elif judged is not None and precision is not None:
            result = calibrate(
                before, *judged.sides, judged.is_copy, precision=precision, kind=kind, force=force
            )
        else:
            groups = query_groups, reference_groups
            asked, bank = _read_sides(queries, references, groups, images, kind == "tiled", crops)
            result = calibrate(
                before,
                None if asked is None else asked.descriptors,
                None if bank is None else bank.descriptors,
                None if labels is None or judged is not None else np.load(labels),
                false_match_rate=false_match_rate,
                precision=precision,
                per=per,
                bank_size=bank_size,
                kind=kind,
                query_groups=None if asked is None else asked.groups,
                reference_groups=None if bank is None else bank.groups,
                related=None if judged is None else judged.copies_among(asked, bank),
                copies=None if judged is None else judged.copies,
                leave_out="auto" if leave_out is None else leave_out,
                force=force,
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
    except CalibrationError as error:
        _show_highest(error.calibration, asked, bank, pictures)
        raise failed(error) from error
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise failed(error) from error
    _show_highest(result, asked, bank, pictures)
    for warning in result.warnings:
        warn(f"warning: {warning}")
    if found.note:
        say(found.note)
    report(after, out, as_json)
    if images.list_unreadable():
        raise typer.Exit(SOME_UNREADABLE)


# ---------------------------------------------------------------------- what is read


@dataclass(frozen=True, eq=False)
class JudgedPairs:
    """Labelled pairs: descriptors row by row, labels, and the files if the images have any."""

    sides: tuple[NDArray[Any], NDArray[Any]]
    is_copy: NDArray[np.bool_]
    files: "tuple[list[ImageFile], list[ImageFile]] | None"

    @property
    def copies(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Descriptors of the copies, row by row; None without any."""
        if not self.is_copy.any():
            return None
        return self.sides[0][self.is_copy], self.sides[1][self.is_copy]

    def copies_among(self, queries: Rows | None, references: Rows | None) -> NDArray[np.int64]:
        """The copies that are also among images to calibrate on: ``(k, 2)`` places there."""
        if self.files is None or queries is None:
            return np.zeros((0, 2), np.int64)
        given = queries, queries if references is None else references
        places = [{file.id: place for place, file in enumerate(rows.files)} for rows in given]
        pairs = [
            (places[0][query.id], places[1][reference.id])
            for query, reference, is_copy in zip(*self.files, self.is_copy, strict=True)
            if is_copy and query.id in places[0] and reference.id in places[1]
        ]
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _read_pairs(
    path: Path, queries: Path | None, references: Path | None, images: ImageReader
) -> JudgedPairs:
    """The pairs of a CSV file: images by path, or rows of descriptor files by number."""
    labels = read_labels(path)
    names = labels.query_ids.tolist(), labels.reference_ids.tolist()
    places = queries, queries if references is None else references
    if all(place is not None and not holds_images(place) for place in places):
        rows = [
            np.asarray(read_descriptors(place))[_row_numbers(path, side)]
            for place, side in zip(places, names, strict=True)
            if place is not None
        ]
        return JudgedPairs((rows[0], rows[1]), labels.is_copy, None)
    files = [
        [_find(path, path.parent if place is None else place, name) for name in side]
        for place, side in zip(places, names, strict=True)
    ]
    different = list({file.id: file for side in files for file in side}.values())
    described = images.describe(different)
    known = {one.source.id: one.rows[0] for one in described}
    lost = [file.id for file in different if file.id not in known]
    if lost:
        raise ValueError(f"{path}: {lost[0]} cannot be read; take its lines out")
    sides = [np.stack([known[file.id] for file in side]) for side in files]
    return JudgedPairs((sides[0], sides[1]), labels.is_copy, (files[0], files[1]))


def _find(labels: Path, folder: Path, name: str) -> "ImageFile":
    place = folder / name
    if not place.is_file():
        raise ValueError(
            f"{labels}: expected {name} to be an image in {printable_path(folder)}; paths are "
            "relative to --queries and --references, else to the CSV file"
        )
    return find_images(place)[0]


def _row_numbers(labels: Path, names: Sequence[str]) -> list[int]:
    try:
        return [int(name) for name in names]
    except ValueError as error:
        raise ValueError(
            f"{labels}: expected row numbers of the descriptor files, got {error.args[0][-40:]}; "
            "give folders of images as --queries and --references to name files"
        ) from error


def _read_sides(
    queries: Path | None,
    references: Path | None,
    groups: tuple[Path | None, Path | None],
    images: ImageReader,
    tiled: bool,
    crops: tuple[int, int],
) -> tuple[Rows | None, Rows | None]:
    if tiled and queries is not None and references is None and holds_images(queries):
        first, second = read_halves(queries, images, *crops)
        return first, second
    first_side, second_side = (
        None if path is None else read_rows(path, images, tiles, group)
        for path, tiles, group in zip((queries, references), crops, groups, strict=True)
    )
    return first_side, second_side


def _layout(queries: Rows | None, references: Rows | None) -> str:
    """How many crops an image has, on either side, for the note of a tiled threshold."""
    sizes = [
        1
        if rows is None or rows.groups is None
        else np.unique(rows.groups, return_counts=True)[1].max()
        for rows in (queries, references)
    ]
    return f"crops per image: {sizes[0]} of a query, {sizes[1]} of a reference"


# ---------------------------------------------------------------------- what is shown

SHOWN = 10  # highest pairs listed; --pictures shows all that were kept


def _show_highest(
    found: Calibration, queries: Rows | None, references: Rows | None, pictures: Path | None
) -> None:
    """List the highest-scoring pairs of images that were taken for strangers, and draw them."""
    if not len(found.highest_pairs):
        return
    sides = [
        () if rows is None else rows.files
        for rows in (queries, queries if references is None else references)
    ]
    best: dict[frozenset[int] | tuple[int, int], tuple[int, int, float]] = {}
    for (first, second), score in zip(
        found.highest_pairs.tolist(), found.highest_scores.tolist(), strict=True
    ):
        pair = frozenset((first, second)) if references is None else (first, second)
        best.setdefault(pair, (first, second, score))  # one set: every pair comes twice
    pairs = list(best.values())
    warn("highest-scoring pairs, which should show nothing in common:")
    for first, second, score in pairs[:SHOWN]:
        names = [
            plain(files[row].id) if files else f"row {row}"
            for files, row in zip(sides, (first, second), strict=True)
        ]
        warn(f"  {score:.3f}  {names[0]}  {names[1]}")
    if pictures is None:
        return
    if not all(sides):
        warn(f"{pictures} was not drawn: descriptors have no pictures; give folders of images")
        return
    from sscd_vec.cli.pair_sheet import draw

    draw(
        [(sides[0][first], sides[1][second]) for first, second, _ in pairs],
        [f"{score:.3f}" for *_, score in pairs],
        pictures,
    )
    say(f"{count(len(pairs), 'pair')} shown in {pictures}")
