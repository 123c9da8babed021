"""``sscd-vec overlap``: how many images of A are copies of images of B?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sscd_vec.cli.console import (
    SOME_UNREADABLE,
    CollectionOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    NormalizerOption,
    StateOption,
    ThresholdOption,
    TokenOption,
    TrustOption,
    count,
    list_unreadable,
    open_bank,
    print_json,
    print_rows,
    say,
    unreadable_json,
    warn,
    warn_of_nothing,
)
from sscd_vec.files import printable_path

if TYPE_CHECKING:
    from sscd_vec.bank import Bank
    from sscd_vec.bank.overlap import Overlap

LISTED = 20  # images named on a terminal


def overlap(
    first: Annotated[Path, typer.Argument(metavar="A", help="Images, or Parquet of descriptors.")],
    second: Annotated[
        str, typer.Argument(metavar="B", help="Images, Parquet of descriptors, or a bank.")
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Folder for best.parquet and pairs.parquet."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Write one HTML file with the strongest.")
    ] = None,
    threshold: ThresholdOption = None,
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    collection: CollectionOption = None,
    state: StateOption = None,
    milvus_token: TokenOption = None,
    trust: TrustOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how many images of A have a copy in B, and which: test set in training set, for example.

    Every image of A is searched for in B (kind "search"). best.parquet has each image of A with
    its best match and score, pairs.parquet every pair above the threshold. The share of A that is
    in B comes with its 95 % interval.

        sscd-vec overlap test/ train/ --report overlap.html
        sscd-vec overlap generated.parquet descriptors/ --to overlap/
        sscd-vec overlap uploads/ bank.faiss --json
    """
    from sscd_vec.bank.overlap import find_overlap, report_copies
    from sscd_vec.bank.report import write_report

    options = {"collection": collection, "state": state, "token": milvus_token, "trust": trust}
    with _bank(second, {"model": model, "normalizer": normalizer, "device": device}, options) as b:
        found = find_overlap([first], b, threshold, to=to)
        if report is not None:
            title = f"Images of {printable_path(first.name)} in {printable_path(Path(second).name)}"
            copies, name = report_copies(b, found), Path(b.settings.model).name
            write_report(report, copies, unreadable=len(found.unreadable), model=name, title=title)
            say(f"report: {report}")
    if as_json:
        print_json(_document(found))
    else:
        _print(found, first)
        list_unreadable(found.unreadable)
    if found.unreadable:
        raise typer.Exit(SOME_UNREADABLE)


def _bank(place: str, common: dict[str, Any], options: dict[str, Any]) -> "Bank":
    """The bank of that name, or one in memory of the images or descriptors there."""
    from sscd_vec.bank import Bank
    from sscd_vec.bank.location import Location

    path = Path(place)
    named_like_a_bank = path.suffix in (".faiss", ".index", ".db")
    if path.exists() and not (named_like_a_bank and Location.parse(place).exists):
        bank = Bank(**common)
        list_unreadable(bank.add([path]).unreadable, "of B could not be read")
        return bank
    return open_bank(place, **common, **options)


def _document(found: "Overlap") -> dict[str, Any]:
    return {
        "images": found.images,
        "copies": found.copies,
        "share": found.share,
        "interval": found.interval,
        "pairs": found.pairs,
        "references": found.references,
        "threshold": found.threshold,
        "complete": found.complete,
        "strongest": [
            {"image": one.image.id, "match": one.copies[0][0], "score": round(one.copies[0][1], 5)}
            for one in found.strongest
        ],
        "unreadable": unreadable_json(found.unreadable),
    }


def _print(found: "Overlap", place: Path) -> None:
    rows = [(one.image.id, *one.copies[0]) for one in found.strongest[:LISTED]]
    print_rows(["image", "match", "score"], rows, title="the strongest")
    if found.share is None or found.interval is None:
        if not found.unreadable:
            warn_of_nothing([place])
        return
    low, high = found.interval
    warn(
        f"{found.copies:,} of {count(found.images, 'image')} have a copy among "
        f"{found.references:,}: {found.share:.2%} (95 % interval {low:.2%} to {high:.2%}; "
        f"score ≥ {found.threshold:.3f}, {count(found.pairs, 'pair')})"
    )
