"""``sscd-vec train``: fine-tune or train an encoder on a folder of images."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sscd_vec.cli.console import (
    INTERRUPTED,
    SOME_UNREADABLE,
    JsonOption,
    print_json,
    with_exit_codes,
)

if TYPE_CHECKING:
    from sscd_vec.trainer import Result

SKIPPED = "skipped.txt"
PLACES = ("images.json", "photos.json")  # the second one in folders of earlier versions


def train(
    images: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders, .tar shards or list files of images."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write the run to.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings: a .toml or .json file of TrainConfig fields.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the run in this folder, with its settings.")
    ] = None,
    preview: Annotated[
        Path | None, typer.Option(help="Only write a contact sheet of training views here.")
    ] = None,
    init_from: Annotated[
        str | None, typer.Option(help='Model name, encoder folder, weights file, or "imagenet".')
    ] = None,
    trunk: Annotated[str | None, typer.Option(help="resnet50, efficientnet_lite0, ...")] = None,
    dim: Annotated[int | None, typer.Option(help="Descriptor size.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the training views.")] = None,
    augmentations: Annotated[
        str | None, typer.Option(help="simclr, strong_blur, advanced or advanced+mixup.")
    ] = None,
    entropy_weight: Annotated[float | None, typer.Option(help="lambda of KoLeo.")] = None,
    batch: Annotated[int | None, typer.Option(help="Source images per step, all ranks.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Views encoded at once; 0: all.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the images.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="lars or adamw.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    frozen_stages: Annotated[int | None, typer.Option(help="First stages not trained.")] = None,
    validation: Annotated[Path | None, typer.Option(help="Images to validate on.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting: --set tau=0.07 --set recipe.jpeg=0.4"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train an encoder on your images; writes a folder that Encoder.from_pretrained reads.

    Progress goes to standard error. If interrupted, it saves and exits with 130; --resume
    continues to the bit. If training does not improve on its start, it says so and keeps the start.

        sscd-vec train ~/photos --out run --config recipe.toml
        sscd-vec train --resume run
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given = {
        "init_from": init_from,
        "trunk": trunk,
        "dim": dim,
        "size": size,
        "augmentations": augmentations,
        "entropy_weight": entropy_weight,
        "batch": batch,
        "chunk": chunk,
        "epochs": epochs,
        "steps": steps,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "frozen_stages": frozen_stages,
        "validation": str(validation.absolute()) if validation else None,
        "seed": seed,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    changes |= _parsed(set_ or [])
    _train(images or [], out, config, resume, preview, changes, device, as_json)


def main() -> None:
    """Entry point of ``python -m sscd_vec.trainer``, for torchrun."""
    typer.run(with_exit_codes(train))


def _train(
    images: list[Path],
    out: Path | None,
    config: Path | None,
    resume: Path | None,
    preview: Path | None,
    changes: dict[str, Any],
    device: str | None,
    as_json: bool,
) -> None:
    from sscd_vec.trainer import TrainConfig, Trainer

    for name, value in (("--config", config), ("--out", out)):
        if resume is not None and value is not None:
            raise ValueError(
                f"{name} {value} with --resume {resume}: a resumed run continues in its own folder "
                "with its own settings; leave it out (--set and the other flags may change some)"
            )
    source = resume or config
    before = (TrainConfig.read(source) if source else TrainConfig()).to_dict()
    recipe = before["recipe"] | changes.pop("recipe", {})
    settings = TrainConfig.from_dict(before | changes | {"recipe": recipe})
    if resume is not None and not images:
        images = _places_of(resume)
    if not images:
        raise ValueError("no images given: name a folder, .tar shard or list file")
    trainer = Trainer(settings, device=device)
    if preview is not None:
        trainer.preview(images, preview)
        if as_json:
            print_json({"preview": str(preview)})
        else:
            typer.echo(f"wrote {preview}")
        return
    folder = resume or out
    if folder is None:
        raise ValueError("no folder to write to: give --out run/")
    result = trainer.fit(images, folder, resume=resume is not None)
    if not trainer.ranks.first:
        return
    if as_json:
        print_json({**asdict(result), "gained": result.gained, "out": str(result.out)})
    _report(result, as_json)
    # torchrun would take this exit code of one rank for a crash.
    if result.skipped and trainer.ranks.count == 1:
        raise typer.Exit(SOME_UNREADABLE)


def _report(result: "Result", as_json: bool) -> None:
    """Say how a run ended: results on standard output, everything else on standard error."""
    folder = result.out
    if result.skipped:
        typer.echo(f"{result.skipped} unreadable images skipped: {folder / SKIPPED}", err=True)
    if not result.finished:
        typer.echo(f"saved after {result.steps} steps: sscd-vec train --resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED)
    if result.gained is None:
        typer.echo("not validated: nothing shows whether training helped", err=True)
    elif not result.gained:
        typer.echo(
            f"training did not help: validation µAP stayed at or below {_percent(result.initial)}, "
            f"where it started, so {folder} holds the weights of the start. Try a smaller "
            "learning_rate, more images or fewer steps; report.html shows the curves",
            err=True,
        )
    if not as_json:
        gain = f" (µAP {_percent(result.initial)} → {_percent(result.best)})" * bool(result.gained)
        typer.echo(f"wrote {folder}{gain}: Encoder.from_pretrained({str(folder)!r})")


def _percent(part: float | None) -> str:
    return "unknown" if part is None else f"{100 * part:.1f}"


def _places_of(run: Path) -> list[Path]:
    """Where an earlier run found its images."""
    for name in PLACES:
        if (run / name).exists():
            return [Path(place) for place in json.loads((run / name).read_text())]
    return []


def _parsed(assignments: list[str]) -> dict[str, Any]:
    """``name=value`` pairs; values are JSON where they can be, text otherwise."""
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment}: expected name=value")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        if name.startswith("recipe."):
            settings.setdefault("recipe", {})[name.removeprefix("recipe.")] = value
        else:
            settings[name] = value
    return settings
