"""A normalizer as one safetensors file with JSON metadata."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sscd_vec.normalize.errors import NormalizerFileError

FORMAT = "sscd-vec.normalizer"
VERSION = 1


def write(
    path: str | Path, settings: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write ``settings`` and ``arrays`` to ``path``, whole or not at all."""
    path = Path(path)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": json.dumps(settings, sort_keys=True),
    }
    content = save({name: np.ascontiguousarray(a) for name, a in arrays.items()}, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(partial, 0o666 & ~umask)  # mkstemp makes private files; this is an ordinary one
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read what ``write`` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        NormalizerFileError: If the file is truncated, foreign, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such normalizer file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check(path, metadata)
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        settings: dict[str, Any] = json.loads(metadata["settings"])
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise NormalizerFileError(
            f"{path}: expected a normalizer written by Normalizer.save, but it cannot be read "
            f"({error}); the file is truncated or not a normalizer. Fit and save it again, or copy "
            "it again from where it came"
        ) from error
    return settings, arrays


def _check(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise NormalizerFileError(
            f"{path}: expected a file of format {FORMAT!r}, got {metadata.get('format')!r}; this "
            "safetensors file holds something else (model weights?)"
        )
    version = metadata.get("version", "")
    if not version.isdigit() or int(version) > VERSION:
        raise NormalizerFileError(
            f"{path}: written in format version {version}, this sscd-vec reads up to {VERSION}; "
            "upgrade sscd-vec"
        )
