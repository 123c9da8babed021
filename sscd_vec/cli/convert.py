"""``sscd-vec convert``: any model file to a folder that is safe to pass on."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sscd_vec.encoder.config import EncoderConfig


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A released or training .pt file, a TorchScript archive, a .safetensors file, a "
            "folder, or the name of a released model.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Where config.json and model.safetensors go.")],
    half: Annotated[
        bool, typer.Option("--half", help="Store weights in 16 bits: half the size, rounded.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that is already in the folder.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Turn any model file into a folder of config.json and model.safetensors.

    Nothing inside the file is executed. Exit code 0 when the folder was written and reads back the
    same, 1 with the reason otherwise.

        sscd-vec convert sscd_disc_mixup.torchscript.pt sscd_disc_mixup/
        sscd-vec index ~/photos --to bank.faiss --model sscd_disc_mixup/
    """
    try:
        summary = convert_model(source, folder, half=half, overwrite=overwrite)
    except (OSError, ValueError) as error:
        if as_json:
            typer.echo(json.dumps({"converted": False, "error": str(error)}))
        else:
            typer.echo(f"not converted: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps({"converted": True} | summary))
        return
    config = summary["encoder"]
    what = f"{config['head']} head" if config["features"] == "projected" else "trunk features"
    typer.echo(f"read     {summary['source']}")
    typer.echo(f"model    {config['trunk']}, {what}, {summary['dim']} dimensions")
    typer.echo(f"input    {config['size_mode']} side {config['size']}")
    typer.echo(f"tensors  {summary['tensors']}, {summary['parameters']:,} values")
    typer.echo(f"wrote    {summary['folder']} ({summary['bytes'] / 2**20:.1f} MiB)")
    typer.echo(f"is       {summary['fingerprint']}")


def convert_model(
    source: Path, folder: Path, *, half: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Read any model, write it as a folder, read that back and describe it.

    Args:
        source: What ``Encoder.from_pretrained`` takes.
        folder: Where to write.
        half: Store floating-point tensors as float16.
        overwrite: Replace a model already in ``folder``.

    Raises:
        FileExistsError: ``folder`` holds a model already.
        FileNotFoundError: There is no such source.
        CheckpointError: The source cannot be read, or the folder does not read back the same.
    """
    import torch

    from sscd_vec.encoder.checkpoint import (
        read_checkpoint,
        validate_release,
        write_pretrained,
    )
    from sscd_vec.encoder.model import fingerprint
    from sscd_vec.models import CONFIG_FILE, WEIGHTS_FILE, CheckpointError, resolve

    taken = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    if taken and not overwrite:
        raise FileExistsError(f"{folder} already holds {' and '.join(taken)}; --overwrite replaces")
    found = resolve(source, validate=validate_release)
    config, state = read_checkpoint(found)
    write_pretrained(folder, config, state, dtype=torch.float16 if half else None)
    back_config, back = read_checkpoint(folder)
    mark = fingerprint(config, state, "float32")
    written = fingerprint(back_config, back, "float32")
    if not half and mark != written:
        raise CheckpointError(f"{folder} does not read back as it was written: a damaged disk?")
    return {
        "source": str(found),
        "folder": str(folder),
        "encoder": back_config.to_dict(),
        "dim": _dim(back_config),
        "tensors": len(back),
        "parameters": sum(tensor.numel() for tensor in back.values()),
        "bytes": (folder / WEIGHTS_FILE).stat().st_size,
        "fingerprint": written,
    }


def _dim(config: "EncoderConfig") -> int:
    import torch

    from sscd_vec.encoder.model import build_model

    with torch.device("meta"):
        return build_model(config).dim
