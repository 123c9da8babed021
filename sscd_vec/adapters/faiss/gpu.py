"""A copy of an index on a GPU, for searching; what is written goes to the index on the CPU."""

import logging
import threading

import faiss
import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.faiss.store import Store

LARGEST_K = 2048  # neighbours of a search, and lists that it probes

logger = logging.getLogger(__name__)


def gpus() -> int:
    """GPUs that FAISS sees."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0


class GpuCopy:
    """The index of a store on a GPU: made at once, and again when the index has changed."""

    def __init__(self, store: Store, device: int, *, or_cpu: bool = False) -> None:
        """Copy the index over.

        Args:
            store: Holds the index.
            device: Number of the GPU.
            or_cpu: If the GPU refuses the index, now or when it has grown, warn and be of no use,
                instead of raising.

        Raises:
            RuntimeError: If the GPU refuses it.
        """
        self._store, self._device, self._or_cpu = store, device, or_cpu
        self._lock = threading.Lock()  # a GPU's index serves one thread at a time
        self._copy: faiss.Index | None = None
        self._copied = -1  # the store's changes when the copy was made
        self._refused = False
        self.ready()

    def ready(self) -> bool:
        """Whether there is a copy of the index as it is now."""
        with self._lock:
            return self._fresh() is not None

    def search(
        self, vectors: NDArray[np.float32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
        """Values and rows of the ``k`` best; None if the CPU has to find them."""
        lists = faiss.try_extract_index_ivf(self._store.index)
        if max(k, 0 if lists is None else lists.nprobe) > LARGEST_K:
            return None
        with self._lock:
            copy = self._fresh()
            if copy is None:
                return None
            values, rows = copy.search(vectors, k)
            return values, rows

    def _fresh(self) -> faiss.Index | None:
        if self._refused or self._copied == self._store.changes:
            return self._copy
        self._copy = None  # makes room for the next one
        try:
            resources = faiss.StandardGpuResources()
            self._copy = faiss.index_cpu_to_gpu(resources, self._device, self._store.index)
        except RuntimeError as error:
            problem = f"GPU {self._device} refuses {self._store.factory} ({error})"
            if not self._or_cpu:
                raise RuntimeError(f"{problem}; use to_cpu(), or build another type") from error
            logger.warning("%s: it is searched on the CPU", problem)
            self._refused = True
        self._copied = self._store.changes
        return self._copy
