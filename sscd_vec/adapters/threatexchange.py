"""SSCD for python-threatexchange: a signal type, its index, and the manifest its tools load.

``tx config extensions add sscd_vec.adapters.threatexchange`` is all it takes. The environment may
name others than the shipped model and normalizer (python-threatexchange hands classes around, not
objects)::

    SSCD_VEC_MODEL        name, file or folder for Encoder.from_pretrained
    SSCD_VEC_NORMALIZER   a fitted and calibrated normalizer file; by default the model's own
    SSCD_VEC_FACTORY      FAISS factory of indexes; "Flat" by default

A signal is ``sscd:1:<encoder>:<normalizer>:<base64 of the float16 descriptor>``. Its two
fingerprints say which model made it and which transform it is meant for; others are refused, not
compared. Whitening is never fitted on the bank, and the threshold is the one calibrated for the
scores compared.
"""

import base64
import io
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray
from threatexchange.content_type.content_base import ContentType
from threatexchange.content_type.photo import PhotoContent
from threatexchange.extensions.manifest import ThreatExchangeExtensionManifest
from threatexchange.signal_type import signal_base
from threatexchange.signal_type.index import (
    IndexMatch,
    SignalSimilarityInfoWithSingleDistance,
    SignalTypeIndex,
)

from sscd_vec.adapters.faiss import FaissIndex
from sscd_vec.adapters.faiss.settings import sidecar_path
from sscd_vec.adapters.matches import Match
from sscd_vec.encoder import Encoder
from sscd_vec.normalize import Kind, Normalizer, Proof

T = TypeVar("T")
Float32 = NDArray[np.float32]

MODEL, NORMALIZER, FACTORY = "SSCD_VEC_MODEL", "SSCD_VEC_NORMALIZER", "SSCD_VEC_FACTORY"
PREFIX = "sscd:1"
FINGERPRINT = 16  # hexadecimal digits of each fingerprint in a signal
MAGIC = b"SSCDTX1\n"
BLOCK = 4096
OUTSIDE = "outside"  # in an entry's metadata: whether it lies outside what the normalizer knows
EQUAL = 1 - 2e-6  # cosine of two equal signals, after rounding

_loading = threading.Lock()


class SSCDSignal(signal_base.SimpleSignalType, signal_base.BytesHasher):
    """Images by their SSCD descriptors: survives crops, overlays, filters and recompression."""

    @classmethod
    def get_name(cls) -> str:
        """``sscd``."""
        return "sscd"

    @classmethod
    def get_content_types(cls) -> list[type[ContentType]]:
        """Photos, as python-threatexchange calls images."""
        return [PhotoContent]

    @classmethod
    def get_index_cls(cls) -> type["SSCDIndex[T]"]:
        """``SSCDIndex``."""
        return SSCDIndex

    @classmethod
    def hash_from_bytes(cls, bytes_: bytes) -> str:
        """The signal of an encoded image, or ``""`` if it is not an image that can be read."""
        found = encoder().encode([bytes_], on_error="skip", num_workers=0, show_progress=False)
        return to_signal(found.descriptors[0]) if len(found.descriptors) else ""

    @classmethod
    def validate_signal_str(cls, signal_str: str) -> str:
        """The signal itself, if it is whole and was made for this model and normalizer.

        Raises:
            ValueError: If it is not.
        """
        text = signal_str.strip()
        from_signals([text])
        return text

    @classmethod
    def compare_hash(cls, hash1: str, hash2: str) -> signal_base.SignalComparisonResult:
        """Compare two signals of which neither is the query: the lower of both directed scores.

        A match is a *copy* (``Normalizer.judge``, kind ``"symmetric"``, or without a threshold for
        it that of searches, which is stricter for this score). Two documents, charts or screens
        look alike to the model and a signal has no pixels to tell: the verdict is *unsure*, and
        they match only if the signals are equal. The distance is ``1 - score``.
        """
        rules = normalizer()
        whitened = rules.whiten(from_signals([hash1, hash2]))
        score = float(whitened[0] @ whitened[1] - rules.whitened_biases(whitened).max())
        kind: Kind = "symmetric" if "symmetric" in rules.thresholds else "search"
        verdict = rules.judge(
            score,
            kind=kind,
            in_doubt=bool(rules.outside(whitened).flags.all()),
            proof=Proof(True, "equal signals") if hash1.strip() == hash2.strip() else None,
        )
        if verdict.threshold is None:
            rules.threshold(kind)  # says what to calibrate
        return signal_base.SignalComparisonResult(verdict.grade == "copy", _distance(score))

    @staticmethod
    def get_examples() -> list[str]:
        """Three made-up signals for the configured model and normalizer."""
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(3, normalizer().dim_in))
        return [to_signal(row / np.linalg.norm(row)) for row in rows]


class SSCDIndex(SignalTypeIndex[T]):
    """Signals with an entry each, searched by FAISS at the calibrated threshold."""

    def __init__(self) -> None:
        """Make an empty index for the configured normalizer."""
        self._index = FaissIndex(normalizer(), os.environ.get(FACTORY) or "Flat")
        self._entries: list[T] = []

    def add(self, signal_str: str, entry: T) -> None:
        """Add one entry; the same signal may be added again with another."""
        self.add_all([(signal_str, entry)])

    def add_all(self, entries: Iterable[tuple[str, T]]) -> None:
        """Add entries, some thousand at a time."""
        remaining = iter(entries)
        while block := list(islice(remaining, BLOCK)):
            begin = len(self._entries)
            rows = from_signals([signal for signal, _ in block])
            rules = self._index.normalizer
            flags = rules.outside(rules.whiten(rows)).flags.tolist()
            metadata = [{OUTSIDE: flag} for flag in flags] if rules.domain is not None else None
            self._index.add(np.arange(begin, begin + len(block)), rows, metadata)
            self._entries.extend(entry for _, entry in block)

    def query(self, query: str) -> Sequence[IndexMatch[T]]:
        """Entries that match a signal, best first."""
        return self.query_all([query])[0]

    def query_all(self, queries: Sequence[str]) -> list[list[IndexMatch[T]]]:
        """Entries that match each of many signals: one search for all.

        ``""``, which stands for an image that could not be hashed, matches nothing: ``tx match``
        asks for it, and an error would leave out all images that follow. Between two documents,
        charts or screens only equal signals match, as in ``SSCDSignal.compare_hash``.
        """
        rows = from_signals(filter(None, queries))
        rules = self._index.normalizer
        whitened = rules.whiten(rows) if len(rows) else np.empty((0, rules.dim), np.float32)
        outside, biases = rules.outside(whitened).flags, rules.whitened_biases(whitened)
        found = zip(self._index.range_search(rows, "calibrated"), outside, biases, strict=True)
        certain = iter(
            [match for match in one if not _alike(match, flag) or match.score + bias >= EQUAL]
            for one, flag, bias in found
        )
        return [
            [
                IndexMatch[T](_distance(match.score), self._entries[int(match.id)])
                for match in (next(certain) if query else ())
            ]
            for query in queries
        ]

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._entries)

    def serialize(self, fout: BinaryIO) -> None:
        """Write the FAISS file, its sidecar and the pickled entries one after another."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index.faiss"
            self._index.save(path)
            fout.write(MAGIC)
            for part in (path, sidecar_path(path)):
                fout.write(part.stat().st_size.to_bytes(8, "little"))
                with part.open("rb") as source:
                    shutil.copyfileobj(source, fout)
        pickle.dump(self._entries, fout, protocol=pickle.HIGHEST_PROTOCOL)

    @classmethod
    def deserialize(cls, fin: BinaryIO) -> "SSCDIndex[T]":
        """Read what ``serialize`` wrote. Entries are pickled: read only files you trust.

        Raises:
            ValueError: If it is something else, or truncated.
            FingerprintMismatch: If it was built with another normalizer than the configured one.
        """
        if fin.read(len(MAGIC)) != MAGIC:
            raise ValueError("deserialize: not an index written by SSCDIndex.serialize")
        made = cls.__new__(cls)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "index.faiss"
            for part in (path, sidecar_path(path)):
                with part.open("wb") as target:
                    _copy_exactly(fin, target, int.from_bytes(fin.read(8), "little"))
            made._index = FaissIndex.open(path, normalizer(), trusted=True)
        try:
            made._entries = pickle.load(fin)
        except (EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"deserialize: its entries are truncated or damaged ({error})"
            ) from error
        if len(made._entries) != len(made._index):
            raise ValueError(
                f"deserialize: {len(made._index)} signals but {len(made._entries)} entries"
            )
        return made


def encoder() -> Encoder:
    """The configured model; loaded once per process.

    Raises:
        FingerprintMismatch: If the normalizer was fitted for another.
    """
    with _loading:
        loaded = _load_encoder(os.environ.get(MODEL) or None)
    normalizer().check_encoder(loaded)
    return loaded


def normalizer() -> Normalizer:
    """The configured normalizer, by default the model's own; loaded once per process.

    Raises:
        RuntimeError: If the configured model has none of its own.
    """
    with _loading:
        try:
            return _load_normalizer(os.environ.get(NORMALIZER) or os.environ.get(MODEL) or None)
        except FileNotFoundError as error:
            raise RuntimeError(
                f"sscd: {error} Then set {NORMALIZER} to the fitted and calibrated file"
            ) from error


def to_signal(descriptor: NDArray[np.floating]) -> str:
    """A descriptor as a signal of the configured model and normalizer."""
    raw = np.asarray(descriptor, dtype="<f2").tobytes()
    return f"{_header()}:{base64.b64encode(raw).decode()}"


def from_signals(signals: Iterable[str]) -> Float32:
    """Descriptors ``(n, dim_in)`` of signals, unit length again after float16.

    Raises:
        ValueError: If one is malformed, or of another model or normalizer.
    """
    expected, dim = _header(), normalizer().dim_in
    rows = [_decoded(signal, expected, dim) for signal in signals]
    if not rows:
        return np.empty((0, dim), dtype=np.float32)
    array = np.stack(rows).astype(np.float32)
    unit: Float32 = array / np.linalg.norm(array, axis=1, keepdims=True)
    return unit


def _decoded(signal: str, expected: str, dim: int) -> NDArray[np.float16]:
    header, _, body = signal.rpartition(":")
    if header != expected:
        kind = "made by another model or for another normalizer" if header else "malformed"
        raise ValueError(
            f"sscd signal {kind}: expected it to begin with {expected!r}, got {signal[:60]!r}; "
            "hash the image again with this configuration"
        )
    try:
        row = np.frombuffer(base64.b64decode(body, validate=True), dtype="<f2")
    except ValueError as error:
        raise ValueError(f"sscd signal malformed: {error}") from error
    if len(row) != dim or not np.isfinite(row).all() or not row.any():
        raise ValueError(f"sscd signal malformed: expected {dim} finite numbers, got {len(row)}")
    return row


def _header() -> str:
    rules = normalizer()
    made_by = (rules.encoder or "unknown")[:FINGERPRINT]
    return f"{PREFIX}:{made_by}:{rules.reference_fingerprint[:FINGERPRINT]}"


def _alike(match: Match, is_outside: bool) -> bool:
    """Whether both are known to lie outside what the normalizer knows."""
    return is_outside and (match.metadata or {}).get(OUTSIDE) is not False


def _distance(score: float) -> SignalSimilarityInfoWithSingleDistance[float]:
    return SignalSimilarityInfoWithSingleDistance(round(1 - score, 6))


def _copy_exactly(source: BinaryIO, target: BinaryIO, size: int) -> None:
    while size:
        piece = source.read(min(size, io.DEFAULT_BUFFER_SIZE * 128))
        if not piece:
            raise ValueError("deserialize: the file is truncated")
        target.write(piece)
        size -= len(piece)


@lru_cache(maxsize=1)
def _load_encoder(name: str | None) -> Encoder:
    return Encoder.from_pretrained(name)


@lru_cache(maxsize=1)
def _load_normalizer(name_or_path: str | None) -> Normalizer:
    return Normalizer.from_pretrained(name_or_path)


TX_MANIFEST = ThreatExchangeExtensionManifest(signal_types=(SSCDSignal,))
