"""``FaissIndex``: any FAISS index behind descriptors in, calibrated matches out.

The only package that imports faiss.
"""

try:
    import faiss
except ImportError as error:
    raise ImportError("FaissIndex needs FAISS: pip install faiss-cpu (or sscd-vec[gpu])") from error

from sscd_vec.adapters.faiss.background import BackgroundSearch
from sscd_vec.adapters.faiss.index import FaissIndex
from sscd_vec.adapters.sidecar import IndexFileError

__all__ = ["BackgroundSearch", "FaissIndex", "IndexFileError"]
del faiss
