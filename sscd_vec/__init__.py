"""SSCD image copy detection as a plugin for FAISS and Milvus.

The door is lazy: importing ``sscd_vec`` loads neither torch, FAISS nor pymilvus; each name
loads its own room on first use.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sscd_vec.adapters.faiss import FaissIndex
    from sscd_vec.adapters.matches import Matches
    from sscd_vec.adapters.milvus import MilvusCollection
    from sscd_vec.bank import Bank
    from sscd_vec.encoder import Encoder, EncoderConfig
    from sscd_vec.normalize import Normalizer

__all__ = [
    "Bank",
    "Encoder",
    "EncoderConfig",
    "FaissIndex",
    "Matches",
    "MilvusCollection",
    "Normalizer",
    "__version__",
]

_ROOMS = {
    "Bank": "sscd_vec.bank",
    "Encoder": "sscd_vec.encoder",
    "EncoderConfig": "sscd_vec.encoder",
    "FaissIndex": "sscd_vec.adapters.faiss",
    "Matches": "sscd_vec.adapters.matches",
    "MilvusCollection": "sscd_vec.adapters.milvus",
    "Normalizer": "sscd_vec.normalize",
}

try:
    __version__ = version("sscd-vec")
except PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> object:
    """Load the room that holds ``name`` (PEP 562)."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'sscd_vec' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
