"""A normalizer as settings and arrays: its two fingerprints, and one safetensors file.

Stored vectors depend on the *reference side* (encoder, whitening, layout); the *query side* may
change without touching an index. A file holds both, and their fingerprints.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from sscd_vec import models
from sscd_vec.files import write_whole
from sscd_vec.normalize import domain as domains
from sscd_vec.normalize.calibration import FalseMatchCurve, Threshold
from sscd_vec.normalize.score_norm import ScoreNorm
from sscd_vec.normalize.whitening import Whitening

if TYPE_CHECKING:
    from sscd_vec.normalize.normalizer import Normalizer

FORMAT = "sscd-vec.normalizer"
VERSION = 2  # 1 had neither curves nor a domain

Settings = dict[str, Any]
Arrays = dict[str, NDArray[Any]]


class NormalizerFileError(ValueError):
    """A file is not a normalizer this version can read: truncated, foreign, altered or newer."""


class FingerprintMismatch(ValueError):
    """Two things that must come from the same encoder or normalizer do not."""


class HasFingerprint(Protocol):
    """An encoder, as far as a normalizer is concerned."""

    @property
    def fingerprint(self) -> str:
        """What distinguishes its descriptors from every other encoder's."""
        ...


def fingerprint_of(encoder: str | HasFingerprint | None) -> str | None:
    """The fingerprint of an encoder, given as itself or as that fingerprint."""
    return encoder if encoder is None or isinstance(encoder, str) else encoder.fingerprint


def require_encoder(fitted_with: str | None, encoder: str | HasFingerprint) -> None:
    """Refuse another encoder than the one a normalizer was fitted with, if that one is known.

    Raises:
        FingerprintMismatch: Naming both.
    """
    given = fingerprint_of(encoder)
    if fitted_with is not None and given != fitted_with:
        raise FingerprintMismatch(
            f"this normalizer was fitted on descriptors of encoder {fitted_with}, got encoder "
            f"{given}; use that encoder, or fit a normalizer on this one's descriptors"
        )


def shipped_whitening(encoder: str | None) -> tuple[Whitening | None, domains.Domain | None]:
    """What is shipped with the model of this fingerprint: its whitening, and a domain in it."""
    for name in models.shipped() if encoder is not None else ():
        fields, _ = read(models.normalizer_path(name))
        if fields["encoder"] == encoder:
            return fields["whitening"], fields["domain"]
    return None, None


def reference_fingerprint(normalizer: "Normalizer") -> str:
    """Digest of what stored vectors depend on."""
    return _digest(*_reference_side(normalizer))


def query_fingerprint(normalizer: "Normalizer") -> str:
    """Digest of everything."""
    settings, arrays = _query_side(normalizer)
    return _digest({"reference": normalizer.reference_fingerprint, **settings}, arrays)


def write(path: str | Path, normalizer: "Normalizer") -> None:
    """Write a normalizer to ``path``, whole or not at all."""
    settings, arrays = _reference_side(normalizer)
    query_settings, query_arrays = _query_side(normalizer)
    background = normalizer.background
    facts = {
        "background_count": 0 if background is None else len(background),
        "reference_fingerprint": normalizer.reference_fingerprint,
        "query_fingerprint": normalizer.query_fingerprint,
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "settings": json.dumps(settings | query_settings | facts, sort_keys=True),
    }
    named = {name: np.ascontiguousarray(a) for name, a in (arrays | query_arrays).items()}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(named, metadata))


def read(path: str | Path) -> tuple[dict[str, Any], tuple[str, str]]:
    """Read what ``write`` wrote: the fields of a normalizer, and the fingerprints it must have.

    Raises:
        FileNotFoundError: If there is no such file.
        NormalizerFileError: If the file is truncated, foreign, incomplete, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such normalizer file; `sscd-vec normalize fit` makes one"
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_format(path, metadata)
            arrays = {name: file.get_tensor(name) for name in file.keys()}
        settings: Settings = json.loads(metadata["settings"])
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise NormalizerFileError(
            f"{path}: expected a normalizer written by Normalizer.save, but it cannot be read "
            f"({error}); the file is truncated or not a normalizer. Fit and save it again, or copy "
            "it again from where it came"
        ) from error
    try:
        fingerprints = settings["reference_fingerprint"], settings["query_fingerprint"]
        return _fields(settings, arrays), fingerprints
    except (KeyError, TypeError, ValueError) as error:
        raise NormalizerFileError(
            f"{path}: incomplete normalizer ({error!r}); fit and save it again"
        ) from error


def _check_format(path: Path, metadata: Mapping[str, str]) -> None:
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


def _digest(settings: Settings, arrays: Arrays) -> str:
    """128 bits of SHA-256 over JSON settings and the names, types, shapes and bytes of arrays."""
    sha = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(f"{name}:{array.dtype.str}:{array.shape}".encode())
        sha.update(array.data)
    return sha.hexdigest()[:32]


def _reference_side(normalizer: "Normalizer") -> tuple[Settings, Arrays]:
    """What stored vectors depend on: encoder, whitening, layout."""
    settings: Settings = {
        "layout": "unit+2" if normalizer.unit else "length+3",
        "dim_in": normalizer.dim_in,
        "encoder": normalizer.encoder,
        "unit": normalizer.unit,
        "max_length": normalizer.max_length,
        "whitening": None,
    }
    w = normalizer.whitening
    if w is None:
        return settings, {}
    settings["whitening"] = {
        "mode": w.mode,
        "eps": w.eps,
        "count": w.count,
        "l2_before": w.l2_before,
        "unit_input": w.unit_input,
    }
    return settings, {
        "whitening.mean": w.mean,
        "whitening.matrix": w.matrix,
        "whitening.variances": w.variances,
    }


def _query_side(normalizer: "Normalizer") -> tuple[Settings, Arrays]:
    """What may change without touching an index: bias, background, thresholds, curves, domain."""
    norm, thresholds = normalizer.score_norm, normalizer.thresholds
    arrays: Arrays = {}
    settings: Settings = {
        "score_norm": None
        if norm is None
        else {"beta": norm.beta, "n": norm.n, "n_end": norm.n_end},
        "query_square": normalizer.lift.query_square,
        "background_precision": normalizer.background_precision,
        "thresholds": [thresholds[kind].to_dict() for kind in sorted(thresholds)],
    }
    if normalizer.background is not None:
        arrays["background"] = normalizer.background.astype(normalizer.background_precision)
    if normalizer.curves:  # named only if there are any: fingerprints of version 1 stay valid
        settings["curves"] = []
    for kind, curve in sorted(normalizer.curves.items()):
        record, arrays[f"curve.{kind}"] = curve.to_record()
        settings["curves"].append(record)
    if normalizer.domain is not None:
        arrays |= normalizer.domain.arrays()
    return settings, arrays


def _fields(settings: Settings, arrays: Arrays) -> dict[str, Any]:
    """The constructor's arguments back from both sides."""
    whitening = settings["whitening"]
    if whitening is not None:
        whitening = Whitening(
            **whitening,
            mean=arrays["whitening.mean"],
            matrix=arrays["whitening.matrix"],
            variances=arrays["whitening.variances"],
        )
    norm, background = settings["score_norm"], arrays.get("background")
    domain = {name: array for name, array in arrays.items() if name.startswith(domains.PREFIX)}
    return {
        "dim_in": settings["dim_in"],
        "whitening": whitening,
        "score_norm": None if norm is None else ScoreNorm(**norm),
        "background": None if background is None else background.astype(np.float32),
        "encoder": settings["encoder"],
        "unit": settings["unit"],
        "max_length": settings["max_length"],
        "background_precision": settings["background_precision"],
        "thresholds": {t["kind"]: Threshold.from_dict(t) for t in settings["thresholds"]},
        "curves": {
            c["kind"]: FalseMatchCurve.from_record(c, arrays[f"curve.{c['kind']}"])
            for c in settings.get("curves", ())
        },
        "domain": domains.Domain.from_arrays(domain) if domain else None,
    }
