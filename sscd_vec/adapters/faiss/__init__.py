"""``FaissIndex``: any FAISS index behind descriptors in, calibrated matches out."""

try:
    import faiss
except ImportError as error:
    raise ImportError("FaissIndex needs FAISS: pip install faiss-cpu (or sscd-vec[gpu])") from error

from sscd_vec.adapters.faiss.index import FaissIndex
from sscd_vec.adapters.faiss.merge import merge_indexes
from sscd_vec.adapters.faiss.settings import IndexConflict, IndexFileError
from sscd_vec.adapters.products import BackgroundSearch

__all__ = ["BackgroundSearch", "FaissIndex", "IndexConflict", "IndexFileError", "merge_indexes"]
del faiss
