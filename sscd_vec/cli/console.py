"""What the commands share: exit codes, tables for people, lines for pipes, JSON for programs.

Results go to standard output, everything else to standard error. On a terminal results are a
table; in a pipe they are plain tab-separated lines without remarks.
"""

import functools
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from sscd_vec.files import Unreadable, printable_path

if TYPE_CHECKING:
    from sscd_vec.bank import Bank

DONE, FAILED, USAGE, SOME_UNREADABLE, NO_MATCH, INTERRUPTED = 0, 1, 2, 3, 4, 130

PATIENCE = 10.0  # seconds for another process that has a bank open; a server never lets go

EXIT_CODES = (
    "Exit codes: 0 done; 1 failed (the reason is on standard error); 2 wrong usage; 3 done, but "
    "some files could not be read; 4 no copy found (search and compare with --exit-code); 130 "
    "interrupted (what was finished is kept; run the same command again to go on)."
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Name, folder or file of a model; the shipped one by default."),
]
NormalizerOption = Annotated[
    str | None,
    typer.Option(
        "--normalizer", help="Normalizer file (see `sscd-vec normalize`); the model's own if any."
    ),
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps; the best one by default.")
]
CacheOption = Annotated[
    bool,
    typer.Option("--cache/--no-cache", help="Keep descriptors, so that no image is encoded twice."),
]


ThresholdOption = Annotated[
    float | None,
    typer.Option("--threshold", help="Least score of a copy; the calibrated one by default."),
]
ExitCodeOption = Annotated[
    bool, typer.Option("--exit-code", help="Exit with 4 if no copy is found.")
]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="Confirm candidates by geometry and outline what was copied (extra: verify).",
    ),
]
InBankOption = Annotated[str, typer.Option("--in", help="The bank: what `index --to` was given.")]
CollectionOption = Annotated[
    str | None,
    typer.Option("--collection", help="Milvus collection, if it is not in the address."),
]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of the bank's own files; BANK.bank by default."),
]
TokenOption = Annotated[
    str | None,
    typer.Option("--milvus-token", envvar="SSCD_VEC_MILVUS_TOKEN", help="user:password or key."),
]
TrustOption = Annotated[
    bool,
    typer.Option("--trust", help="Load the model and show the files a stranger's bank names."),
]


class _PlainFlags:
    """Help that shows no type for flags: typer 0.29 writes ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401 - click's, or typer's own
        """The parameters, as the help shows them."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.display_type_rich = lambda ctx: None
        return parameters


class Command(_PlainFlags, TyperCommand):
    """A command."""


class Group(_PlainFlags, TyperGroup):
    """The program itself, or a group of its commands."""


class Failure(Exception):
    """An error the user can act on; its text is printed alone, without a traceback."""


def with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """The command with errors as one line and an exit code; a traceback with SSCD_VEC_DEBUG=1."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        say("loading …")  # libraries and a model: seconds, on a busy machine many
        try:
            with warnings.catch_warnings():
                if not debug():
                    # Pillow remarks on odd metadata; files it cannot read are listed by us.
                    warnings.filterwarnings("ignore", module=r"PIL\.")
                command(*arguments, **options)
        except KeyboardInterrupt:
            warn("interrupted; what was finished is kept, run the same command to go on")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # ``… | head``: typer ends the program without a word
            raise
        except (
            Failure,
            OSError,
            ValueError,
            TypeError,
            RuntimeError,
            ImportError,
        ) as error:
            if isinstance(error, typer.Exit):
                raise
            if debug():
                traceback.print_exc()
            warn(f"error: {_sentence(error)}")
            _hint_at_heic(str(error))
            raise typer.Exit(FAILED) from error

    return run


def _sentence(error: Exception) -> str:
    """An error's text; the system's own errors without their number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        name = os.fsencode(error.filename).decode("utf-8", "backslashreplace")
        return f"{name}: {error.strerror}"
    if isinstance(error, BlockingIOError) and error.strerror:  # a lock that another process holds
        return f"{error.strerror}. Wait until it ends, or stop it"
    return str(error)


def help_text(command: Callable[..., None]) -> str:
    """The command's docstring for any width of terminal: paragraphs flow, examples keep lines."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(
        text if text.startswith(" ") else " ".join(text.split()) for text in paragraphs
    )


def say(text: str) -> None:
    """Tell a person what is going on; suppressed unless standard error is a terminal."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def warn(text: str) -> None:
    """Say what must not be missed, also in a log."""
    typer.echo(text, err=True)


def warn_of_nothing(places: Sequence[Path]) -> None:
    """Say that no image was found, also in a pipe: silence looks like success."""
    warn("no images in " + ", ".join(plain(printable_path(place)) for place in places))


def print_json(document: object) -> None:
    """Print a result for a program."""
    typer.echo(json.dumps(document, ensure_ascii=not _utf8(), indent=1))


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """Print a result: a table on a terminal, tab-separated lines in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("\t".join(plain(cell) for cell in row))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    numeric = [all(isinstance(row[i], float) for row in rows) for i in range(len(columns))]
    table = Table(box=None, pad_edge=False)
    for column, is_number in zip(columns, numeric, strict=True):
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(plain(_near(cell))) for cell in row))
    screen = Console()
    if title:
        screen.print(escape(title), style="italic")
    screen.print(table)


def open_bank(location: str, **options: object) -> "Bank":
    """An existing bank.

    Args:
        location: What the user wrote.
        options: Of ``Bank``.
    """
    from sscd_vec.bank import Bank
    from sscd_vec.locks import LockHeldError

    patient = {"wait": PATIENCE} | options
    try:
        return Bank(location, create=False, **patient)  # type: ignore[arg-type]
    except LockHeldError as error:
        raise Failure(
            f"{error.strerror}. Wait until it ends, or stop it; a bank in a FAISS file can be "
            "searched while another process has it open"
        ) from error


def descriptor_cache(wanted: bool) -> Path | None:
    """Where descriptors are kept between commands."""
    from sscd_vec import models

    return models.cache_folder() / "descriptors" if wanted else None


def count(number: int, noun: str, plural: str = "") -> str:
    """A number and its noun: ``1 copy``, ``2 copies``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def unreadable_json(problems: Sequence[Unreadable]) -> list[dict[str, str]]:
    """Unreadable files as every JSON document lists them."""
    return [{"path": printable_path(p.path), "reason": p.reason} for p in problems]


def list_unreadable(
    problems: Sequence[Unreadable], what: str = "could not be read", shown: int = 8
) -> None:
    """Name the files that could not be read, by reason, at the end, on standard error."""
    if not problems:
        return
    by_reason: dict[str, list[str]] = {}
    for path, reason in sorted((printable_path(p.path), p.reason) for p in problems):
        # "truncated (7 bytes …)" and "truncated (12 bytes …)" are one reason to a reader.
        by_reason.setdefault(re.sub(r" \([^()]*\)$", "", reason), []).append(path)
    warn(f"{count(len(problems), 'file')} {what}:")
    for reason, paths in by_reason.items():
        warn(f"  {plain(reason)} ({len(paths)})")
        for path in paths[:shown]:
            warn(f"    {plain(_near(path) if sys.stderr.isatty() else path)}")
        if len(paths) > shown:
            warn(f"    … and {len(paths) - shown} more (--json lists them all)")
    _hint_at_heic(" ".join(str(problem.path) for problem in problems))


def _hint_at_heic(text: str) -> None:
    """Say what reads a phone's photos, where one could not be read."""
    if re.search(r"\.hei[cf]\b", text.lower()) and importlib.util.find_spec("pillow_heif") is None:
        warn("HEIC photos are read with a plugin: pip install pillow-heif")


def _near(cell: object) -> object:
    """A path below the current folder as a person would type it; everything else as it is."""
    here = os.path.join(os.getcwd(), "")
    return cell.removeprefix(here) if isinstance(cell, str) else cell


def plain(cell: object) -> str:
    """One line, whatever a file name holds: tabs, newlines and terminal codes become escapes."""
    if isinstance(cell, float):
        return f"{cell:.4f}"
    text = str(cell)
    if text.isprintable() and _utf8():
        return text
    encoding = "utf-8" if _utf8() else "ascii"
    kept = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return kept.encode(encoding, "backslashreplace").decode(encoding)


def _utf8() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def debug() -> bool:
    """Whether tracebacks are wanted."""
    return bool(os.environ.get("SSCD_VEC_DEBUG"))
