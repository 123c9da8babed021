"""The routes, and the app that ties guard, routes and worker together."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, TypeVar

from sscd_vec import __version__
from sscd_vec.app.engine import Engine, HeatmapRequest, Search
from sscd_vec.app.limits import LOOPBACK, App, Guard, Limits, PixelBudget, Refused
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.openapi import describe
from sscd_vec.app.uploads import Pixels, decode, measure
from sscd_vec.app.worker import Worker
from sscd_vec.bank.heat_grid import grid

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import UploadFile
    from starlette.exceptions import HTTPException
    from starlette.formparsers import MultiPartException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError("the web page needs an extra: pip install 'sscd-vec[app]'") from error

STATIC = {
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
}
LARGEST_K, LARGEST_PAGE, LARGEST_REMOVAL = 100, 200, 10_000
DECODERS = 4  # images decoded at the same time
T = TypeVar("T")


def create_app(
    engine: Engine,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    hosts: frozenset[str] | None = LOOPBACK,
    read_only: bool = False,
) -> App:
    """The ASGI app around an engine.

    Args:
        engine: The bank and its encoder; ``engine.metrics`` is what ``/metrics`` shows.
        limits: What clients may ask for.
        token: Asked for on every request that carries data; None for none.
        hosts: Host names answered to; None for any.
        read_only: Leave out ``/add`` and ``/remove``.
    """
    return Guard(
        _Server(engine, limits or Limits(), token is not None, read_only).app,
        limits or Limits(),
        engine.metrics,
        token=token,
        hosts=hosts,
    )


class _Server:
    def __init__(self, engine: Engine, limits: Limits, secured: bool, read_only: bool) -> None:
        self.engine = engine
        self.limits = limits
        self.metrics: Metrics = engine.metrics
        self.decoders = asyncio.Semaphore(DECODERS)
        self.pixels = PixelBudget(limits.held)
        self.worker: Worker | None = None
        self.description = describe(__version__, limits, secured)
        self.metrics.gauge("sscd_vec_pictures", "Pictures in the bank.", lambda: len(engine.bank))
        self.metrics.gauge(
            "sscd_vec_queue_depth",
            "Images waiting for the worker.",
            lambda: self.worker.depth if self.worker else 0,
        )
        routes = [
            Route("/", _page("index.html")),
            Route("/docs", _page("docs.html")),
            Route("/static/{name}", _static),
            Route("/openapi.json", self.openapi),
            Route("/health", _health),
            Route("/info", self.info),
            Route("/metrics", self.show_metrics),
            Route("/bank", self.browse),
            Route("/picture/{key:int}", self.picture),
            Route("/search", self.search, methods=["POST"]),
            Route("/heatmap", self.heatmap, methods=["POST"]),
        ]
        if not read_only:
            routes += [
                Route("/add", self.add, methods=["POST"]),
                Route("/remove", self.remove, methods=["POST"]),
            ]
        self.app: Any = Starlette(
            routes=routes,
            lifespan=self.lifespan,
            exception_handlers={Refused: _refused, HTTPException: _http, Exception: _failed},
        )

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.worker = Worker(self.engine.handlers(), self.metrics)
        try:
            yield
        finally:
            await run_in_threadpool(self.worker.close)

    # ------------------------------------------------------------------ handlers

    async def search(self, request: Request) -> Response:
        k = _number(request.query_params.get("k", "10"), "k", 1, LARGEST_K)
        async with self._images(request) as (images, _):
            found = await asyncio.gather(*(self._ask("search", Search(i, k)) for i in images))
        results = [
            {
                "matches": [
                    {
                        "id": match.id,
                        "score": round(match.score, 5),
                        "copy": match.is_copy,
                        "key": None if match.image is None else match.image.key,
                    }
                    for match in matches
                ]
            }
            for matches in found
        ]
        return JSONResponse({"threshold": self.engine.threshold, "results": results})

    async def add(self, request: Request) -> Response:
        async with self._images(request) as (images, _):
            ids = await asyncio.gather(*(self._ask("add", image) for image in images))
        return JSONResponse({"ids": ids})

    async def remove(self, request: Request) -> Response:
        try:
            ids = json.loads(await request.body())["ids"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refused(400, 'expected the JSON object {"ids": [...]}') from error
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
            raise Refused(400, "expected ids to be a list of strings")
        if len(ids) > LARGEST_REMOVAL:
            raise Refused(413, f"expected at most {LARGEST_REMOVAL} ids, got {len(ids)}")
        return JSONResponse({"removed": await self._ask("remove", ids)})

    async def heatmap(self, request: Request) -> Response:
        async with self._images(request) as (images, form):
            key = _number(str(form.get("key", "")), "key", 1, 2**62)
            query, reference = await self._ask("heatmap", HeatmapRequest(images[0], key))
        return JSONResponse({"query": grid(query), "reference": grid(reference)})

    async def browse(self, request: Request) -> Response:
        offset = _number(request.query_params.get("offset", "0"), "offset", 0, 2**62)
        limit = _number(request.query_params.get("limit", "60"), "limit", 1, LARGEST_PAGE)
        text = request.query_params.get("text", "")
        records = self.engine.bank.storage.records
        total, images = await run_in_threadpool(records.page, offset, limit, text)
        listed = [{"key": i.key, "id": i.id, "bytes": i.file and i.file.size} for i in images]
        return JSONResponse({"total": total, "pictures": listed})

    async def picture(self, request: Request) -> Response:
        async with self.decoders:
            content = await run_in_threadpool(self.engine.picture, request.path_params["key"])
        return Response(
            content, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=300"}
        )

    async def info(self, _: Request) -> Response:
        settings = self.engine.bank.settings
        return JSONResponse(
            {
                "pictures": len(self.engine.bank),
                # A model's folder on this machine is nobody's business: its last part names it.
                "model": settings.model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1],
                "threshold": self.engine.threshold,
                "tiles": self.engine.tiles,
                "version": __version__,
            }
        )

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(self.description)

    async def show_metrics(self, _: Request) -> Response:
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------ shared

    async def _ask(self, kind: str, item: object) -> Any:  # noqa: ANN401 - the handler's own type
        if self.worker is None:
            raise Refused(503, "the server is starting; try again in a second")
        return await self.worker.ask(kind, item)

    @asynccontextmanager
    async def _images(self, request: Request) -> AsyncIterator[tuple[list[Pixels], dict[str, str]]]:
        """The images of a request and its other fields, for as long as they are worked on."""
        contents, fields = await self._parts(request)
        share = sum([await self._decoding(measure, c, pixels=self.limits.pixels) for c in contents])
        async with self.pixels.take(share):
            yield [await self._decoding(decode, content) for content in contents], fields

    async def _parts(self, request: Request) -> tuple[list[bytes], dict[str, str]]:
        """The files of a request and its other fields; file names are not even looked at."""
        fields: dict[str, str] = {}
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind == "multipart/form-data":
            contents = []
            try:
                async with request.form(
                    max_files=self.limits.files, max_fields=16, max_part_size=4096
                ) as form:
                    for name, value in form.multi_items():
                        if isinstance(value, UploadFile):
                            contents.append(await value.read())
                        else:
                            fields[name] = value
            except HTTPException as error:  # what Starlette makes of a form it cannot read
                status = 413 if "Too many" in error.detail else 400
                raise Refused(status, f"the form cannot be read: {error.detail}") from error
            except (MultiPartException, ValueError, KeyError) as error:
                raise Refused(400, f"the form cannot be read: {error}") from error
        elif kind.startswith("image/") or kind == "application/octet-stream":
            contents = [await request.body()]
        else:
            raise Refused(415, "expected multipart/form-data with image files, or one image/* body")
        if not contents:
            raise Refused(400, "expected an image in the form field 'image'")
        return contents, fields

    async def _decoding(self, work: Callable[..., T], content: bytes, **options: int) -> T:
        async with self.decoders:
            return await run_in_threadpool(work, content, **options)


def _number(text: str, name: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdecimal() or not low <= int(text[:20]) <= high:
        raise Refused(400, f"{name}: expected a whole number from {low} to {high}")
    return int(text)


def _page(name: str) -> Any:  # noqa: ANN401 - an endpoint
    content = files("sscd_vec.app").joinpath("static", name).read_bytes()

    async def show(_: Request) -> Response:
        return Response(content, media_type="text/html; charset=utf-8")

    return show


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:  # a fixed list: a name never becomes a path
        raise Refused(404, "no such file")
    content = files("sscd_vec.app").joinpath("static", name).read_bytes()
    return Response(content, media_type=STATIC[name])


async def _health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refused):
        raise error
    return JSONResponse({"error": error.message}, error.status, headers=error.headers)


async def _http(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _failed(_: Request, error: Exception) -> Response:
    """The client learns nothing about the inside; the log says it all."""
    return JSONResponse({"error": "the server failed; its log says why"}, 500)
