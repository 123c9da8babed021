"""A bank's index and its records, kept in step whatever happens.

One process writes at a time, under a lock that says who holds it; it looks first at what others
wrote since. Every change is announced in the records, written to the index, and confirmed: after
a crash, opening finds out which of the three happened and heals the rest. What the index should
have and does not is marked as lost, so that the next ``add`` adds it again.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.matches import Metadata
from sscd_vec.bank.decisions import Decisions
from sscd_vec.bank.location import LOCK, RECORDS, BankError, Location
from sscd_vec.bank.records import BankImage, Records
from sscd_vec.bank.views import tile_id
from sscd_vec.locks import LockHeldError, locked
from sscd_vec.normalize import Normalizer

if TYPE_CHECKING:
    from sscd_vec.adapters.index import Index

Float32 = NDArray[np.float32]
ABANDONED_AFTER = 3600.0  # seconds before a kept image that is not on record is deleted
KEPT_NAME = re.compile(r"[0-9a-f]{32}\.jpg|\.[0-9a-f]{32}\.jpg\.\d+\.[0-9a-f]+\.new")
LONGEST_ID = 8192  # bytes: a path and the number of a view

logger = logging.getLogger(__name__)


class Storage:
    """Where a bank's vectors and records are; opened by ``Bank``.

    Attributes:
        index: The vectors.
        records: Which images they belong to.
        read_only: Whether nothing is written, not even to heal.
    """

    def __init__(
        self,
        location: Location | None,
        normalizer: Normalizer,
        *,
        index: str | None = None,
        token: str | None = None,
        read_only: bool | None = None,
        wait: bool | float = True,
    ) -> None:
        """Open or create both, and heal what a crash left.

        Args:
            location: Where they lie; None keeps everything in memory.
            normalizer: What the vectors are made with.
            index: A FAISS factory string or a Milvus index type, for a new bank.
            token: Of a Milvus server.
            read_only: Write nothing; the default where the storage cannot be written to.
            wait: For another writer: True, False, or seconds.

        Raises:
            LockHeldError: Another process has a Lite folder open, and the wait is over.
        """
        if read_only is None:
            read_only = location is not None and not is_writable(location)
        self.location, self.read_only, self._wait = location, read_only, wait
        self._type, self._token = index, token
        self._changing = threading.RLock()
        self._open = contextlib.ExitStack()
        try:
            self.records = self._open_records()
            self._open.callback(self.records.close)
            if location is not None and location.is_lite and not read_only:
                self._open.enter_context(self._process_lock("use the Milvus Lite file"))
            self.index: Index = self._open_index(normalizer)
            if not read_only:
                self._heal_if_free()
                self._sweep_uploads()
        except BaseException:
            self._open.close()
            raise

    # ------------------------------------------------------------------ changing

    def write(
        self,
        images: Sequence[BankImage],
        vectors: Sequence[Float32],
        metadata: Sequence[Metadata | None] | None = None,
    ) -> None:
        """Add or replace images; when it returns they are safe.

        Args:
            images: What to record.
            vectors: For each, ``(views, d)``: the whole image first.
            metadata: For each, or None.
        """
        if not images:
            return
        with self._writing("add images"):
            surplus = [
                tile_id(image.id, view)
                for image in images
                for view in range(image.vectors, self._known_vectors(image.id))
            ]
            ids = [tile_id(image.id, view) for image in images for view in range(image.vectors)]
            more = metadata and [
                each
                for image, each in zip(images, metadata, strict=True)
                for _ in range(image.vectors)
            ]
            self.records.announce(self._examined(images, vectors), self._generation + 1)
            with self._undone_on_error():
                self.index.remove(surplus)
                self.index.add(ids, np.concatenate(vectors), more)
                self._commit()
            self._confirm()

    def _examined(self, images: Sequence[BankImage], vectors: Sequence[Float32]) -> list[BankImage]:
        """The images, each with whether a view of it lies outside what the normalizer knows."""
        rules = self.index.normalizer
        if rules.domain is None:
            return list(images)
        domain, whiten = rules.domain, rules.whiten
        flags = [bool(domain.outside(whiten(rows)).any()) for rows in vectors]
        return [replace(each, outside=flag) for each, flag in zip(images, flags, strict=True)]

    def remove(self, ids: Sequence[str]) -> int:
        """Remove images; return how many were there."""
        with self._writing("remove images"):
            known = {name for name in ids if self.records.by_id(name) is not None}
            rows = [
                tile_id(name, view) for name in known for view in range(self._known_vectors(name))
            ]
            # A vector without a record can be found, so it must be possible to remove it.
            unknown = self.index.present([name for name in ids if name not in known])
            if not known and not unknown:
                return 0
            with self._undone_on_error():
                self.index.remove([*rows, *unknown])
                self._commit()
            self.records.remove(known, self._generation)
            return len(known) + len(unknown)

    def decide(self, decisions: Decisions) -> None:
        """Remember what people decided about pairs of images."""
        self._require_writable()
        self.records.decide(decisions, time.time())

    def refresh(self) -> None:
        """See what other processes wrote since."""
        if self.location is None:
            return
        if self._has_generations and not self._generation and Path(self.location.index).exists():
            self.index = self._open_index(self.index.normalizer)  # another process made it
        elif self.index.reload_if_changed():
            logger.info("%s changed on disk and was read again", self.location)

    def require_vectors(self) -> None:
        """Refuse to search an index that was lost.

        Raises:
            BankError: Images are on record and the index is empty.
        """
        lost = self.records.lost
        if lost and not len(self.index):
            place = "a bank in memory" if self.location is None else self.location
            raise BankError(
                f"{place}: its index is missing or empty, but {lost} images are on record; restore "
                "the index from a copy, or add the images again"
            )

    def close(self) -> None:
        """Release files, connections and locks."""
        try:
            self.index.close()
        finally:
            self._open.close()

    # ------------------------------------------------------------------ staying in step

    @contextlib.contextmanager
    def _writing(self, purpose: str) -> Iterator[None]:
        self._require_writable()
        lite = self.location is not None and self.location.is_lite
        with self._changing, contextlib.nullcontext() if lite else self._process_lock(purpose):
            self.refresh()
            self._heal()
            yield

    def _require_writable(self) -> None:
        if self.read_only:
            place = "a bank in memory" if self.location is None else self.location
            raise BankError(f"{place} is opened read-only; open it without read_only")

    def _confirm(self) -> None:
        try:
            self.records.confirm(self._generation)
        except OSError as error:
            if not self._has_generations:  # healing would take the images back
                raise
            # The index has them and the journal says so: they are safe, and confirmed next time.
            logger.warning("%s: not on record yet (%s)", self.location, error)

    def _commit(self) -> None:
        if self.location is not None:
            self.index.commit()

    def _process_lock(self, purpose: str) -> contextlib.AbstractContextManager[None]:
        if self.location is None:
            return contextlib.nullcontext()
        return locked(self.location.folder / LOCK, wait=self._wait, purpose=purpose)

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        """Forget rows that did not reach the disk: they must not join a later commit."""
        try:
            yield
        except BaseException:
            if self.location is None:  # nothing to read it again from
                self.records.discard(self._generation)
                raise
            # Not closed first: that would commit. Milvus has the rows already; healing takes them
            # back.
            self.index = self._open_index(self.index.normalizer)
            self._heal()
            raise

    def _heal_if_free(self) -> None:
        """Heal on opening, unless another process is writing right now: then it is in charge."""
        if self.location is None or not self._out_of_step():
            return
        lock = self.location.folder / LOCK
        try:
            with (
                contextlib.nullcontext()
                if self.location.is_lite
                else locked(lock, wait=False, purpose="check the bank")
            ):
                self.refresh()
                self._heal()
        except LockHeldError:
            logger.info("%s: another process is writing; not checked", self.location)

    def _out_of_step(self) -> bool:
        """Whether records and index disagree, as far as counting tells."""
        return (
            bool(self.records.announced())
            or self.records.generation != self._generation
            or len(self.index) < self.records.vectors
        )

    def _heal(self) -> None:
        """Bring the records in step with the index."""
        announced = self.records.announced()
        if announced and not self._has_generations:
            self._undo([image for image, _ in announced])
        elif announced:
            if self._generation >= max(generation for _, generation in announced):
                self.records.confirm(self._generation)
            else:
                self.records.discard(self._generation)
        if self.records.generation != self._generation or len(self.index) < self.records.vectors:
            self._find_lost()

    def _undo(self, images: Sequence[BankImage]) -> None:
        """Take back what an index without generations may hold of an unconfirmed write."""
        known = {image.id for image in images if self.records.by_id(image.id) is not None}
        views = [
            tile_id(image.id, view)
            for image in images
            if image.id not in known
            for view in range(image.vectors)
        ]
        self.index.remove(views)
        self._commit()
        self.records.mark_lost(known, self._generation)
        self.records.discard(self._generation)

    def _find_lost(self) -> None:
        lost: list[str] = []
        images = [image for image in self.records.all() if not image.is_lost]
        for start in range(0, len(images), 4096):
            part = images[start : start + 4096]
            views = {
                image.id: [tile_id(image.id, view) for view in range(image.vectors)]
                for image in part
            }
            present = self.index.present([row for rows in views.values() for row in rows])
            lost += [name for name, rows in views.items() if not present.issuperset(rows)]
        self.records.mark_lost(lost, self._generation)
        if lost:
            logger.warning(
                "%s: the index does not have %d of the %d images on record; add them again",
                self.location, len(lost), len(images),
            )  # fmt: skip

    def _sweep_uploads(self) -> None:
        """Delete kept images, and halves of them, that a process left when it was killed."""
        if self.location is None or not self.location.uploads.is_dir():
            return
        known = self.records.file_names()
        before = time.time() - ABANDONED_AFTER  # younger ones may be on their way into the records
        with os.scandir(self.location.uploads) as entries:
            for entry in entries:
                if (
                    entry.name not in known
                    and KEPT_NAME.fullmatch(entry.name)
                    and entry.is_file(follow_symlinks=False)
                    and entry.stat().st_mtime < before
                ):
                    Path(entry.path).unlink(missing_ok=True)
                    logger.info("%s: deleted %s, which no image needs", self.location, entry.name)

    @property
    def _has_generations(self) -> bool:
        """Whether the index changes in one step: a FAISS file does, a collection does not."""
        return self.location is None or self.location.backend == "faiss"

    @property
    def _generation(self) -> int:
        return self.index.generation if self._has_generations else 0

    def _known_vectors(self, name: str) -> int:
        known = self.records.by_id(name)
        return 0 if known is None else known.vectors

    # ------------------------------------------------------------------ opening

    def _open_records(self) -> Records:
        if self.location is None:
            return Records(None)
        return Records(self.location.folder / RECORDS, read_only=self.read_only)

    def _open_index(self, normalizer: Normalizer) -> "Index":
        location = self.location
        if location is None or location.backend == "faiss":
            from sscd_vec.adapters.faiss import FaissIndex

            if location is None:
                return FaissIndex(normalizer, self._type or "Flat")
            path = Path(location.index)
            if path.exists():
                return FaissIndex.open(path, normalizer, mmap=self.read_only)
            return FaissIndex(normalizer, self._type or "Flat", path=path)
        location.knock()
        from sscd_vec.adapters.milvus import MilvusCollection

        return MilvusCollection(
            location.index,
            location.collection,
            normalizer,
            index_type=self._type,
            id_length=LONGEST_ID,
            token=self._token or "",
        )


def is_writable(location: Location) -> bool:
    """Whether a bank's own files can be changed."""
    records = location.folder / RECORDS
    return os.access(location.folder, os.W_OK) and (
        not records.exists() or os.access(records, os.W_OK)
    )
