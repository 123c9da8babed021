"""Changing what a bank holds.

To add images: find them, leave out those it knows, describe the others, store them. To remove
them: from the index and the records, with what the bank kept of them beside.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sscd_vec.adapters.matches import Metadata
from sscd_vec.bank.describe import Described, Source, describe, digest_of, keeping, named_sources
from sscd_vec.bank.parquet import add_files
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Added
from sscd_vec.files import PathLike, Unreadable, find_images
from sscd_vec.progress import progress_bar
from sscd_vec.shards import split_places

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.encoder.images import ImageInput

SAVE_EVERY = 60.0  # seconds between commits of a long ``add``


def add_images(
    bank: "Bank",
    images: "PathLike | Iterable[PathLike | ImageInput]",
    ids: Sequence[str] | None = None,
    *,
    metadata: Sequence[Metadata | None] | None = None,
    keep: bool = False,
    leave_out: Path | None = None,
    show_progress: bool | None = None,
) -> Added:
    """Add images to a bank; see ``Bank.add``."""
    if metadata is not None and ids is None:
        raise ValueError("metadata: expected only with ids, one for each image")
    done = Added()
    if ids is None:
        images, described = split_places(_paths(images))
        if described:
            add_files(bank, described, done, save_every=SAVE_EVERY, show_progress=show_progress)
    sources = _sources(bank, images, ids, leave_out, done)
    more = {} if metadata is None else dict(zip(ids or (), metadata, strict=True))
    todo = [source for source in sources if not _is_known(bank, source)]
    done.unchanged += len(sources) - len(todo)
    replaced = [image.digest for one in todo if (image := bank.get(one.id)) is not None]
    if todo:
        _encode(bank, todo, more, keep, done, show_progress)
    if bank.keeps_features:
        bank.second_stage.forget(replaced)
        bank.second_stage.keep(sources, show_progress)
    return done


def remove_images(bank: "Bank", ids: Sequence[str]) -> int:
    """Remove images from a bank; see ``Bank.remove``."""
    images = [image for image in map(bank.get, ids) if image is not None]
    files = [image.file.path for image in images if image.file is not None]
    kept = [path for path in files if bank.location is not None and bank.location.is_upload(path)]
    count = bank.storage.remove(ids)
    for path in kept:
        path.unlink(missing_ok=True)
    if bank.keeps_features:
        bank.second_stage.forget([image.digest for image in images])
    return count


def _sources(
    bank: "Bank",
    images: "PathLike | Iterable[Any]",
    ids: Sequence[str] | None,
    leave_out: Path | None,
    done: Added,
) -> list[Source]:
    if ids is None:
        paths = _paths(images)
        files = find_images(paths, done.unreadable.append, leave_out=leave_out)
        bank.setup.remember_roots(paths)
        return [Source.of_file(file) for file in files]
    return named_sources([images] if isinstance(images, str | os.PathLike) else images, ids)


def _is_known(bank: "Bank", source: Source) -> bool:
    """Whether the bank has this image as it is now."""
    known = bank.get(source.id)
    if known is None or known.is_lost:
        return False
    if source.file is not None and known.file is not None:
        return known.file == source.file
    return known.digest == digest_of(source)


def _encode(
    bank: "Bank",
    todo: list[Source],
    metadata: Mapping[str, Metadata | None],
    keep: bool,
    done: Added,
    show_progress: bool | None,
) -> None:
    """Describe images and store them, once a minute and at the end."""
    pending: list[Described] = []
    saved = time.monotonic()
    try:
        with progress_bar("adding", len(todo), show_progress) as bar:
            for part in describe(
                bank.encoder, todo, tiles=bank.settings.tiles, cache=bank.descriptor_cache
            ):
                pending += part
                done.unreadable += [
                    Unreadable(Path(one.source.id), one.reason) for one in part if one.reason
                ]
                bar.advance(len(part))
                if time.monotonic() - saved > SAVE_EVERY:
                    done.added += _store(bank, pending, metadata, keep)
                    pending, saved = [], time.monotonic()
    finally:
        done.added += _store(bank, pending, metadata, keep)  # also when interrupted


def _store(
    bank: "Bank",
    described: Sequence[Described],
    metadata: Mapping[str, Metadata | None],
    keep: bool,
) -> int:
    uploads = bank.location.uploads if keep and bank.location is not None else None
    ready = [one for one in described if one.descriptors is not None]
    with keeping(ready, uploads, lambda source: bank.get(source.id) is not None) as kept:
        bank.storage.write(
            [BankImage(one.source.id, one.digest, len(one.rows), one.source.file) for one in kept],
            [one.rows for one in kept],
            [metadata.get(one.source.id) for one in kept] if metadata else None,
        )
    return len(ready)


def _paths(images: Any) -> list[PathLike]:  # noqa: ANN401 - checked here
    """Paths the caller gave, one or many."""
    given = [images] if isinstance(images, str | os.PathLike) else images
    if isinstance(given, bytes | np.ndarray) or not isinstance(given, Iterable):
        raise TypeError("images without a path need ids: bank.add([image], ids=['name'])")
    paths = list(given)
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError("images without a path need ids: bank.add(images, ids=[...])")
    return paths
