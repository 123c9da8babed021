"""Connections: how many, and how long one may stay silent.

Any client can open connections, with a token or without. A connection has ``idle`` seconds to send
the headers of a request, however slowly they trickle in, and a minute beyond ``timeout`` to read
the answer. Where there are too many, the one that has been idle for longest makes room for the new
one: so somebody who opens thousands closes their own, and ``/health`` still answers.
"""

import asyncio
from collections import defaultdict
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from sscd_vec.app.limits import App, Limits
from sscd_vec.app.metrics import Metrics

GRACE = 60.0  # seconds beyond the time a request may take: to end its decoder, to read the answer
MOST_HEADERS = 64 * 1024  # bytes
BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\n\r\n"
    b'{"error": "too many connections; try again in a second"}'
)


class Connections:
    """All open connections, oldest first, by address."""

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        """Nobody is connected."""
        self.limits, self._metrics = limits, metrics
        # Dictionaries keep their order: the first idle one is idle for longest.
        self._open: defaultdict[str, dict[Connection, None]] = defaultdict(dict)

    def __len__(self) -> int:
        """How many."""
        return sum(map(len, self._open.values()))

    def admit(self, connection: "Connection", address: str) -> bool:
        """Take a new connection, if there is room or somebody idle makes room."""
        own = self._open[address]
        crowd = own if len(own) >= self.limits.per_address else self._crowd()
        if crowd is not None and not self._close_idle(crowd):
            self._metrics.refuse("connections")
            return False
        own[connection] = None
        return True

    def rest(self, connection: "Connection", address: str) -> None:
        """Note that a connection is idle from now on: the last to make room."""
        if connection in self._open[address]:
            self._open[address][connection] = self._open[address].pop(connection)

    def leave(self, connection: "Connection", address: str) -> None:
        """Forget a connection."""
        self._open[address].pop(connection, None)
        if not self._open[address]:
            del self._open[address]

    def _crowd(self) -> "dict[Connection, None] | None":
        """The address with most connections, if there are too many altogether."""
        if len(self) < self.limits.connections:
            return None
        return max(self._open.values(), key=len)

    def _close_idle(self, crowd: "dict[Connection, None]") -> bool:
        victim = next((one for one in crowd if not one.is_working), None)
        if victim is None:
            return False
        self._metrics.refuse("idle")
        del crowd[victim]
        victim.abort()
        return True


class Connection(H11Protocol):
    """uvicorn's connection with a clock."""

    crowd: Connections  # set on the class that ``server_config`` makes
    _clock: asyncio.TimerHandle | None = None
    _was_working = True

    @property
    def is_working(self) -> bool:
        """Whether a request is being received, worked on or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or say that there are too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._address = self.client[0] if self.client else ""
        if not self.crowd.admit(self, self._address):
            self.transport.write(BUSY)
            self.transport.close()
        self._look()

    def data_received(self, data: bytes) -> None:
        """Pass it on; bytes alone do not stop the clock, a request does."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        super().connection_lost(exc)
        self.crowd.leave(self, self._address)
        if self._clock is not None:
            self._clock.cancel()

    def abort(self) -> None:
        """Close at once, whether or not the other side reads."""
        self.transport.abort()

    def _look(self) -> None:
        """Start the clock anew when a request begins or has been answered."""
        if self.is_working == self._was_working:
            return
        self._was_working = self.is_working
        if self._clock is not None:
            self._clock.cancel()
        limits = self.crowd.limits
        if not self.is_working:
            self.crowd.rest(self, self._address)
        seconds = limits.timeout + GRACE if self.is_working else limits.idle
        self._clock = self.loop.call_later(seconds, self.abort)


def server_config(
    app: App, limits: Limits, metrics: Metrics, *, host: str = "127.0.0.1", port: int = 0
) -> uvicorn.Config:
    """How uvicorn serves the app: HTTP/1.1 only, with the limits of ``Connections``."""
    crowd = Connections(limits, metrics)
    metrics.gauge("sscd_vec_connections", "Open connections.", lambda: len(crowd))
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=type("LimitedConnection", (Connection,), {"crowd": crowd}),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=max(1, int(limits.idle)),
        timeout_graceful_shutdown=10,
        h11_max_incomplete_event_size=MOST_HEADERS,
    )
