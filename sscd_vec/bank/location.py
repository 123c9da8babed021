"""Where a bank lies.

``known.faiss`` (or ``known.db``, a Milvus Lite folder, or ``http://host:19530/known``) holds the
vectors; ``known.faiss.bank/`` beside it holds the rest: ``settings.json``,
``normalizer.safetensors``, ``images.sqlite``, for images added without a file ``uploads/``, and
local features for verification in ``features``, if they are kept.
"""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

Backend = Literal["faiss", "milvus"]

MILVUS_PORT, KNOCK_SECONDS = 19530, 5.0
DEFAULT_COLLECTION = "images"
SETTINGS, NORMALIZER, RECORDS, UPLOADS, LOCK, FEATURES = (
    "settings.json",
    "normalizer.safetensors",
    "images.sqlite",
    "uploads",
    "lock",
    "features",
)


class BankError(ValueError):
    """A bank that is missing, damaged, of another kind, or does not fit what was asked."""


@dataclass(frozen=True)
class Location:
    """Where a bank's vectors and its own files lie.

    Attributes:
        index: The FAISS file, the Lite folder, or the server's address.
        backend: Which index that is.
        collection: Name of the collection, on Milvus.
        folder: The bank's own files.
    """

    index: str
    backend: Backend
    collection: str
    folder: Path

    @classmethod
    def parse(
        cls,
        location: str | os.PathLike[str],
        *,
        collection: str | None = None,
        state: str | os.PathLike[str] | None = None,
    ) -> "Location":
        """Read ``NAME.faiss``, ``NAME.db`` or ``http://HOST:PORT/[DATABASE/]COLLECTION``.

        Args:
            location: What the user wrote.
            collection: Instead of the one in the address.
            state: Folder for the bank's own files; beside the index by default, and in the
                working directory for a server.

        Raises:
            BankError: It is of no known kind.
        """
        text = os.fspath(location)
        own = None if state is None else Path(state)
        if re.match(r"(?:https?|tcp)://", text):
            parts = urlsplit(text)
            *database, named = parts.path.strip("/").split("/")
            name = collection or named or DEFAULT_COLLECTION
            if collection and named:
                database = [*database, named]
            uri = urlunsplit((parts.scheme, parts.netloc, "/".join(database), "", ""))
            plain = without_credentials(uri).partition("://")[2]
            beside = Path(re.sub(r"[^\w.-]+", "-", plain).strip("-") + f"-{name}.bank")
            return cls(uri, "milvus", name, own or beside)
        if text.endswith(".db") or text.startswith("unix:"):
            beside = (
                Path(re.sub(r"[^\w.-]+", "-", text)) if text.startswith("unix:") else Path(text)
            )
            folder = own or beside.with_name(beside.name + ".bank")
            return cls(text, "milvus", collection or DEFAULT_COLLECTION, folder)
        if text.endswith((".faiss", ".index")):
            return cls(text, "faiss", "", own or Path(text + ".bank"))
        raise BankError(
            f"{without_credentials(text)}: expected NAME.faiss, NAME.db (Milvus Lite) or "
            "http://HOST:PORT/COLLECTION (a Milvus server)"
        )

    @property
    def exists(self) -> bool:
        """Whether a bank was made here."""
        return (self.folder / SETTINGS).is_file()

    @property
    def uploads(self) -> Path:
        """Where images without a file are kept; inside the bank even if someone made it a link."""
        return self.folder.resolve() / UPLOADS

    def is_upload(self, path: Path) -> bool:
        """Whether a file is an image that the bank itself keeps."""
        return path.resolve().is_relative_to(self.uploads)

    def require_regular_files(self) -> None:
        """See that nothing of the bank is a pipe or a device, or leads elsewhere.

        Raises:
            BankError: Something is.
        """
        own = [self.folder / name for name in (SETTINGS, NORMALIZER, RECORDS)]
        index = [Path(self.index)] if self.backend == "faiss" else []
        for path in (*own, *index):
            if path.exists() and not path.is_file():
                raise BankError(f"{path} is not a regular file; the bank is damaged, or a trap")
        if self.uploads.is_symlink():
            raise BankError(f"{self.uploads} is a link; make it a folder, or move the bank itself")

    def require_free(self, create: bool) -> None:
        """Refuse to make a bank where none was wanted, or where something else is.

        Raises:
            BankError: ``create`` is false, or another thing has this name.
        """
        if not create:
            raise BankError(
                f"there is no bank at {self} ({self.folder} is missing); make one with "
                f"`sscd-vec index IMAGES --to {self}` or Bank({str(self)!r}).add(images), or "
                "name the folder that holds the rest of it (state=, --state)"
            )
        if self.backend == "faiss" and Path(self.index).exists():
            raise BankError(
                f"{self} exists but is not a bank ({self.folder} is missing); choose another "
                "name, or search it with FaissIndex.open"
            )
        self.knock()

    @property
    def is_lite(self) -> bool:
        """Whether the index is a Milvus Lite folder, which one process at a time can open."""
        return self.backend == "milvus" and "://" not in self.index

    def __str__(self) -> str:
        """The location as it may be printed: no user and no password."""
        shown = without_credentials(self.index)
        return f"{shown}/{self.collection}" if "://" in self.index else shown

    def knock(self) -> None:
        """See whether a server listens: one that does not should not cost minutes of retries.

        Raises:
            BankError: Nothing listens there.
        """
        parts = urlsplit(self.index)
        if parts.scheme not in ("http", "https", "tcp"):
            return
        try:
            port = parts.port or (443 if parts.scheme == "https" else MILVUS_PORT)
            socket.create_connection((parts.hostname or "", port), KNOCK_SECONDS).close()
        except (OSError, ValueError) as error:
            raise BankError(
                f"no Milvus answers at {self} ({error}); is it running, and is this its address?"
            ) from error


def without_credentials(location: str) -> str:
    """A location as it may be printed: no user and no password in an address."""
    return re.sub(r"^(\w+://)[^@/]*@", r"\1", location)
