"""``sscd-vec dedup``: show me the copies in this folder."""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sscd_vec.cli.console import (
    SOME_UNREADABLE,
    CacheOption,
    DeviceOption,
    Failure,
    JsonOption,
    ModelOption,
    NormalizerOption,
    ThresholdOption,
    count,
    descriptor_cache,
    list_unreadable,
    print_json,
    print_rows,
    say,
    unreadable_json,
    warn,
)
from sscd_vec.files import Unreadable, printable_path, write_whole

if TYPE_CHECKING:
    from sscd_vec.bank.duplicates import Copies, Copy
    from sscd_vec.bank.tidy import Tidied

COLUMNS = ("group", "path", "score", "keep", "bytes", "width", "height")


def dedup(
    images: Annotated[list[Path], typer.Argument(help="Folders, image files, tars.")],
    report: Annotated[
        Path | None, typer.Option("--report", help="Write one HTML file with all groups.")
    ] = None,
    table: Annotated[Path | None, typer.Option("--csv", help="Write a table here.")] = None,
    move_to: Annotated[
        Path | None, typer.Option("--move-to", help="Move all but the one to keep here.")
    ] = None,
    hardlink: Annotated[
        bool,
        typer.Option(
            "--hardlink", help="Replace byte-for-byte equal files by hard links to the one kept."
        ),
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply/--dry-run", help="Do it; the default only says what it would.")
    ] = False,
    heatmaps: Annotated[
        bool, typer.Option("--heatmaps/--no-heatmaps", help="Heatmaps in the report.")
    ] = True,
    threshold: ThresholdOption = None,
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Find groups of copies in folders, and the one of each to keep.

    Every pair of images is compared (symmetric score, kind "symmetric"), and groups are joined
    only where most of their members are copies of each other. Nothing is ever deleted: --move-to
    and --hardlink move or link files, and only with --apply.

        sscd-vec dedup ~/photos --report copies.html
        sscd-vec dedup ~/photos --move-to ~/copies --apply
    """
    from sscd_vec.bank import Bank
    from sscd_vec.bank.report import write_report

    _check_actions(images, move_to, hardlink)
    for target in (report, table):
        _check_writable(target)
    with Bank(
        model=model, normalizer=normalizer, device=device, cache=descriptor_cache(cache)
    ) as bank:
        added = bank.add(list(images), leave_out=move_to)
        found = bank.duplicates(threshold, heatmaps=heatmaps and report is not None)
        name = Path(bank.settings.model).name
    unreadable = [*added.unreadable, *found.unreadable]
    if report is not None:
        title = "Copies in " + ", ".join(printable_path(path.name or path) for path in images)
        write_report(report, found, unreadable=len(unreadable), model=name, title=title)
        say(f"report: {report}")
    if table is not None:
        _write_csv(table, found)
    tidied = _tidy(found, move_to, hardlink, apply)
    untouched = [Unreadable(path, reason) for path, reason in tidied.untouched]
    if as_json:
        print_json(_document(found, tidied, apply, unreadable, untouched))
    else:
        _print(found, tidied, apply)
        list_unreadable(unreadable)
        list_unreadable(untouched, "not moved" if move_to else "not linked")
    if unreadable or untouched:
        raise typer.Exit(SOME_UNREADABLE)


def _check_actions(images: list[Path], move_to: Path | None, hardlink: bool) -> None:
    if move_to is None:
        return
    if hardlink:
        raise Failure("choose one of --move-to and --hardlink")
    if move_to.resolve() in [path.resolve() for path in images]:
        raise Failure(
            f"--move-to {printable_path(move_to)} is searched itself; choose another folder"
        )


def _check_writable(target: Path | None) -> None:
    """Find out before the work whether its result can be written."""
    if target is None:
        return
    if target.is_dir():
        raise Failure(f"{printable_path(target)} is a folder; name a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    probe = target.with_name(f".{target.name}.probe")
    probe.touch()
    probe.unlink()


def _tidy(found: "Copies", move_to: Path | None, hardlink: bool, apply: bool) -> "Tidied":
    from sscd_vec.bank.tidy import Tidied, link_copies, move_copies

    if move_to is not None:
        return move_copies(found.groups, move_to, apply=apply)
    if hardlink:
        return link_copies(found.groups, apply=apply)
    return Tidied([], [])


def _row(copy: "Copy", keep: bool) -> dict[str, Any]:
    file, inspected = copy.image.file, copy.inspected
    return {
        "path": copy.image.id,
        "score": None if keep else round(copy.score, 5),
        "keep": keep,
        "bytes": None if file is None else file.size,
        "width": inspected and inspected.width,
        "height": inspected and inspected.height,
    }


def _groups(found: "Copies") -> list[list[dict[str, Any]]]:
    return [[_row(copy, copy is group.keep) for copy in group.members] for group in found.groups]


def _write_csv(target: Path, found: "Copies") -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for number, members in enumerate(_groups(found), 1):
        for row in members:
            score = "" if row["score"] is None else f"{row['score']:.4f}"
            cells = row | {"group": number, "score": score, "keep": int(row["keep"])}
            writer.writerow([cells[name] for name in COLUMNS])
    write_whole(target, text.getvalue())


def _document(
    found: "Copies",
    tidied: "Tidied",
    apply: bool,
    unreadable: list[Unreadable],
    untouched: list[Unreadable],
) -> dict[str, Any]:
    return {
        "scanned": found.scanned,
        "threshold": found.threshold,
        "pairs": found.pairs,
        "groups": [
            {
                "members": members,
                "related": [{"path": i, "score": round(s, 5)} for i, s in group.related],
            }
            for members, group in zip(_groups(found), found.groups, strict=True)
        ],
        "dry_run": not apply,
        "actions": [
            {action.verb: printable_path(action.path), "to": printable_path(action.to)}
            for action in tidied.actions
        ],
        "untouched": unreadable_json(untouched),
        "unreadable": unreadable_json(unreadable),
    }


def _print(found: "Copies", tidied: "Tidied", apply: bool) -> None:
    rows = [
        (
            str(number),
            "keep" if row["keep"] else "copy",
            "" if row["score"] is None else f"{row['score']:.4f}",
            row["path"],
        )
        for number, members in enumerate(_groups(found), 1)
        for row in members
    ]
    copies = count(sum(len(group.copies) for group in found.groups), "copy", "copies")
    title = (
        f"{count(found.scanned, 'image')}: {copies} in {count(len(found.groups), 'group')} "
        f"(score ≥ {found.threshold:.3f})"
    )
    print_rows(["group", "", "score", "path"], rows, title=title)
    for action in tidied.actions:
        would = "" if apply else "would "
        say(f"{would}{action.verb} {printable_path(action.path)} → {printable_path(action.to)}")
    if tidied.actions:
        files = count(len(tidied.actions), "file")
        done = {"move": "moved", "link": "linked"}[tidied.actions[0].verb]
        if apply:
            say(f"{files} {done}.")
        else:
            warn(f"{files} would be {done}; nothing was touched. Add --apply to do it.")
