"""Images to descriptors: ``Encoder``, and the network, config and files behind it."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sscd_vec.encoder.config import EncoderConfig
    from sscd_vec.encoder.encoder import Encoder
    from sscd_vec.encoder.model import SSCDModel, build_model

__all__ = ["Encoder", "EncoderConfig", "SSCDModel", "build_model"]

_ROOMS = {
    "Encoder": "sscd_vec.encoder.encoder",
    "EncoderConfig": "sscd_vec.encoder.config",
    "SSCDModel": "sscd_vec.encoder.model",
    "build_model": "sscd_vec.encoder.model",
}


def __getattr__(name: str) -> object:
    """Load the file that holds ``name`` on first use (PEP 562): a config needs no torch."""
    if name not in _ROOMS:
        raise AttributeError(f"module 'sscd_vec.encoder' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
