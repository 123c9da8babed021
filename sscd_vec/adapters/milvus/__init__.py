"""``MilvusCollection``: a Milvus Lite file, server or cluster behind the same verbs as FAISS.

The only package that imports pymilvus.
"""

try:
    import pymilvus
except ImportError as error:
    raise ImportError(
        "MilvusCollection needs pymilvus: pip install pymilvus milvus-lite"
    ) from error

from sscd_vec.adapters.milvus.address import Address
from sscd_vec.adapters.milvus.connection import MilvusError
from sscd_vec.adapters.milvus.index import MilvusCollection
from sscd_vec.adapters.milvus.settings import ForeignCollection

__all__ = ["Address", "ForeignCollection", "MilvusCollection", "MilvusError"]
del pymilvus
