"""Vectors and their rows, kept in step: a FAISS index, its ids and metadata, and their files.

Row ``i`` of the FAISS index is row ``i`` of the table. Everything here is about rows; descriptors
and scores are the business of ``FaissIndex``.
"""

import logging
from pathlib import Path
from typing import Any, Literal, get_args

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.arguments import IdType
from sscd_vec.adapters.columns import RowTable
from sscd_vec.adapters.faiss import files, layout, scorable
from sscd_vec.adapters.saving import save_pair
from sscd_vec.adapters.sidecar import IndexFileError
from sscd_vec.normalize import Normalizer

FaissMetric = Literal["ip", "l2"]
Float32 = NDArray[np.float32]

METRICS: dict[FaissMetric, int] = {"ip": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
FEWEST_DEAD = 1000  # below this, tombstones cost less than a compaction

logger = logging.getLogger(__name__)


class Store:
    """One FAISS index and the table of its rows.

    Attributes:
        index: The FAISS index; its rows include dead ones until ``compact``.
        table: Ids and metadata by row.
        factory: FAISS factory string the index was made with.
        metric: ``"ip"`` or ``"l2"``.
        changes: How often the FAISS index has changed; who keeps a copy looks here.
    """

    def __init__(
        self,
        index: faiss.Index,
        table: RowTable,
        factory: str,
        metric: FaissMetric,
        *,
        generation: int = 0,
        read_only: bool = False,
    ) -> None:
        """Take an index and its table."""
        self.index, self.table, self.factory, self.metric = index, table, factory, metric
        self.changes = 0
        self._generation, self._read_only = generation, read_only
        self._stuck = False  # dead rows cannot be taken out

    @classmethod
    def new(cls, dim: int, factory: str, metric: FaissMetric) -> "Store":
        """An empty one for vectors of ``dim`` dimensions, which are padded as the factory needs.

        Raises:
            ValueError: If the metric is unknown or FAISS refuses the factory.
        """
        if metric not in METRICS:
            raise ValueError(
                f"metric: expected 'ip' or 'l2', got {metric!r} (stored vectors all have the same "
                "length, so 'ip' orders exactly as cosine does)"
            )
        return cls(layout.new_index(dim, factory, METRICS[metric]), RowTable(), factory, metric)

    @classmethod
    def open(cls, path: Path, normalizer: Normalizer, mmap: bool) -> "Store":
        """Read what ``save`` wrote; see ``FaissIndex.open`` for what may be wrong with it."""
        about, table, index = files.read_pair(path, normalizer, mmap)
        for metric in get_args(FaissMetric):
            if metric == about.metric:
                return cls(
                    index,
                    table,
                    about.factory,
                    metric,
                    generation=about.generation,
                    read_only=mmap,
                )
        raise IndexFileError(f"{path}: expected metric ip or l2, got {about.metric!r}")

    def save(self, path: Path, reference_fingerprint: str) -> None:
        """Write index and sidecar; a crash at any moment leaves the previous pair or this one."""
        self.require_writable()
        if path.is_dir():
            raise IsADirectoryError(f"{path}: expected the path of a file, got a folder")
        if self.table.dead and layout.can_remove(self.index):
            self.compact()
        if self.index.ntotal != len(self.table):
            raise RuntimeError(
                f"save: {self.index.ntotal} vectors but {len(self.table)} ids; the FAISS index "
                "was changed from outside. Nothing was written"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "reference_fingerprint": reference_fingerprint,
            "factory": self.factory,
            "metric": self.metric,
            "dim": int(self.index.d),
            "rows": int(self.index.ntotal),
            "generation": self._generation + 1,
        }
        save_pair(path, files.writer(self.index), about, self.table.arrays())
        self._generation += 1

    def __len__(self) -> int:
        """Number of living rows."""
        return len(self.table) - self.table.dead

    def alive(self) -> NDArray[np.bool_] | None:
        """``(rows,)`` whether each row is alive; None if all are."""
        return self.table.alive() if self.table.dead else None

    def train(self, vectors: Float32) -> None:
        """Train lists and quantizers.

        Raises:
            ValueError: If FAISS cannot train on so few, or made of them what gives no scores.
        """
        self.require_writable()
        self.changes += 1
        if self.index.ntotal:
            raise RuntimeError("train: expected an empty index; make a new one to train it anew")
        try:
            self.index.train(layout.pad(vectors, self.index.d))
        except RuntimeError as error:
            raise ValueError(
                f"train: FAISS cannot train {self.factory} on {len(vectors)} descriptors; give "
                f"more to train(descriptors), or use fewer lists ({error})"
            ) from error
        problem = scorable.problem(self.index, self.factory, METRICS[self.metric])
        if problem:
            self.index.is_trained = False  # or the next add would take it as it is
            raise ValueError(
                f"train: {self.factory!r}, trained on {len(vectors)} descriptors, {problem}"
            )

    def append(
        self,
        ids: list[Any],
        vectors: Float32,
        metadata: list[str] | None,
        id_type: IdType,
        new: bool,
    ) -> None:
        """Append rows, letting older rows of the same ids die; there are none if all are ``new``.

        Raises:
            RuntimeError: If FAISS refuses them; the rows before stay as they are.
        """
        self.changes += 1
        try:
            self.index.add(layout.pad(vectors, self.index.d))
        except RuntimeError as error:
            if not len(self.table):
                self.index.reset()  # a graph that could not be built has its vectors already
            raise RuntimeError(
                f"add: FAISS cannot add {len(ids)} rows to {self.factory} with {len(self.table)} "
                f"({error}); NSG takes all of its rows, more than 100, in one add of at most "
                "65 536: use HNSW where they come bit by bit"
            ) from error
        self.table.append(ids, metadata, id_type, new)

    def compact(self) -> int:
        """Take dead rows out, in place where the type can; return how many there were."""
        self.require_writable()
        dead = self.table.dead
        if dead:
            self.changes += 1
            self.index = layout.without_dead(self.index, self.table.alive())
            self.table = self.table.compacted()
        return dead

    def compact_if_due(self, share: float) -> None:
        """Compact if more than this share of the rows is dead and the type lets them go."""
        if self._stuck or self.table.dead <= max(FEWEST_DEAD, share * len(self.table)):
            return
        logger.info("compacting %s: %d dead rows", self.factory, self.table.dead)
        try:
            self.compact()
        except RuntimeError as error:
            self._stuck = True
            logger.warning("%s", error)

    def require_writable(self) -> None:
        """Refuse a change of what is mapped from a file."""
        if self._read_only:
            raise RuntimeError("this index is mapped read-only; open it without mmap to change it")
