"""A bank: an index, the normalizer it was built with, the model's name, and which files are in it.

``photos.faiss`` (or ``photos.db``, a Milvus Lite folder, or a server's address) holds the vectors;
``photos.faiss.bank/`` beside it holds the rest: ``settings.json``, ``normalizer.safetensors``,
``pictures.sqlite`` and, for pictures added through the server, ``uploads/``. Writes go to the index
first and to the table of pictures after, so a crash leaves pictures that will be added again,
never pictures that are missing.
"""

import json
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from sscd_vec.normalize import Normalizer
from sscd_vec.photos.folder import ImageFile
from sscd_vec.photos.pictures_table import BankPicture, PicturesTable
from sscd_vec.photos.tiles import best_by_image, tile_id

Float32 = NDArray[np.float32]
Backend = Literal["faiss", "milvus"]

FORMAT = 1
LONGEST_ID = 8192  # bytes: a path and the number of a crop
MILVUS_PORT, KNOCK_SECONDS = 19530, 5.0
SETTINGS, NORMALIZER, PICTURES, UPLOADS = (
    "settings.json",
    "normalizer.safetensors",
    "pictures.sqlite",
    "uploads",
)


class BankError(ValueError):
    """A bank that is not there, is another kind of thing, or does not fit what was asked."""


@dataclass(frozen=True)
class BankSettings:
    """What a bank was made with.

    Attributes:
        model: Name, folder or file of the encoder.
        encoder: Its fingerprint.
        tiles: Crops per side each picture was indexed with; 1 for whole pictures only.
        collection: Name of the Milvus collection.
        format: Of this file.
    """

    model: str
    encoder: str
    tiles: int = 1
    collection: str = "photos"
    format: int = FORMAT


class Hit(NamedTuple):
    """A picture of the bank that was found.

    Attributes:
        id: Its id.
        score: The best score of the query (or its crops) with it.
        picture: What the bank knows about it; None if only the index knows it.
    """

    id: str
    score: float
    picture: BankPicture | None


class Bank:
    """An opened bank; made by ``create`` or ``open``.

    Attributes:
        location: Path or address of the index.
        settings: What it was made with.
        normalizer: Its normalizer.
        pictures: Which files it holds.
        index: ``FaissIndex`` or ``MilvusCollection``.
    """

    def __init__(
        self,
        location: str,
        folder: Path,
        settings: BankSettings,
        normalizer: Normalizer,
        token: str | None = None,
    ) -> None:
        """Use ``create`` or ``open``."""
        self.location = location
        self.folder = folder
        self.settings = settings
        self.normalizer = normalizer
        self.pictures = PicturesTable(folder / PICTURES)
        self.index: Any = _open_index(location, settings, normalizer, token)
        self._pending: list[tuple[str, ImageFile, int]] = []

    @classmethod
    def create(
        cls,
        location: str,
        normalizer: Normalizer,
        settings: BankSettings,
        *,
        state: Path | None = None,
        token: str | None = None,
    ) -> "Bank":
        """Make an empty bank.

        Args:
            location: ``bank.faiss``, ``bank.db`` or ``http://host:port``.
            normalizer: Kept with the bank.
            settings: Kept with the bank.
            state: Folder for the bank's own files; beside the index by default.
            token: Of a Milvus server; never written down.

        Raises:
            BankError: The location is of no known kind, or taken by something else.
        """
        folder = state_folder(location, settings.collection, state)
        if backend_of(location) == "faiss" and Path(location).exists():
            raise BankError(
                f"{location} exists but is not a bank ({folder} is missing); choose another name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        normalizer.save(folder / NORMALIZER)
        _write_text(folder / SETTINGS, json.dumps(asdict(settings), indent=1) + "\n")
        return cls(location, folder, settings, normalizer, token)

    @classmethod
    def open(
        cls,
        location: str,
        *,
        collection: str = "photos",
        state: Path | None = None,
        token: str | None = None,
    ) -> "Bank":
        """Open a bank.

        Raises:
            BankError: There is none at this location.
        """
        folder = state_folder(location, collection, state)
        if not exists(location, collection=collection, state=state):
            elsewhere = ", or name its folder with --state" if "://" in location else ""
            raise BankError(
                f"there is no bank at {without_credentials(location)} ({folder} is missing); make "
                f"one with `sscd-vec index PHOTOS --to {without_credentials(location)}`{elsewhere}"
            )
        plain = json.loads((folder / SETTINGS).read_text("utf-8"))
        if plain.get("format") != FORMAT:
            raise BankError(
                f"{folder / SETTINGS}: expected format {FORMAT}, got {plain.get('format')!r}; "
                "a bank of a newer sscd-vec needs that version"
            )
        normalizer = Normalizer.load(folder / NORMALIZER)
        return cls(location, folder, BankSettings(**plain), normalizer, token)

    # ------------------------------------------------------------------ changing it

    def add(
        self,
        files: Sequence[ImageFile],
        descriptors: Sequence[Float32],
        ids: Sequence[str] | None = None,
    ) -> None:
        """Add pictures, or replace them; they are safe after ``commit``.

        Args:
            files: The files.
            descriptors: For each, ``(crops, d)``: the whole picture first.
            ids: Their ids; the files' paths by default.
        """
        names = list(ids) if ids is not None else [file.id for file in files]
        surplus = []
        for name, vectors in zip(names, descriptors, strict=True):
            known = self.pictures.by_id(name)
            if known is not None:
                surplus += [tile_id(name, crop) for crop in range(len(vectors), known.vectors)]
        if surplus:
            self.index.remove(surplus)
        rows = [
            tile_id(name, crop)
            for name, vectors in zip(names, descriptors, strict=True)
            for crop in range(len(vectors))
        ]
        if rows:
            self.index.add(rows, np.concatenate(descriptors))
        self._pending += [
            (name, file, len(vectors))
            for name, file, vectors in zip(names, files, descriptors, strict=True)
        ]

    def remove(self, ids: Sequence[str]) -> int:
        """Remove pictures and commit; ids that are not there are ignored."""
        known = [picture for picture in map(self.pictures.by_id, ids) if picture is not None]
        rows = [tile_id(p.id, crop) for p in known for crop in range(p.vectors)]
        if rows:
            self.index.remove(rows)
            self.commit()
        self.pictures.remove([picture.id for picture in known])
        return len(known)

    def commit(self) -> None:
        """Make everything added so far safe: the index first, then the table."""
        if backend_of(self.location) == "faiss":
            self.index.save(self.location)
        else:
            self.index.flush()
        self.pictures.put(
            [(file, count) for _, file, count in self._pending],
            [name for name, _, _ in self._pending],
        )
        self._pending = []

    def replace_normalizer(self, normalizer: Normalizer) -> None:
        """Use another query side (background, β, thresholds) from now on; vectors stay.

        Raises:
            BankError: Its reference side is another one: the vectors would have to be made anew.
        """
        if normalizer.reference_fingerprint != self.normalizer.reference_fingerprint:
            raise BankError(
                f"{without_credentials(self.location)} was built with reference fingerprint "
                f"{self.normalizer.reference_fingerprint}, this normalizer has "
                f"{normalizer.reference_fingerprint}; make a new bank for it"
            )
        normalizer.save(self.folder / NORMALIZER)
        self.normalizer = self.index.normalizer = normalizer

    # ------------------------------------------------------------------ asking it

    def __len__(self) -> int:
        """How many pictures."""
        return len(self.pictures)

    @property
    def kind(self) -> Literal["search", "tiled"]:
        """Which kind of score its hits have when whole queries are searched."""
        return "tiled" if self.settings.tiles > 1 else "search"

    def search(self, queries: Sequence[Float32], k: int = 10) -> list[list[Hit]]:
        """The ``k`` best pictures of each query, best first.

        Args:
            queries: For each query ``(crops, d)``; one row for an untiled query.
            k: Pictures per query.
        """
        if not queries:
            return []
        stacked = np.concatenate(queries)
        # A picture may own many of the nearest vectors: fetch enough to see k of them.
        tiled = self.settings.tiles > 1
        matches = self.index.search(stacked, k=k * 8 if tiled else k)
        answers: list[list[Hit]] = []
        row = 0
        for query in queries:
            hits = [
                (str(match.id), float(match.score))
                for one in matches[row : row + len(query)]
                for match in one
            ]
            row += len(query)
            if tiled or len(query) > 1:
                hits = best_by_image(hits)
            answers.append([Hit(i, s, self.pictures.by_id(i)) for i, s in hits[:k]])
        return answers

    def close(self) -> None:
        """Let go of files and connections."""
        self.pictures.close()
        if hasattr(self.index, "close"):
            self.index.close()


def backend_of(location: str) -> Backend:
    """Which backend a location means.

    Raises:
        BankError: It ends in neither ``.faiss`` nor ``.db`` and is no address.
    """
    if re.match(r"(?:https?|tcp|unix)://", location) or location.endswith(".db"):
        return "milvus"
    if location.endswith((".faiss", ".index")):
        return "faiss"
    raise BankError(
        f"{location}: expected NAME.faiss, NAME.db (Milvus Lite) or http://HOST:PORT (Milvus)"
    )


def state_folder(location: str, collection: str, state: Path | None = None) -> Path:
    """Where a bank keeps its own files."""
    backend_of(location)
    if state is not None:
        return state
    if "://" in location:
        address = without_credentials(location).partition("://")[2]
        return Path(re.sub(r"[^\w.-]+", "-", address).strip("-") + f"-{collection}.bank")
    return Path(location + ".bank")


def without_credentials(location: str) -> str:
    """A location as it may be printed: no user and no password in an address."""
    return re.sub(r"^(\w+://)[^@/]*@", r"\1", location)


def check_reachable(location: str) -> None:
    """Knock at a server's door: one that is not there should not cost minutes of trying again.

    Raises:
        BankError: Nothing listens there.
    """
    parts = urlsplit(location)
    if parts.scheme not in ("http", "https", "tcp"):
        return
    try:
        port = parts.port or (443 if parts.scheme == "https" else MILVUS_PORT)
        socket.create_connection((parts.hostname or "", port), KNOCK_SECONDS).close()
    except (OSError, ValueError) as error:
        raise BankError(
            f"no Milvus answers at {without_credentials(location)} ({error}); is it running, and "
            "is this its address?"
        ) from error


def exists(location: str, *, collection: str = "photos", state: Path | None = None) -> bool:
    """Whether there is a bank."""
    return (state_folder(location, collection, state) / SETTINGS).is_file()


def _open_index(
    location: str, settings: BankSettings, normalizer: Normalizer, token: str | None
) -> Any:  # noqa: ANN401 - either adapter: the same verbs
    if backend_of(location) == "faiss":
        from sscd_vec.adapters.faiss import FaissIndex

        if Path(location).exists():
            return FaissIndex.open(location, normalizer)
        return FaissIndex(normalizer)
    check_reachable(location)
    from sscd_vec.adapters.milvus import MilvusCollection

    return MilvusCollection(
        location, settings.collection, normalizer, token=token or "", id_length=LONGEST_ID
    )


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".new")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)
