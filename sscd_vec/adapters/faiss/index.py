"""``FaissIndex``: any FAISS index behind the verbs of ``Index``.

Queries and references need different transforms, which no FAISS pre-transform can do, so the
normalizer works here and what is written is a plain FAISS file.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import faiss
import numpy as np
from numpy.typing import ArrayLike

from sscd_vec.adapters.arguments import Batch, Float32, Ids, IdType, Rows, Wanted, as_ids
from sscd_vec.adapters.faiss import types
from sscd_vec.adapters.faiss.files import IndexFile
from sscd_vec.adapters.faiss.rows import encoded
from sscd_vec.adapters.faiss.search import Device, Searcher
from sscd_vec.adapters.faiss.storage import FaissMetric, Storage
from sscd_vec.adapters.index import STORED_BLOCK, Index
from sscd_vec.adapters.matches import Matches, Metadata
from sscd_vec.adapters.plain import require_plain
from sscd_vec.normalize import Normalizer


class Options(TypedDict, total=False):
    """What ``open`` and ``adopt`` also take."""

    parameters: Mapping[str, float] | None
    device: Device
    compact_at: float


class FaissIndex(Index):
    """A FAISS index of references: descriptors in, calibrated matches out.

    Any number of threads may search, add and remove at once. One process writes; any number may
    open what it saved.

    Args:
        normalizer: Turns descriptors into vectors and what FAISS returns into scores.
        factory: Any FAISS factory string. Vectors are zero-padded to a dimension it accepts.
        metric: ``"ip"`` or ``"l2"``; the scores are the same.
        path: Where ``commit`` and ``close`` save it; None keeps it in memory until ``save``.
        parameters: Search-time parameters as FAISS names them, e.g. ``{"nprobe": 32}``. By default
            16 lists are probed, graphs searched with an efSearch of 64, and 8 times as many
            candidates refined (``k_factor_rf``) as are asked for.
        device: ``"auto"`` searches on a GPU if FAISS sees one that takes the index, ``"gpu"`` on
            the first or not at all.
        compact_at: Share of dead rows at which the index compacts itself.

    Raises:
        FileExistsError: If there is an index at ``path`` already; ``open`` opens it.
    """

    _searcher: Searcher | None  # None once it is closed

    metric: FaissMetric = "ip"  # that of the storage, once there is one

    def __init__(
        self,
        normalizer: Normalizer,
        factory: str = "Flat",
        metric: FaissMetric = "ip",
        *,
        path: str | Path | None = None,
        parameters: Mapping[str, float] | None = None,
        device: Device = "auto",
        compact_at: float = 0.25,
    ) -> None:
        """Make an empty index; ``open`` reads one, ``adopt`` takes one over."""
        storage = Storage.new(normalizer.lifted_dim, factory, metric)
        used = types.search_parameters(storage.index) | dict(parameters or {})
        self._begin(storage, normalizer, _new_file(path), used, device, compact_at)

    @classmethod
    def open(
        cls,
        path: str | Path,
        normalizer: Normalizer,
        *,
        mmap: bool = False,
        trusted: bool = False,
        **options: Unpack[Options],
    ) -> "FaissIndex":
        """Open what ``save`` or ``commit`` wrote; ``commit`` will save it there again.

        A file that was not saved on this machine is verified and read by a child process first,
        once, because an altered one could crash FAISS.

        Args:
            path: The FAISS file; its sidecar lies beside it.
            normalizer: Must have the reference fingerprint the index was built with.
            mmap: Map both files read-only instead of reading them: instant, shared between
                processes, for searching only.
            trusted: Skip the child process, because you know who made the file.
            options: ``parameters`` (by default what it was saved with), ``device`` and
                ``compact_at``; a mapped index stays on the CPU unless told ``"gpu"``.

        Raises:
            FileNotFoundError: If there is no such file.
            IndexFileError: If the files are truncated, foreign, altered or of two generations.
            FingerprintMismatch: If the normalizer is not the one the index was built with.
        """
        opened = cls.__new__(cls)
        file = IndexFile(Path(path), mmap=mmap, trusted=trusted)
        storage = Storage.open(file, normalizer, read_only=mmap)
        if mmap and options.get("device", "auto") == "auto":
            options["device"] = "cpu"
        opened._begin(storage, normalizer, file, **options)
        return opened

    @classmethod
    def adopt(
        cls,
        index: faiss.Index,
        ids: Ids | None = None,
        normalizer: Normalizer | None = None,
        *,
        metadata: Sequence[Metadata | None] | None = None,
        path: str | Path | None = None,
        **options: Unpack[Options],
    ) -> "FaissIndex":
        """Take over an existing FAISS index of plain unit descriptors, as it is.

        Nothing is rewritten: biases are subtracted on the query side. A normalizer that whitens
        needs other vectors: ``FaissIndex(normalizer).migrate(FaissIndex.adopt(index, ids))``.

        Args:
            index: Of inner products or L2.
            ids: One per row; an ``IndexIDMap`` has its own.
            normalizer: Fitted with ``whitening=None``; by default cosine scores.
            metadata: One JSON object or None per row.
            path: Where ``commit`` saves it.
            options: ``parameters`` (by default as they are), ``device`` and ``compact_at``.

        Raises:
            ValueError: If vectors would have to be rewritten, are not unit descriptors, or give no
                scores.
        """
        adopted = cls.__new__(cls)
        rules = Normalizer.identity(index.d) if normalizer is None else normalizer
        require_plain(rules, index.d, "this index")
        storage = Storage.adopt(index, ids, encoded(None if metadata is None else list(metadata)))
        adopted._begin(storage, rules, _new_file(path), **options)
        return adopted

    # ------------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write the FAISS file and its sidecar; when it returns, all rows are on disk.

        A crash at any moment leaves the previous pair or this one.
        """
        file = self._file
        if file is None or Path(path).resolve() != file.path.resolve():
            file = IndexFile(Path(path), overwrite=True)
        self._save(file)

    def commit(self) -> None:
        """Save the index at its path, if rows were added or removed since it was saved.

        Raises:
            IndexConflict: If another process has saved there meanwhile; nothing is written.
        """
        with self._changing:
            if self._file is None:
                raise RuntimeError(
                    "commit: this index has no path; make it with path=..., or use save(path)"
                )
            if self._storage.unsaved or not self._file.was_saved:
                self._save(self._file)

    def reload_if_changed(self) -> bool:
        """Open the file again if another process has saved it; searches under way finish first.

        Returns:
            Whether it was opened again.

        Raises:
            IndexConflict: If rows were added or removed here that are not committed.
            IndexFileError: If the file is damaged now, or another kind of index.
        """
        if self._file is None or not self._file.has_changed():
            return False
        with self._changing:
            if not self._file.has_changed():  # another thread was first
                return False
            self._take(self._storage.opened_again(self._file, self._normalizer))
        return True

    @property
    def path(self) -> Path | None:
        """Where ``commit`` saves it."""
        return None if self._file is None else self._file.path

    @property
    def generation(self) -> int:
        """How often the index has been saved; the sidecar keeps it."""
        return self._storage.generation

    # ------------------------------------------------------------------ rows

    def train(self, descriptors: ArrayLike | None = None) -> Self:
        """Train lists and quantizers; the first ``add`` does it if it was not done before.

        Args:
            descriptors: To train on; by default the normalizer's background.

        Raises:
            ValueError: If there is no background, or FAISS cannot train on so few.
        """
        rules = self._normalizer
        if descriptors is not None:
            vectors = self._references(np.atleast_2d(np.asarray(descriptors)))
        elif rules.background is not None:
            vectors = rules.background if self._plain else rules.lift.references(rules.background)
        else:
            raise ValueError(
                f"add: {self.factory} must be trained, and this normalizer keeps no background to "
                "train it on; call train(descriptors) first"
            )
        with self._changing:
            self._storage.train(vectors)
        return self

    @property
    def training_rows(self) -> int:
        """How many descriptors ``train`` should get; 0 if it needs none any more."""
        return types.training_rows(self._storage.index)

    def compact(self) -> int:
        """Take the vectors of removed rows out: in place where the type can, else by rebuilding.

        It happens by itself at ``compact_at``, and in ``save`` if the type can remove.

        Returns:
            Rows taken out.
        """
        with self._changing:
            return self._storage.compact()

    def __len__(self) -> int:
        """Number of references."""
        storage = self._storage
        with storage.lock.reading():
            return len(storage)

    def _id_type(self) -> IdType | None:
        return self._storage.table.id_type

    def _add(self, rows: Rows, id_type: IdType) -> None:
        texts = encoded(rows.metadata)
        with self._changing:
            storage = self._storage
            storage.require_writable()
            as_ids(rows.ids[:1], storage.table.id_type)  # another thread may have been first
            new = not len(storage.table)  # the ids of a call do not repeat
            at_once = types.added_at_once(storage.index)
            if len(rows.ids) > at_once:
                storage.reserve(len(rows.ids))
            for begin in range(0, len(rows.ids), at_once):
                part = slice(begin, begin + at_once)
                vectors = self._references(rows.descriptors[part])
                if not storage.index.is_trained:
                    self.train()
                storage.append(rows.ids[part], vectors, texts and texts[part], id_type, new)
            storage.compact_if_due(self._compact_at)

    def _remove(self, ids: list[Any]) -> int:
        with self._changing:
            removed = self._storage.remove(ids)
            self._storage.compact_if_due(self._compact_at)
        return removed

    def _present(self, ids: list[Any]) -> set[Any]:
        storage = self._storage
        with storage.lock.reading():
            return storage.table.row_of.keys() & set(ids)

    def _stored(self) -> Iterator[Batch]:
        return self._storage.batches(STORED_BLOCK)

    # ------------------------------------------------------------------ searching

    def _nearest(self, vectors: Float32, k: int, wanted: Wanted) -> Matches:
        searcher = self._opened()
        with searcher.storage.lock.reading():
            return searcher.nearest(vectors, k, wanted.metadata)

    def _within(self, vectors: Float32, bound: float, wanted: Wanted) -> Matches:
        searcher = self._opened()
        with searcher.storage.lock.reading():
            return searcher.within(vectors, bound, wanted.metadata)

    def to_gpu(self, device: int = 0) -> Self:
        """Search on a GPU from now on. Writes stay on the CPU index, copied over when needed.

        Raises:
            RuntimeError: If FAISS has no such GPU or cannot put this index there.
        """
        self._opened().use_gpu(device)
        return self

    def to_cpu(self) -> Self:
        """Search on the CPU from now on."""
        self._opened().use("cpu")
        return self

    # ------------------------------------------------------------------ the rest

    @property
    def index(self) -> faiss.Index:
        """The FAISS index itself (its rows include dead ones until ``compact``)."""
        return self._storage.index

    @property
    def factory(self) -> str:
        """FAISS factory string the index was made with."""
        return self._storage.factory

    def __repr__(self) -> str:
        """Kind and size."""
        if self._searcher is None:
            return "FaissIndex(closed)"
        return f"FaissIndex({self.factory!r}, metric={self.metric!r}, {len(self)} references)"

    def _close(self, commit: bool) -> None:
        with self._changing:
            if self._searcher is None:
                return
            if commit and self._file is not None and self._storage.unsaved:
                self.commit()
            self._searcher = None

    def _begin(
        self,
        storage: Storage,
        normalizer: Normalizer,
        file: IndexFile | None,
        parameters: Mapping[str, float] | None = None,
        device: Device = "auto",
        compact_at: float = 0.25,
    ) -> None:
        if not compact_at > 0:
            raise ValueError(f"compact_at: expected a share above 0 (1: never), got {compact_at}")
        super().__init__(normalizer)
        self.parameters = dict(parameters or {})
        self._file, self._device, self._compact_at = file, device, compact_at
        self._plain = storage.plain
        self._changing = threading.RLock()  # one thread at a time adds, removes, saves, reloads
        self._take(storage)

    def _take(self, storage: Storage) -> None:
        """Search this storage from now on."""
        types.set_parameters(storage.index, storage.factory, self.parameters)
        searcher = Searcher(storage)
        searcher.use(self._device)
        self._searcher, self.metric = searcher, storage.metric

    def _opened(self) -> Searcher:
        if self._searcher is None:
            raise RuntimeError("this index is closed; open it again to go on")
        return self._searcher

    @property
    def _storage(self) -> Storage:
        return self._opened().storage

    def _save(self, file: IndexFile) -> None:
        with self._changing:
            self._storage.save(file, self._normalizer.reference_fingerprint)
            if file is self._file:
                self._storage.unsaved = False


def _new_file(path: str | Path | None) -> IndexFile | None:
    if path is not None and Path(path).exists():
        raise FileExistsError(f"{path} exists; use FaissIndex.open, or another path")
    return None if path is None else IndexFile(Path(path))
