"""The command ``sscd-vec``."""

import typer

app = typer.Typer(
    name="sscd-vec",
    help="Image copy detection: is this image a copy of one we know?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app()
