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
from sscd_vec.adapters.milvus.collection import MilvusCollection
from sscd_vec.adapters.milvus.connection import MilvusError

__all__ = ["Address", "MilvusCollection", "MilvusError"]
del pymilvus
