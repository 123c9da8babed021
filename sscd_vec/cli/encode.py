"""``sscd-vec encode``: images to Parquet files of descriptors, here or on Ray."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sscd_vec.cli.console import (
    SOME_UNREADABLE,
    DeviceOption,
    Failure,
    JsonOption,
    ModelOption,
    count,
    list_unreadable,
    print_json,
    unreadable_json,
    warn,
    warn_of_nothing,
)
from sscd_vec.files import Unreadable
from sscd_vec.progress import progress_bar


def encode(
    images: Annotated[
        list[Path],
        typer.Argument(help="Folders, tars, Parquet files with a column of images, lists."),
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder of the Parquet files to write.")],
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            help="Run on Ray: auto, host:6379 or ray://host:10001; local starts one here.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="With --ray: actors; one per core or GPU by default.")
    ] = None,
    gpus: Annotated[
        float, typer.Option("--gpus", min=0, help="With --ray: GPUs of each actor.")
    ] = 0.0,
    part: Annotated[
        str, typer.Option("--part", help="Only every Nth shard, from the Ith: I/N, such as 3/8.")
    ] = "1/1",
    precision: Annotated[
        Literal["float32", "float16"], typer.Option(help="Of the descriptors in the files.")
    ] = "float32",
    image_column: Annotated[
        str | None, typer.Option(help="Of Parquet inputs: the column of images.")
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(help="Of Parquet inputs: the column of ids; FILE#ROW by default.")
    ] = None,
    model: ModelOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Encode images into Parquet files that index, search, dedup, overlap and others read.

    Every tar, Parquet file and run of loose images becomes one file, written whole or not at all.
    Run the same command again to go on where it stopped. An image that cannot be read is a row
    with its error (exit code 3).

        sscd-vec encode shards/ --to descriptors/
        sscd-vec encode shards/ --to descriptors/ --ray auto --gpus 1
        sscd-vec index descriptors/ --to bank.faiss
    """
    from sscd_vec.encoding import EncodeShard, plan, remove_stale, run_here, run_on_ray

    first, step = _part(part)
    to.mkdir(parents=True, exist_ok=True)
    job = EncodeShard(
        to.resolve(),
        model,
        device=device,
        precision=precision,
        image_column=image_column,
        id_column=id_column,
    )
    planned = plan(images, leave_out=to)
    remove_stale(to, images, planned)
    shards = planned[first::step]
    todo = [shard for shard in shards if not job.is_done(shard)]
    running = (
        run_here(job, todo)
        if ray is None or not todo
        else run_on_ray(job, todo, ray, workers=workers, gpus=gpus)
    )
    done = []
    with progress_bar("encoding shards", len(todo)) as bar:
        for each in running:
            done.append(each)
            bar.advance()
    sources = {shard.name: shard.source for shard in shards}
    broken = [Unreadable(Path(sources[each.name]), each.error) for each in done if each.error]
    figures: dict[str, Any] = {
        "folder": str(to),
        "shards": len(shards),
        "unchanged": len(shards) - len(todo),
        "encoded": sum(each.rows for each in done),
        "failed": sum(each.failed for each in done),
    }
    if as_json:
        print_json(figures | {"unreadable": unreadable_json(broken)})
    else:
        warn(
            f"{count(figures['encoded'], 'image')} encoded, {figures['failed']} unreadable; "
            f"{figures['unchanged']} of {count(len(shards), 'shard')} were there already"
        )
        list_unreadable(broken)
        if not planned:
            warn_of_nothing(images)
    if broken or figures["failed"]:
        raise typer.Exit(SOME_UNREADABLE)


def _part(text: str) -> tuple[int, int]:
    """Which shards are ours: the first, and the distance to the next."""
    number, _, total = text.partition("/")
    if not (number.isdecimal() and total.isdecimal() and 1 <= int(number) <= int(total)):
        raise Failure(f"--part: expected I/N with 1 <= I <= N, such as 3/8, got {text!r}")
    return int(number) - 1, int(total)
