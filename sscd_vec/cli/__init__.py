"""The command ``sscd-vec``.

Command files import only light things at their top, so that ``--help`` answers at once; what a
command works with is loaded when it runs.
"""

import functools
import traceback
from collections.abc import Callable

import typer

from sscd_vec.cli import console
from sscd_vec.cli.compare import compare
from sscd_vec.cli.convert import convert
from sscd_vec.cli.dedup import dedup
from sscd_vec.cli.demo import demo
from sscd_vec.cli.doctor import doctor
from sscd_vec.cli.eval import evaluate
from sscd_vec.cli.index import index
from sscd_vec.cli.normalize import calibrate_threshold, fit, table
from sscd_vec.cli.search import search
from sscd_vec.cli.serve import serve
from sscd_vec.cli.train import train

app = typer.Typer(
    name="sscd-vec",
    help="Image copy detection: is this image a copy of one we know?\n\n"
    "Start with `sscd-vec demo`, then `sscd-vec dedup PHOTOS` or `sscd-vec index PHOTOS --to "
    "bank.faiss` and `sscd-vec search IMAGE --in bank.faiss`.",
    epilog=console.EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def with_exit_codes(command: Callable[..., None]) -> Callable[..., None]:
    """The command with errors as one line and an exit code; a traceback with SSCD_VEC_DEBUG=1."""

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        try:
            command(*arguments, **options)
        except KeyboardInterrupt:
            console.warn("interrupted; what was finished is kept, run the same command to go on")
            raise typer.Exit(console.INTERRUPTED) from None
        except (
            console.Failure,
            OSError,
            ValueError,
            TypeError,
            RuntimeError,
            ImportError,
        ) as error:
            if isinstance(error, typer.Exit):
                raise
            if console.debug():
                traceback.print_exc()
            console.warn(f"error: {error}")
            raise typer.Exit(console.FAILED) from error

    return run


normalize = typer.Typer(help="Fit a normalizer: whitening and score normalization.")
_NORMALIZE: dict[str, Callable[..., None]] = {"fit": fit, "table": table}
_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "dedup": dedup,
    "index": index,
    "search": search,
    "compare": compare,
    "serve": serve,
    "calibrate": calibrate_threshold,
    "convert": convert,
    "train": train,
    "eval": evaluate,
    "doctor": doctor,
}
for name, command in _NORMALIZE.items():
    normalize.command(name)(with_exit_codes(command))
for name, command in _COMMANDS.items():
    app.command(name)(with_exit_codes(command))
app.add_typer(normalize, name="normalize")


def main() -> None:
    """Entry point of the console script."""
    app()
