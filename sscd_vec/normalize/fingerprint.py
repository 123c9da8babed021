"""Fingerprints: short digests of settings and arrays, and of the encoder something came from."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class HasFingerprint(Protocol):
    """An encoder, as far as a normalizer is concerned."""

    @property
    def fingerprint(self) -> str:
        """What distinguishes its descriptors from every other encoder's."""
        ...


def fingerprint_of(encoder: str | HasFingerprint | None) -> str | None:
    """The fingerprint of an encoder, given as itself or as that fingerprint."""
    return encoder if encoder is None or isinstance(encoder, str) else encoder.fingerprint


def digest(settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> str:
    """128 bits of SHA-256 over JSON settings and the names, types, shapes and bytes of arrays."""
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name}:{array.dtype.str}:{array.shape}".encode())
        sha.update(array.data)
    return sha.hexdigest()[:32]
