"""The command ``sscd-vec``.

Command files import only light things at their top, so that ``--help`` answers at once; what a
command works with is loaded when it runs.
"""

import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import typer

from sscd_vec.cli import console
from sscd_vec.cli.calibrate import calibrate_threshold
from sscd_vec.cli.compare import compare
from sscd_vec.cli.convert import convert
from sscd_vec.cli.decisions import decisions
from sscd_vec.cli.dedup import dedup
from sscd_vec.cli.demo import demo
from sscd_vec.cli.doctor import doctor
from sscd_vec.cli.encode import encode
from sscd_vec.cli.eval import evaluate
from sscd_vec.cli.index import index
from sscd_vec.cli.normalize import fit, table
from sscd_vec.cli.overlap import overlap
from sscd_vec.cli.search import search
from sscd_vec.cli.serve import serve
from sscd_vec.cli.train import train

app = typer.Typer(
    name="sscd-vec",
    cls=console.Group,
    help="Image copy detection: is this image a copy of one we know?\n\n"
    "Start with `sscd-vec demo`, then `sscd-vec dedup PHOTOS` or `sscd-vec index PHOTOS --to "
    "bank.faiss` and `sscd-vec search IMAGE --in bank.faiss`.",
    epilog=console.EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


normalize = typer.Typer(
    cls=console.Group,
    help="Fit a normalizer: whitening and score normalization.\n\n"
    "    sscd-vec normalize fit ~/other-photos --out normalizer.safetensors",
)
_NORMALIZE: dict[str, Callable[..., None]] = {"fit": fit, "table": table}
_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "dedup": dedup,
    "index": index,
    "search": search,
    "compare": compare,
    "decisions": decisions,
    "encode": encode,
    "overlap": overlap,
    "serve": serve,
    "calibrate": calibrate_threshold,
    "convert": convert,
    "train": train,
    "eval": evaluate,
    "doctor": doctor,
}
for name, command in _NORMALIZE.items():
    normalize.command(name, cls=console.Command, help=console.help_text(command))(
        console.with_exit_codes(command)
    )
for name, command in _COMMANDS.items():
    app.command(name, cls=console.Command, help=console.help_text(command))(
        console.with_exit_codes(command)
    )
app.add_typer(normalize, name="normalize")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sscd-vec {version('sscd-vec')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Entry point of the console script."""
    # Threads of one operation wait for each other asleep. Spinning, each network pass takes many
    # times as long on a machine that is busy with something else. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()
