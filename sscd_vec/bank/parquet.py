"""Banks and Parquet files of descriptors: adding and searching images encoded elsewhere."""

import hashlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sscd_vec.bank.location import BankError
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Added, Answer
from sscd_vec.files import PathLike, Unreadable
from sscd_vec.progress import progress_bar
from sscd_vec.shards import DescriptorFiles, Float32, ShardRows

if TYPE_CHECKING:
    from sscd_vec.bank.bank import Bank
    from sscd_vec.bank.setup import Setup

MOST_PENDING = 131_072  # rows held before they are written: a quarter of a gigabyte


def open_files(made_with: "Bank | Setup", places: Iterable[PathLike]) -> DescriptorFiles:
    """The files, checked to be of the right encoder.

    Raises:
        ValueError: They are of another one, or damaged.
    """
    files = DescriptorFiles(places, encoder=made_with.settings.encoder or None)
    expected = made_with.normalizer.dim_in
    if files.dim and files.dim != expected:
        raise ValueError(
            f"expected descriptors of {expected} numbers, as {made_with} takes, got {files.dim}"
        )
    return files


def add_files(
    bank: "Bank",
    places: Iterable[PathLike],
    done: Added,
    *,
    save_every: float,
    show_progress: bool | None,
) -> None:
    """Add the images of Parquet files of descriptors, and count them in ``done``.

    Raises:
        BankError: The bank is tiled: a file has one descriptor per image.
        ValueError: The files are of another encoder, or damaged.
    """
    if bank.settings.tiles > 1:
        raise BankError(
            f"{bank} is tiled and a file of descriptors has whole images only; add the images"
        )
    files = open_files(bank, places)
    _train(bank, files)
    images: list[BankImage] = []
    vectors: list[Float32] = []
    saved = time.monotonic()
    with progress_bar("adding", files.rows, show_progress) as bar:
        for part in files.parts():
            _take(bank, part, images, vectors, done)
            bar.advance(len(part.ids))
            if len(images) >= MOST_PENDING or time.monotonic() - saved > save_every:
                bank.storage.write(images, vectors)
                images, vectors, saved = [], [], time.monotonic()
        bank.storage.write(images, vectors)


def search_files(bank: "Bank", places: Iterable[PathLike], k: int) -> Iterator[Answer]:
    """Search for the images of Parquet files of descriptors, in order."""
    for part in open_files(bank, places).parts(1024):
        found = iter(bank.search_descriptors([row[None] for row in part.readable().descriptors], k))
        for name, row, error in zip(part.ids, part.descriptors, part.errors, strict=True):
            missing = bool(row[0] != row[0])
            yield Answer(str(name), [] if missing else next(found), error if missing else "")


def _take(
    bank: "Bank",
    part: ShardRows,
    images: list[BankImage],
    vectors: list[Float32],
    done: Added,
) -> None:
    """Queue the rows of a part that are new to the bank or have changed."""
    done.unreadable += [
        Unreadable(Path(str(name)), error)
        for name, error in zip(part.ids, part.errors, strict=True)
        if error
    ]
    good = part.readable()
    for name, row, file in zip(good.ids, good.descriptors, good.files, strict=True):
        image = BankImage(str(name), hashlib.sha256(row.tobytes()).hexdigest(), 1, file)
        known = bank.get(image.id)
        if known is not None and not known.is_lost and _is_same(known, image):
            done.unchanged += 1
            continue
        images.append(image)
        vectors.append(row[None])
        done.added += 1


def _is_same(known: BankImage, image: BankImage) -> bool:
    if known.file is not None and image.file is not None:
        return known.file == image.file
    return known.digest == image.digest


def _train(bank: "Bank", files: DescriptorFiles) -> None:
    """Train an index of lists on the images it will hold, if they are more than the background."""
    if bank.location is not None and bank.location.backend != "faiss":
        return
    from sscd_vec.adapters.faiss import FaissIndex

    index, background = bank.storage.index, bank.normalizer.background
    if isinstance(index, FaissIndex) and index.training_rows:
        if background is None or files.rows > len(background):
            index.train(files.sample(index.training_rows))
