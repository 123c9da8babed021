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
    VerifyOption,
    count,
    descriptor_cache,
    list_unreadable,
    print_json,
    print_rows,
    say,
    unreadable_json,
    warn,
    warn_of_nothing,
)
from sscd_vec.files import Unreadable, printable_path, write_whole

if TYPE_CHECKING:
    from sscd_vec.bank.results import Copies, Copy, CopyGroup
    from sscd_vec.bank.tidy import Tidied

COLUMNS = (
    "group",
    "path",
    "score",
    "keep",
    "sure",
    "verdict",
    "reason",
    "bytes",
    "width",
    "height",
)


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
    prefer: Annotated[
        str | None,
        typer.Option(
            "--prefer",
            help="What to keep where the evidence does not decide: largest, oldest, format:heic or "
            "path:GLOB. Without it such groups are left alone.",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            "--against", help="Also compare with these images, which are never moved or linked."
        ),
    ] = None,
    decisions: Annotated[
        Path | None,
        typer.Option("--decisions", help="Respect what you decided in a report: its saved file."),
    ] = None,
    heatmaps: Annotated[
        bool, typer.Option("--heatmaps/--no-heatmaps", help="Heatmaps in the report.")
    ] = True,
    verify: VerifyOption = False,
    threshold: ThresholdOption = None,
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Find groups of copies in folders, and the original of each to keep.

    Every pair of images is compared (symmetric score, kind "symmetric"); more than 50 000 images
    are compared with lists of neighbours, and a sample says which share of the copies that finds.
    Groups are joined only where most of their members are copies of each other. Where it cannot
    tell which one is the original, the group is marked unsure and left alone, unless --prefer
    decides. Documents, screenshots and graphics that look alike to the model, and whose pixels
    differ, are listed apart as unsure too. Nothing is ever deleted: --move-to and --hardlink move
    or link copies, and only with --apply.

    With --verify geometry decides about pairs near the threshold, and says which copy is a part of
    the one to keep; the report outlines what was copied.

        sscd-vec dedup ~/photos --report copies.html
        sscd-vec dedup ~/photos --move-to ~/copies --apply
        sscd-vec dedup ~/inbox --against ~/photos --move-to ~/known --apply
    """
    from sscd_vec.bank.decisions import Decisions
    from sscd_vec.bank.duplicates import find_copies_in
    from sscd_vec.bank.report import write_report
    from sscd_vec.bank.setup import Setup

    _check_actions([*images, *(against or [])], move_to, hardlink)
    for target in (report, table):
        _check_writable(target)
    known = None if decisions is None else Decisions.load(decisions)
    setup = Setup.without_bank(model, normalizer, device=device)
    found = find_copies_in(
        [*images, *(against or [])],
        setup,
        threshold,
        prefer=prefer,
        protect=against or (),
        decisions=known,
        leave_out=move_to,
        cache=descriptor_cache(cache),
        heatmaps=heatmaps and report is not None,
        verify=verify,
    )
    unreadable = found.unreadable
    if report is not None:
        title = "Copies in " + ", ".join(printable_path(path.name or path) for path in images)
        write_report(
            report,
            found,
            unreadable=len(unreadable),
            model=Path(setup.settings.model).name,
            title=title,
            normalizer=setup.normalizer.query_fingerprint,
        )
        say(f"report: {report}")
    if table is not None:
        _write_csv(table, found)
    tidied = _tidy(found, move_to, hardlink, apply)
    untouched = [Unreadable(path, reason) for path, reason in tidied.untouched]
    if as_json:
        print_json(_document(found, tidied, apply, unreadable, untouched))
    else:
        if not (found.scanned or unreadable):
            warn_of_nothing(images)
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
    probe = target.with_name(f".{target.name}.probe")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Failure(
            f"{printable_path(target)} cannot be written ({error.strerror}); name another place. "
            "Nothing was done yet"
        ) from error


def _tidy(found: "Copies", move_to: Path | None, hardlink: bool, apply: bool) -> "Tidied":
    from sscd_vec.bank.tidy import Tidied, link_copies, move_copies

    if move_to is not None:
        return move_copies(found.groups, move_to, apply=apply)
    if hardlink:
        return link_copies(found.groups, apply=apply)
    return Tidied([], [])


def _row(copy: "Copy", group: "CopyGroup") -> dict[str, Any]:
    file, inspected = copy.image.file, copy.inspected
    keep = copy is group.keep
    return {
        "path": copy.image.id,
        "score": None if keep else round(copy.score, 5),
        "keep": keep,
        "sure": group.is_sure,
        "verdict": group.verdict,
        "reason": (group.leave_alone or group.reason) if keep else copy.reason,
        "score_means": copy.judged and copy.judged.reason,
        "false_match_rate": copy.judged and copy.judged.false_match_rate,
        "bytes": None if file is None else file.size,
        "width": inspected and inspected.width,
        "height": inspected and inspected.height,
        "relation": copy.evidence and copy.evidence.relation,
    }


def _groups(groups: "list[CopyGroup]") -> list[list[dict[str, Any]]]:
    return [[_row(copy, group) for copy in group.members] for group in groups]


def _write_csv(target: Path, found: "Copies") -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    for number, members in enumerate(_groups([*found.groups, *found.unsure]), 1):
        for row in members:
            score = "" if row["score"] is None else f"{row['score']:.4f}"
            cells = row | {
                "group": number,
                "score": score,
                "keep": int(row["keep"]),
                "sure": int(row["sure"]),
            }
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
        "recall": found.recall,
        "groups": [
            {
                "members": members,
                "sure": group.is_sure,
                "reason": group.reason,
                "leave_alone": group.leave_alone,
                "related": [{"path": i, "score": round(s, 5)} for i, s in group.related],
            }
            for members, group in zip(_groups(found.groups), found.groups, strict=True)
        ],
        "unsure": [
            {"members": members, "reason": group.leave_alone}
            for members, group in zip(_groups(found.unsure), found.unsure, strict=True)
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
    members = _groups([*found.groups, *found.unsure])
    rows = [
        (
            str(number),
            _role(row),
            "" if row["score"] is None else f"{row['score']:.4f}",
            row["path"],
            row["reason"],
        )
        for sure in (True, False)  # those to look at come last, together
        for number, group in enumerate(members, 1)
        for row in group
        if row["sure"] is sure
    ]
    copies = count(sum(len(group.copies) for group in found.groups), "copy", "copies")
    title = (
        f"{count(found.scanned, 'image')}: {copies} in {count(len(found.groups), 'group')} "
        f"(score ≥ {found.threshold:.3f})"
    )
    print_rows(["group", "", "score", "path", "reason"], rows, title=title)
    if found.recall is not None and found.recall < 1:
        warn(f"of the copies of sampled images, {found.recall:.1%} were found")
    unsure = sum(not group[0]["sure"] for group in members[: len(found.groups)])
    if unsure:
        warn(
            f"{count(unsure, 'group')} left alone: unsure which image to keep. Look at the report, "
            "or say what to --prefer."
        )
    if found.unsure:
        images = count(sum(map(len, members[len(found.groups) :])), "image")
        warn(
            f"{count(len(found.unsure), 'group')} of {images} left alone: "
            f"{found.unsure[0].leave_alone}. They may all be different: look at them yourself."
        )
    _print_actions(tidied, apply)


def _role(row: dict[str, Any]) -> str:
    if not row["sure"]:
        return "unsure"
    return "keep" if row["keep"] else "copy"


def _print_actions(tidied: "Tidied", apply: bool) -> None:
    for action in tidied.actions:
        would = "" if apply else "would "
        say(f"{would}{action.verb} {printable_path(action.path)} → {printable_path(action.to)}")
    if tidied.actions:
        files = count(len(tidied.actions), "file")
        done = {"move": "moved", "link": "linked"}[tidied.actions[0].verb]
        if apply:
            warn(f"{files} {done}.")
        else:
            warn(f"{files} would be {done}; nothing was touched. Add --apply to do it.")
