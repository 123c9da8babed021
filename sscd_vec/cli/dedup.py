"""``sscd-vec dedup``: show me the copies in this folder."""

import csv
import io
import os
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
    list_unreadable,
    print_json,
    print_rows,
    progress,
    say,
    warn,
)
from sscd_vec.cli.search import ThresholdOption

if TYPE_CHECKING:
    from sscd_vec.photos.dedup_files import Copies


def dedup(
    photos: Annotated[list[Path], typer.Argument(help="Folders and image files.")],
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--do-it", help="Only say what would be done (default).")
    ] = True,
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
    and --hardlink move or link files, and only with --do-it.

        sscd-vec dedup ~/photos --report copies.html
        sscd-vec dedup ~/photos --move-to ~/copies --do-it
    """
    from sscd_vec.cli.session import (
        model_name,
        need_threshold,
        open_cache,
        open_encoder,
        open_normalizer,
    )
    from sscd_vec.photos.dedup_files import Progress, find_copies
    from sscd_vec.photos.folder import shown
    from sscd_vec.photos.report import write_report

    if move_to is not None and hardlink:
        raise Failure("choose one of --move-to and --hardlink")
    if move_to is not None and move_to.resolve() in [path.resolve() for path in photos]:
        raise Failure(f"--move-to {shown(move_to)} is searched itself; choose another folder")
    encoder = open_encoder(model, device)
    fitted = open_normalizer(normalizer, model, encoder)
    limit = need_threshold(fitted, "symmetric", threshold)
    with (
        open_cache(encoder, 1, cache) as known,
        progress("encoding", None) as advance,
    ):
        found = find_copies(
            encoder,
            fitted,
            photos,
            threshold=limit,
            cache=known,
            leave_out=move_to,
            heatmaps=heatmaps and report is not None,
            on_progress=Progress(advance.stage, advance),
        )
    if report is not None:
        write_report(
            report,
            found.groups,
            threshold=limit,
            scanned=found.scanned,
            unreadable=len(found.unreadable),
            model=Path(model_name(model)).name,
            title="Copies in " + ", ".join(shown(path.name or path) for path in photos),
        )
        say(f"report: {report}")
    if table is not None:
        _write_csv(table, found)
    untouched: list[tuple[str, str]] = []
    actions = _actions(found, move_to, hardlink, dry_run, untouched)
    unreadable = [(shown(problem.path), problem.reason) for problem in found.unreadable]
    if as_json:
        print_json(_document(found, actions, dry_run, unreadable, untouched))
    else:
        _print(found, actions, dry_run)
        list_unreadable(unreadable)
        list_unreadable(untouched, "not moved" if move_to else "not linked")
    if unreadable or untouched:
        raise typer.Exit(SOME_UNREADABLE)


def rows_of(found: "Copies") -> list[tuple[int, str, float | None, bool, int, int, int]]:
    """One row per file: group, path, score with the one to keep, keep, bytes, width, height."""
    from sscd_vec.photos.folder import shown

    rows: list[tuple[int, str, float | None, bool, int, int, int]] = []
    for number, group in enumerate(found.groups, 1):
        for picture, score in (
            (group.keep, None),
            *((copy.picture, copy.score) for copy in group.copies),
        ):
            rows.append(
                (
                    number,
                    shown(picture.path),
                    score,
                    score is None,
                    picture.file_size,
                    picture.width,
                    picture.height,
                )
            )
    return rows


def _actions(
    found: "Copies",
    move_to: Path | None,
    hardlink: bool,
    dry_run: bool,
    untouched: list[tuple[str, str]],
) -> list[dict[str, str]]:
    """Move or link the copies, or say what would be done; what cannot be is added to the last."""
    from sscd_vec.photos.folder import shown

    done: list[dict[str, str]] = []
    taken: set[Path] = set()  # by files that a dry run only says it would move
    if move_to is None and not hardlink:
        return done
    for group in found.groups:
        for copy in group.copies:
            path = copy.picture.path
            try:
                if hardlink and _same_bytes(path, group.keep.path):
                    if not dry_run:
                        _link(group.keep.path, path)
                    done.append({"link": shown(path), "to": shown(group.keep.path)})
                elif move_to is not None:
                    target = _free_name(move_to, path, taken)
                    if not dry_run:
                        _move(path, target)
                    taken.add(target)
                    done.append({"move": shown(path), "to": shown(target)})
            except OSError as error:  # a read-only folder, a full disk: the others go on
                untouched.append((shown(path), error.strerror or str(error)))
    return done


def _free_name(folder: Path, path: Path, taken: set[Path]) -> Path:
    """A name in ``folder`` that no file has; nothing is ever overwritten."""
    number = 0
    while True:
        suffix = f" ({number})" if number else ""
        target = folder / f"{path.stem}{suffix}{path.suffix}"
        if not target.exists() and target not in taken:
            return target
        number += 1


def _move(path: Path, target: Path) -> None:
    """Move without ever replacing a file, across disks too."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)  # fails if the name was taken meanwhile
    except FileExistsError:
        raise
    except OSError:  # another disk, or one without hard links
        import shutil

        with open(target, "xb") as new, open(path, "rb") as old:
            shutil.copyfileobj(old, new)
        shutil.copystat(path, target)
        if not _same_bytes(path, target):
            target.unlink()
            raise OSError(f"{target}: the copy differs from {path}; nothing was moved") from None
    try:
        path.unlink()
    except OSError:  # a read-only folder: then it stays there, and only there
        target.unlink()
        raise


def _link(keep: Path, path: Path) -> None:
    """Replace ``path`` by a hard link to ``keep``, in one step."""
    partial = path.with_name(f".link-{os.getpid()}-{path.name}")
    os.link(keep, partial)
    os.replace(partial, path)


def _same_bytes(a: Path, b: Path) -> bool:
    if a.stat().st_size != b.stat().st_size:
        return False
    with open(a, "rb") as first, open(b, "rb") as second:
        while True:
            left, right = first.read(2**20), second.read(2**20)
            if left != right:
                return False
            if not left:
                return True


def _write_csv(target: Path, found: "Copies") -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["group", "path", "score", "keep", "bytes", "width", "height"])
    for group, path, score, keep, size, width, height in rows_of(found):
        shown_score = "" if score is None else f"{score:.4f}"
        writer.writerow([group, path, shown_score, int(keep), size, width, height])
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.new")
    partial.write_text(text.getvalue(), "utf-8", newline="")
    os.replace(partial, target)


def _document(
    found: "Copies",
    actions: list[dict[str, str]],
    dry_run: bool,
    unreadable: list[tuple[str, str]],
    untouched: list[tuple[str, str]],
) -> dict[str, Any]:
    from sscd_vec.photos.folder import shown

    groups: dict[int, list[dict[str, Any]]] = {}
    for group, path, score, keep, size, width, height in rows_of(found):
        groups.setdefault(group, []).append(
            {
                "path": path,
                "score": None if score is None else round(score, 5),
                "keep": keep,
                "bytes": size,
                "width": width,
                "height": height,
            }
        )
    related = {
        number: [{"path": shown(path), "score": round(s, 5)} for path, s in group.related]
        for number, group in enumerate(found.groups, 1)
    }
    return {
        "scanned": found.scanned,
        "threshold": found.threshold,
        "pairs": found.pairs,
        "groups": [
            {"members": members, "related": related[number]} for number, members in groups.items()
        ],
        "dry_run": dry_run,
        "actions": actions,
        "untouched": [{"path": path, "reason": reason} for path, reason in untouched],
        "unreadable": [{"path": path, "reason": reason} for path, reason in unreadable],
    }


def _print(found: "Copies", actions: list[dict[str, str]], dry_run: bool) -> None:
    rows = [
        (str(group), "keep" if keep else "copy", "" if score is None else f"{score:.4f}", path)
        for group, path, score, keep, *_ in rows_of(found)
    ]
    copies = sum(len(group.copies) for group in found.groups)
    title = (
        f"{found.scanned} images: {copies} copies in {len(found.groups)} groups "
        f"(score ≥ {found.threshold:.3f})"
    )
    print_rows(["group", "", "score", "path"], rows, title=title)
    for action in actions:
        verb, source = next(iter(action.items()))
        say(f"{'would ' if dry_run else ''}{verb} {source} → {action['to']}")
    if actions:
        count = f"{len(actions)} file{'' if len(actions) == 1 else 's'}"
        done = {"move": "moved", "link": "linked"}[next(iter(actions[0]))]
        if dry_run:
            warn(f"{count} would be {done}; nothing was touched. Add --do-it to do it.")
        else:
            say(f"{count} {done}.")
