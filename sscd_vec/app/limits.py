"""Who may ask, how much at once, for how long: one ASGI layer around the whole app.

Order of refusal, cheapest first: unknown host (400, DNS rebinding), foreign origin (403), declared
body too large (413), no token (401), too many requests waiting (503 with ``Retry-After``). Then
the body is counted as it arrives (413), with those of the other requests (503), against a clock
(408 while receiving, 503 afterwards). Only then the request takes one of the slots, so uploads that
trickle in keep nobody waiting.
``connections`` guards what comes before a request: idle connections and slow headers.
"""

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from sscd_vec.app.metrics import Metrics

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGE_BODY, PIECE = 2**18, 2**16  # bytes
FORMS = (b"multipart/form-data", b"application/octet-stream")
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
# The page itself and liveness carry no data, so they need no token and no slot.
OPEN = ("/", "/docs", "/openapi.json", "/health")
OPEN_FOLDER = "/static/"
ROUTES = (
    "", "docs", "openapi.json", "health", "info", "metrics", "bank", "image", "static", "search",
    "add", "remove", "heatmap",
)  # fmt: skip
SECURE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """What one client, or all of them, may ask for.

    Attributes:
        body: Bytes of one request with images.
        text: Bytes of one without: JSON grows thirtyfold in memory, and nothing goes on meanwhile.
        files: Images of one request.
        pixels: Width times height of one image, checked before it is decoded.
        concurrent: Requests worked on at once.
        waiting: Further requests that may wait; beyond, 503.
        timeout: Seconds for one request, upload included.
        decoding: Seconds for decoding one image; then its decoder is killed.
        idle: Seconds a connection may take to send a request's headers.
        connections: Open connections; beyond, the one idle for longest is closed.
        per_address: The same for the connections of one address.
    """

    body: int = 32 * 2**20
    text: int = 4 * 2**20
    files: int = 16
    pixels: int = 64_000_000
    concurrent: int = 16
    waiting: int = 64
    timeout: float = 30.0
    decoding: float = 8.0
    idle: float = 10.0
    connections: int = 512
    per_address: int = 256

    @property
    def together(self) -> int:
        """Pixels that the images of one request may have together."""
        return 4 * self.pixels

    @property
    def bodies(self) -> int:
        """Bytes that all requests together may have sent and not yet had answered."""
        return 3 * self.body


class Refused(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: What was expected and what came.
        unread: Whether the rest of the body is left unread, and the connection closed.
    """

    def __init__(self, status: int, message: str, *, unread: bool = False) -> None:
        """Keep all of it."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.unread = unread or status in (408, 413)

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the status."""
        headers = {"connection": "close"} if self.unread else {}
        if self.status == 503:
            headers["retry-after"] = "1"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


class Guard:
    """The layer. ``hosts`` is None where any host name is right (bound beyond loopback)."""

    def __init__(
        self,
        app: App,
        limits: Limits,
        metrics: Metrics,
        *,
        token: str | None = None,
        hosts: frozenset[str] | None = LOOPBACK,
    ) -> None:
        """Put the layer around ``app``."""
        self.app = app
        self.limits = limits
        self.metrics = metrics
        self.token = token
        self.hosts = hosts
        self.slots = asyncio.Semaphore(limits.concurrent)
        self.large = asyncio.Semaphore(max(1, limits.concurrent // 2))
        self.texts = asyncio.Semaphore(1)
        self.admitted = 0
        self.held = 0  # bytes of bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or say why not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        answer = _Answer(send)
        try:
            await self._serve(scope, receive, answer)
        except Refused as refusal:
            await answer.refuse(refusal)
        except Exception:
            # The client learns nothing about the inside; the log says it all.
            logger.exception("request failed: %s %r", scope["method"], scope["path"])
            await answer.refuse(Refused(500, "the server failed; its log says why"))
        finally:
            path = _route(scope)
            self.metrics.requests.labels(path=path, status=str(answer.status or 0)).inc()
            self.metrics.seconds.labels(path=path).observe(time.perf_counter() - start)

    async def _serve(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        headers = {
            key.decode("latin-1").lower(): value.decode("latin-1")
            for key, value in scope["headers"]
        }
        self._check_host(headers)
        self._check_origin(scope["method"], headers)
        body = _Body(receive, self, _brings_images(scope))
        body.check_size(headers.get("content-length", "0"))
        path = scope["path"]
        if scope["method"] == "HEAD":  # the same answer; the protocol leaves out its body
            scope = {**scope, "method": "GET"}
        if path in OPEN or path.startswith(OPEN_FOLDER):
            await self.app(scope, receive, answer)
            return
        self._check_token(headers)
        if self.admitted >= self.limits.concurrent + self.limits.waiting:
            self.metrics.refuse("busy")
            raise Refused(503, "too many requests are waiting; try again in a second")
        self.admitted += 1
        try:
            async with asyncio.timeout(self.limits.timeout):
                await body.receive_all()
                async with self._turn(body), self.slots:
                    await self.app(scope, body, answer)
        except TimeoutError as error:
            self.metrics.refuse("timeout")
            status = 503 if body.complete else 408
            raise Refused(status, f"not finished within {self.limits.timeout:g} s") from error
        finally:
            self.admitted -= 1
            self.held -= body.count

    def _turn(self, body: "_Body") -> AbstractAsyncContextManager[object]:
        """Large uploads share half of the slots, large texts one: small ones wait for no crowd."""
        if not body.is_large:
            return nullcontext()
        return self.large if body.has_images else self.texts

    def _check_host(self, headers: MutableMapping[str, str]) -> None:
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:  # brackets that do not close
            name = None
        if self.hosts is not None and name not in self.hosts:
            raise Refused(400, "unknown host name; ask by the address the server was started with")

    def _check_origin(self, method: str, headers: MutableMapping[str, str]) -> None:
        """Refuse what another site's page sends: CORS alone does not stop a simple POST."""
        origin = headers.get("origin")
        # What comes after the scheme is host and port, and nothing else.
        foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        foreign = foreign or headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if method not in ("GET", "HEAD") and foreign:
            raise Refused(403, "requests from other sites are refused")

    def _check_token(self, headers: MutableMapping[str, str]) -> None:
        if self.token is None:
            return
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refused(401, "expected the header 'Authorization: Bearer TOKEN'")


def _brings_images(scope: Scope) -> bool:
    """Whether a request is an upload, whichever of its content types is believed."""
    kinds = [value for key, value in scope["headers"] if key.lower() == b"content-type"]
    plain = [kind.split(b";")[0].strip().lower() for kind in kinds]
    return bool(plain) and all(kind in FORMS or kind.startswith(b"image/") for kind in plain)


def whole_number(text: str, low: int, high: int) -> int | None:
    """A number written in plain digits, if it lies in a range; however long the text is."""
    if not text.isascii() or not text.isdecimal() or len(text.lstrip("0")) > len(str(high)):
        return None
    number = int(text.lstrip("0") or "0")
    return number if low <= number <= high else None


def _route(scope: Scope) -> str:
    """The path's pattern: a metric has one series per route, not one per request."""
    first = scope["path"].split("/")[1] if scope["path"].startswith("/") else ""
    return f"/{first}" if first in ROUTES else "other"


class _Body:
    """Receives a request's body, counting its bytes, and hands it to the app in pieces."""

    def __init__(self, receive: Receive, guard: Guard, has_images: bool) -> None:
        self.receive = receive
        self.guard = guard
        self.has_images = has_images
        limits = guard.limits
        self.most = limits.body if has_images else min(limits.text, limits.body)
        self.count = 0
        self.complete = False
        self.left = bytearray()
        self.given = False

    async def __call__(self) -> Message:
        if self.given:
            return await self.receive()
        await asyncio.sleep(0)  # others go on while a large form is read
        piece = bytes(self.left[:PIECE])
        del self.left[:PIECE]
        self.given = not self.left
        return {"type": "http.request", "body": piece, "more_body": not self.given}

    @property
    def is_large(self) -> bool:
        """Whether it is more than what is always let in."""
        return self.count > LARGE_BODY

    def check_size(self, size: str) -> None:
        """Refuse more bytes than such a request may have."""
        if whole_number(size, 0, self.most) is None:
            self.guard.metrics.refuse("body")
            raise Refused(413, f"such a request may have {self.most} bytes, not {size[:20]}")

    async def receive_all(self) -> None:
        """Receive the body.

        Raises:
            Refused: 400 if it broke off, 413 if it is too large, 503 if all of them together are.
        """
        while not self.complete:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "the upload broke off", unread=True)
            self._take(message.get("body", b""))
            self.complete = not message.get("more_body", False)

    def _take(self, received: bytes) -> None:
        self.count += len(received)
        self.guard.held += len(received)
        self.check_size(str(self.count))
        if self.is_large and self.guard.held > self.guard.limits.bodies:
            self.guard.metrics.refuse("bodies")
            raise Refused(503, "too many large uploads at once; try again soon", unread=True)
        self.left += received


class _Answer:
    """Adds the secure headers, and remembers whether an answer was begun."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            present = {key.lower() for key, _ in message["headers"]}
            message["headers"] = [
                *message["headers"],
                *(
                    (key.lower().encode(), value.encode())
                    for key, value in SECURE_HEADERS.items()
                    if key.lower().encode() not in present
                ),
            ]
        await self.send(message)

    async def refuse(self, refusal: Refused) -> None:
        if self.status is not None:  # too late to say anything
            return
        body = json.dumps({"error": refusal.message}).encode()
        headers = [
            (key.encode(), value.encode())
            for key, value in {
                "content-type": "application/json",
                "content-length": str(len(body)),
                **refusal.headers,
            }.items()
        ]
        await self({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
