"""``sscd-vec doctor``."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import sscd_vec.doctor
from sscd_vec.doctor import Check


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Model cache to inspect instead of the default one.")
    ] = None,
) -> None:
    """Check the install: versions, devices, FAISS build, bf16 safety, cache and models.

    Exit code 0 when everything needed works, 1 when the install is broken.

        sscd-vec doctor
    """
    checks = sscd_vec.doctor.examine(cache_dir)
    broken = any(check.status == "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"healthy": not broken, "checks": [asdict(c) for c in checks]}))
    else:
        _show(checks, broken)
    raise typer.Exit(1 if broken else 0)


def _show(checks: list[Check], broken: bool) -> None:
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "fail": "[red]FAIL[/]"}
    table = Table(box=None, show_header=False, pad_edge=False)
    for check in checks:
        table.add_row(marks[check.status], check.name, escape(check.detail))
        if check.remedy:
            table.add_row("", "", f"[dim]→ {escape(check.remedy)}[/]")
    console = Console()
    console.print(table)
    console.print("[red]This install is broken.[/]" if broken else "[green]Ready.[/]")
