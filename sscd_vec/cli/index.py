"""``sscd-vec index``: put images into a bank, again and again."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sscd_vec.cli.console import (
    SOME_UNREADABLE,
    CacheOption,
    CollectionOption,
    DeviceOption,
    Failure,
    JsonOption,
    ModelOption,
    NormalizerOption,
    StateOption,
    TokenOption,
    TrustOption,
    count,
    descriptor_cache,
    list_unreadable,
    print_json,
    unreadable_json,
    warn,
    warn_of_nothing,
)
from sscd_vec.files import printable_path

if TYPE_CHECKING:
    from sscd_vec.bank import Bank


def index(
    images: Annotated[list[Path], typer.Argument(help="Folders, image files, tars.")],
    to: Annotated[
        str,
        typer.Option("--to", help="bank.faiss, bank.db (Milvus Lite) or http://host:19530/name."),
    ],
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    index_type: Annotated[
        str | None,
        typer.Option("--index", help="For a new bank: FAISS factory string or Milvus index type."),
    ] = None,
    tiles: Annotated[
        int | None,
        typer.Option(
            "--tiles",
            min=1,
            max=4,
            help="For a new bank: index overlapping crops too, 1/N of each side. Finds images that "
            "contain only a part of an indexed one. 2 makes 10 vectors per image.",
        ),
    ] = None,
    local: Annotated[
        bool | None,
        typer.Option(
            "--local/--no-local",
            help="Keep local features for `search --verify`, 70 kB per image (extra: verify); a "
            "bank that keeps them goes on.",
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove images whose files are gone.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait while another process writes.")
    ] = True,
    collection: CollectionOption = None,
    state: StateOption = None,
    milvus_token: TokenOption = None,
    trust: TrustOption = False,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Encode images and add them to a bank; run again for new and changed files only.

    Interrupted, it goes on where it stopped. Several processes may add to one bank. Files that
    cannot be read are listed at the end (exit code 3). --prune forgets the images below IMAGES
    whose files are gone.

        sscd-vec index ~/photos --to bank.faiss
        sscd-vec index ~/photos --to bank.faiss --prune
        sscd-vec index ~/photos --to bank.faiss --local
    """
    from sscd_vec.bank import Bank

    for path in images:  # before a bank is made for them
        if not path.exists():
            raise Failure(f"{printable_path(path)}: no such file or folder")
    with Bank(
        to,
        model=model,
        normalizer=normalizer,
        index=index_type,
        tiles=tiles,
        collection=collection,
        state=state,
        token=milvus_token,
        device=device,
        cache=descriptor_cache(cache),
        trust=trust,
        wait=wait,
        local=local,
    ) as bank:
        done = bank.add(list(images))
        removed = bank.remove(_gone(bank, images)) if prune else 0
        total, place = len(bank), str(bank)
    if as_json:
        print_json(
            {
                "bank": place,
                "added": done.added,
                "unchanged": done.unchanged,
                "removed": removed,
                "images": total,
                "unreadable": unreadable_json(done.unreadable),
            }
        )
    else:
        warn(
            f"{done.added:,} added, {done.unchanged:,} unchanged, {removed:,} removed; "
            f"{count(total, 'image')} in {place}"
        )
        if not (done.added or done.unchanged or done.unreadable):
            warn_of_nothing(images)
        list_unreadable(done.unreadable)
    if done.unreadable:
        raise typer.Exit(SOME_UNREADABLE)


def _gone(bank: "Bank", places: list[Path]) -> list[str]:
    """Images below these places whose files are known to be gone."""
    roots = [place.resolve() for place in places]
    return [
        image.id
        for image in bank.images()
        if image.file is not None
        and any(image.file.path.is_relative_to(root) for root in roots)
        and _is_gone(image.file.path)
    ]


def _is_gone(path: Path) -> bool:
    """Whether the file is known to be gone: a folder without permission says nothing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
