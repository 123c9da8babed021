"""A client that waits for its server: reconnects with back-off, keeps credentials out of errors.

Every call made through here may be repeated without harm (upserts, deletes, searches), so a call
that a restarting server failed is simply made again.
"""

import logging
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakSet

import grpc
from pymilvus import MilvusClient, MilvusException
from pymilvus.exceptions import ConnectionConfigException

from sscd_vec.adapters.milvus.address import Address

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
_NOT_LOADED = "not loaded"
_LITE_VERSION = "milvus_lite"  # a server of PyPI's calls itself "2.3.5-lite"
# What a server says while it is away, starting, or handing its data over.
_PASSING = (
    "unavailable",
    "fail connecting",
    "not ready",
    "not healthy",
    _NOT_LOADED,
    "not fully loaded",
    "no available",
    "socket closed",
    "connection refused",
    "connection reset",
    "channel not found",
    "channel distribution is not serviceable",
    "node offline",
    "node not match",
    "node not found",
    "session not found",
    "retry run out",
    "retry timeout",
    "context deadline exceeded",
    "rate limit",
    "find no available",
    "failed to get shard leaders",
    "no replica available",
    "service unavailable",
)

# What it says of a filter it cannot read, which it quotes: that may contain any of the above.
_FINAL = ("cannot parse expression", "failed to create query plan")

# gRPC's words on the 64 MB of a message, and Milvus's on its own limit.
_TOO_LARGE = ("trying to send message larger than max", "maxoutputsize")

_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

logger = logging.getLogger(__name__)


class MilvusError(RuntimeError):
    """Milvus refused or could not be reached. The message names the place, never a credential."""


class AnswerTooLarge(MilvusError):
    """The answer to a call does not fit into one message of the server's: ask for less."""


class Connection:
    """Calls of one client, repeated while the server is away.

    Args:
        address: Where, and with which credentials.
        timeout: Seconds for one call.
        retry_for: Seconds to keep trying while the server is unreachable.
        options: Passed to ``MilvusClient``: ``secure``, ``server_pem_path``, ``client_key_path``, …

        client: A client that someone else made, in place of one for ``address``. It is neither
            replaced nor closed here.

    Attributes:
        closed: Whether ``close`` was called; every other call is refused then.
        is_lite: Whether it is a Milvus Lite file.
    """

    closed = False
    is_lite = False
    _is_given = _shares_file = False

    def __init__(
        self,
        address: Address,
        timeout: float,
        retry_for: float,
        options: Mapping[str, object],
        client: MilvusClient | None = None,
    ) -> None:
        """Connect."""
        secret = sorted(options.keys() & {"token", "user", "password"})
        if secret:
            raise ValueError(
                f"options: expected no credentials, got {', '.join(secret)}; give them as token=, "
                "or user= and password=, where they are kept out of messages"
            )
        self.address = address
        self._timeout, self._retry_for, self._options = timeout, retry_for, dict(options)
        self._client, self._is_given = client, client is not None
        self.is_lite = address.is_lite and client is None
        self._shares_file = self.is_lite and _is_served_to_others(address.uri)
        _open.add(self)
        try:
            self.call("list_collections")
            if client is not None:
                self.is_lite = str(self.call("get_server_version")).startswith(_LITE_VERSION)
        except BaseException:
            self.close()
            raise

    def call(self, verb: str, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Call a method of the client; repeat the call while the server is away.

        Raises:
            AnswerTooLarge: If it found more than it can send at once.
            MilvusError: If Milvus refuses, or stays away longer than ``retry_for``; or if this was
                closed.
        """
        if self.closed:
            raise MilvusError(f"{self.address.uri}: {verb}: closed here; open it again to go on")
        deadline = time.monotonic() + self._retry_for
        pause = FIRST_PAUSE
        while True:
            try:
                return getattr(self._connected(), verb)(*args, timeout=self._timeout, **kwargs)
            except (MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
                if not self._is_passing(error) or time.monotonic() + pause > deadline:
                    self._fail(verb, error)
                logger.warning(
                    "%s: %s did not get through (%s), trying again in %.1f s",
                    self.address.uri,
                    verb,
                    self.address.hide(type(error).__name__),
                    pause,
                )
                released = _NOT_LOADED in str(error).lower()
            self._drop_client()
            time.sleep(pause * random.uniform(0.8, 1.2))
            pause = min(2 * pause, LONGEST_PAUSE)
            if released and "collection_name" in kwargs:
                self._load(str(kwargs["collection_name"]))

    @property
    def client(self) -> MilvusClient:
        """The pymilvus client itself."""
        return self._connected()

    def close(self) -> None:
        """Close the client; with the last one of a Lite file, other processes may open it.

        A file that someone else's client had opened before stays open.
        """
        self._drop_client()
        self.closed = True
        if self._is_given or not self.address.is_lite:
            return
        with _releasing:
            _open.discard(self)
            if not self._shares_file and not _users_of(self.address.uri):
                _lite_servers().release_server(self.address.uri)

    def _connected(self) -> MilvusClient:
        if self._client is None:
            kwargs: dict[str, Any] = dict(self._options)
            if self.address.db_name:
                kwargs["db_name"] = self.address.db_name
            if self.address.token:
                kwargs["token"] = self.address.token
            self._client = MilvusClient(self.address.uri, timeout=self._timeout, **kwargs)
        return self._client

    def _load(self, collection: str) -> None:
        """Load a collection that someone released; a server that restarts does so by itself."""
        try:
            self._connected().load_collection(collection, timeout=self._timeout)
        except (MilvusException, grpc.RpcError, grpc.FutureTimeoutError) as error:
            logger.debug("loading %s: %s", collection, type(error).__name__)  # the call will tell

    def _drop_client(self) -> None:
        if self._is_given:
            return
        client, self._client = self._client, None
        if client is not None:
            try:
                client.close()
            except (MilvusException, grpc.RpcError, ValueError) as error:
                logger.debug("closing a broken client: %s", type(error).__name__)

    def _is_passing(self, error: Exception) -> bool:
        if self.is_lite:
            return False
        if isinstance(error, grpc.FutureTimeoutError):
            return True
        refusal = _rpc_error(error)
        if refusal is not None and refusal.code() in _REFUSALS:
            return False
        if isinstance(error, grpc.RpcError):
            passing = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            return error.code() in passing
        text = str(error).lower()
        if any(phrase in text for phrase in _FINAL):
            return False
        return any(phrase in text for phrase in _PASSING)

    def _fail(self, verb: str, error: Exception) -> None:
        """Raise what went wrong, without credentials."""
        if self.address.is_lite and isinstance(error, ConnectionConfigException):
            raise MilvusError(_why_lite_failed(self.address.uri)) from None
        text = error.message if isinstance(error, MilvusException) else str(error)
        refusal = _rpc_error(error)
        if refusal is not None and refusal.code() in _REFUSALS:
            text = f"{refusal.details()}; check token, user and password"
        message = f"{self.address.uri}: {verb} failed: {self.address.hide(str(text))}"
        clean = self.address.hide(str(error)) == str(error)
        too_large = any(phrase in str(error).lower() for phrase in _TOO_LARGE)
        kind = AnswerTooLarge if too_large else MilvusError
        raise kind(message) from (error if clean else None)


@contextmanager
def closed_on_error(connection: Connection) -> Iterator[None]:
    """Close a connection whose owner could not be made, so that nobody else can close it."""
    try:
        yield
    except BaseException:
        connection.close()
        raise


# Lite serves a file to a whole process and stops for all of it: only the last to close may say so.
_open: WeakSet[Connection] = WeakSet()
_releasing = threading.Lock()


def _users_of(uri: str) -> list[Connection]:
    """Connections of ours to a Lite file."""
    path = os.path.abspath(uri)
    return [each for each in _open if os.path.abspath(each.address.uri) == path]


def _is_served_to_others(uri: str) -> bool:
    """Whether someone else in this process has opened a Lite file before us."""
    users = _users_of(uri)
    if users:
        return users[0]._shares_file
    with suppress(ImportError):
        return os.path.abspath(uri) in getattr(_lite_servers(), "_servers", {})
    return False


def _lite_servers() -> Any:  # noqa: ANN401
    return import_module("milvus_lite.server_manager").server_manager_instance  # optional, untyped


def _rpc_error(error: BaseException | None) -> grpc.RpcError | None:
    """The gRPC error behind another; pymilvus makes errors their own cause: look at each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, grpc.RpcError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def _why_lite_failed(path: str) -> str:
    if _held_by_another(Path(path) / "LOCK"):
        return (
            f"{path}: another process has this Milvus Lite file open, and Lite allows one at a "
            "time. Close it there (close(), or end that process), or let both talk to one server: "
            "`milvus-lite server --data-dir <folder>` or Milvus itself, with http://host:19530 "
            "as uri"
        )
    return (
        f"{path}: Milvus Lite could not open it (its log says why). It may be damaged or written "
        "by another version; restore a copy, or choose another path"
    )


def _held_by_another(lock: Path) -> bool:
    if sys.platform == "win32" or not lock.exists():
        return False
    import fcntl

    with lock.open("rb") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
