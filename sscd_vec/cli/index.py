"""``sscd-vec index``: put a folder of photos into a bank, again and again."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    progress,
    warn,
)

if TYPE_CHECKING:
    from sscd_vec.encoder import Encoder
    from sscd_vec.photos.bank import Bank
    from sscd_vec.photos.folder import ImageFile

SAVE_EVERY = 60.0  # seconds between saves of a long run

CollectionOption = Annotated[
    str, typer.Option("--collection", help="Name of the collection, on Milvus.")
]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", help="Folder of the bank's own files; BANK.bank by default."),
]
TokenOption = Annotated[
    str | None,
    typer.Option("--milvus-token", envvar="SSCD_VEC_MILVUS_TOKEN", help="user:password or key."),
]


def index(
    photos: Annotated[list[Path], typer.Argument(help="Folders and image files.")],
    to: Annotated[
        str, typer.Option("--to", help="bank.faiss, bank.db (Milvus Lite) or http://host:19530.")
    ],
    model: ModelOption = None,
    normalizer: NormalizerOption = None,
    tiles: Annotated[
        int,
        typer.Option(
            "--tiles",
            min=1,
            max=4,
            help="Also index overlapping crops, 1/N of each side: finds pictures that contain "
            "only a part of an indexed one. 2 makes 10 vectors per picture.",
        ),
    ] = 1,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove pictures whose files are gone.")
    ] = False,
    collection: CollectionOption = "photos",
    state: StateOption = None,
    milvus_token: TokenOption = None,
    device: DeviceOption = None,
    cache: CacheOption = True,
    as_json: JsonOption = False,
) -> None:
    """Encode photos and add them to a bank; run again for new and changed files only.

    Interrupted, it goes on where it was. Files that cannot be read are listed at the end (exit
    code 3). --prune forgets the pictures under PHOTOS whose files are gone.

        sscd-vec index ~/photos --to bank.faiss
        sscd-vec index ~/photos --to bank.faiss --prune
    """
    from sscd_vec.cli.session import open_cache, open_encoder
    from sscd_vec.photos.bank import without_credentials
    from sscd_vec.photos.folder import Unreadable, find_images, shown

    problems: list[Unreadable] = []
    images = find_images(photos, problems.append)
    bank, encoder = _open(to, model, normalizer, tiles, collection, state, milvus_token, device)
    states = bank.pictures.states()
    todo = [image for image in images if _changed(image, states.get(os.fsencode(image.path)))]
    added, saved = 0, time.monotonic()
    try:
        if todo:
            from sscd_vec.photos.encode_files import describe_files  # loads torch

            encoder = encoder or open_encoder(bank.settings.model, device)
            bank.normalizer.check_encoder(encoder)
            with (
                open_cache(encoder, bank.settings.tiles, cache) as known,
                progress("indexing", len(todo)) as advance,
            ):
                for part in describe_files(
                    encoder, todo, known, tiles=bank.settings.tiles, on_files=advance
                ):
                    bank.add(part.files, part.descriptors)
                    added += len(part.files)
                    problems += part.unreadable
                    if time.monotonic() - saved > SAVE_EVERY:
                        bank.commit()
                        saved = time.monotonic()
    finally:
        bank.commit()  # also when interrupted: what was encoded stays
    gone = [
        picture.id
        for picture in states.values()
        if prune and _under(picture.path, photos) and _gone(picture.path)
    ]
    removed = bank.remove(gone)
    total = len(bank)
    bank.close()
    unreadable = [(shown(problem.path), problem.reason) for problem in problems]
    if as_json:
        print_json(
            {
                "bank": without_credentials(to),
                "found": len(images),
                "added": added,
                "unchanged": len(images) - len(todo),
                "removed": removed,
                "pictures": total,
                "unreadable": [{"path": p, "reason": r} for p, r in unreadable],
            }
        )
    else:
        warn(
            f"{added} added, {len(images) - len(todo)} unchanged, {removed} removed; "
            f"{total} pictures in {without_credentials(to)}"
        )
        list_unreadable(unreadable)
    if unreadable:
        raise typer.Exit(SOME_UNREADABLE)


def _open(
    to: str,
    model: str | None,
    normalizer: str | None,
    tiles: int,
    collection: str,
    state: Path | None,
    token: str | None,
    device: str | None,
) -> tuple["Bank", "Encoder | None"]:
    """Open the bank, or make it, for which the model is needed."""
    from sscd_vec.cli.session import model_name, open_encoder, open_normalizer
    from sscd_vec.normalize import Normalizer
    from sscd_vec.photos.bank import Bank, BankSettings, check_reachable, exists

    if exists(to, collection=collection, state=state):
        bank = Bank.open(to, collection=collection, state=state, token=token)
        if tiles not in (1, bank.settings.tiles):
            raise _other(to, "--tiles", str(bank.settings.tiles), str(tiles))
        if model is not None and model_name(model) != bank.settings.model:
            raise _other(to, "--model", bank.settings.model, model)
        if normalizer is not None:
            bank.replace_normalizer(Normalizer.load(normalizer))
        return bank, None
    check_reachable(to)
    encoder = open_encoder(model, device)
    made = Bank.create(
        to,
        open_normalizer(normalizer, model, encoder),
        BankSettings(model_name(model), encoder.fingerprint, tiles, collection),
        state=state,
        token=token,
    )
    return made, encoder


def _other(to: str, option: str, has: str, given: str) -> Failure:
    from sscd_vec.photos.bank import without_credentials

    return Failure(
        f"{without_credentials(to)} was made with {option} {has}, got {given}; leave it out, or "
        "make a new bank under another name"
    )


def _changed(image: "ImageFile", known: object) -> bool:
    size, modified = getattr(known, "size", None), getattr(known, "modified", None)
    return (image.size, image.modified) != (size, modified)


def _under(path: Path, roots: list[Path]) -> bool:
    return any(path.is_relative_to(root.resolve()) for root in roots)


def _gone(path: Path) -> bool:
    """Whether the file is known to be gone: a folder that may not be entered says nothing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
