"""The routes, and the app that ties guard, routes and worker together."""

import hashlib
import importlib.util
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

try:
    from fastapi import FastAPI, Query
    from fastapi.exceptions import RequestValidationError
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
except ImportError as error:
    raise ImportError("the web page needs an extra: pip install 'sscd-vec[app]'") from error

from sscd_vec import __version__
from sscd_vec.app import answers
from sscd_vec.app.answers import refusals, upload_body
from sscd_vec.app.engine import Engine, Pair, Ruling, Search, refusal_of
from sscd_vec.app.limits import LOOPBACK, App, Guard, Limits, Refused, whole_number
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.uploads import Decoding, Pixels, read_upload
from sscd_vec.app.worker import Worker
from sscd_vec.bank import BankMatch
from sscd_vec.bank.heat_grid import IMAGE_SIDE, grid, reduced
from sscd_vec.bank.quality import jpeg
from sscd_vec.bank.records import BankImage
from sscd_vec.encoder.images import ImageError
from sscd_vec.shards import arrow

STATIC = {
    "style.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "docs.js": "text/javascript; charset=utf-8",
}
LARGEST_SIDE = 1600  # pixels along the long side of an image that is shown
QUALITY = 85
# Searches wait for one batch of other work at most: so many heatmaps, or values of images to add or
# of large ones to search for.
HEATMAP_WEIGHT = 1 / 4
SMALL_VALUES, FEW_VALUES = 3 * 2**20, 3 * 2**22
JPEG: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": {}}}}
PARQUET: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}
TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
GUARDED = (400, 401, 413, 503)  # what the guard may answer to any request
UPLOADED = (*GUARDED, 403, 408, 415, 422)


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
        read_only: Leave out ``/add``, ``/remove`` and ``/decide``.
    """
    limits = limits or Limits()
    server = _Server(engine, limits, token is not None, read_only)
    return Guard(server.app, limits, engine.metrics, token=token, hosts=hosts)


class _Server:
    def __init__(self, engine: Engine, limits: Limits, secured: bool, read_only: bool) -> None:
        self.engine, self.limits = engine, limits
        self.read_only = read_only or engine.bank.storage.read_only
        self.has_parquet = importlib.util.find_spec("pyarrow") is not None
        self.metrics: Metrics = engine.metrics
        self.worker: Worker | None = None
        self.metrics.gauge("sscd_vec_bank_images", "Images in the bank.", lambda: len(engine.bank))
        self.metrics.gauge(
            "sscd_vec_queue_depth",
            "Images waiting for the worker.",
            lambda: self.worker.depth if self.worker else 0,
        )
        self.app = FastAPI(
            title="sscd-vec",
            version=__version__,
            description=f"Image copy detection. A request may have {limits.body >> 20} MiB and "
            f"{limits.files} images of {limits.pixels / 1e6:g} megapixels each.",
            docs_url=None,
            redoc_url=None,
            lifespan=self.lifespan,
            exception_handlers={
                Refused: _refused,
                HTTPException: _http,
                RequestValidationError: _invalid,
                Exception: _failed,
            },
        )
        self._add_pages()
        self._add_routes()
        _correct_description(self.app, secured)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        self.decoding = Decoding(self.limits)
        self.worker = Worker(self.engine.handlers(), self.metrics)
        try:
            yield
        finally:
            await run_in_threadpool(self.worker.close)
            self.decoding.close()

    def _add_pages(self) -> None:
        self.app.add_route("/", _page("index.html"), include_in_schema=False)
        self.app.add_route("/docs", _page("docs.html"), include_in_schema=False)
        self.app.add_route("/static/{name}", _static, include_in_schema=False)

    def _add_routes(self) -> None:
        add = self.app.add_api_route
        add("/search", self.search, methods=["POST"], responses=refusals(*UPLOADED),
            openapi_extra=upload_body())  # fmt: skip
        if not self.read_only:
            add("/add", self.add, methods=["POST"], responses=refusals(*UPLOADED, 507),
                openapi_extra=upload_body())  # fmt: skip
            add("/remove", self.remove, methods=["POST"],
                responses=refusals(*GUARDED, 403, 408, 507))  # fmt: skip
            add("/decide", self.decide, methods=["POST"],
                responses=refusals(*GUARDED, 403, 404, 408, 507))  # fmt: skip
        add("/decisions", self.decisions, responses=refusals(*GUARDED))
        if self.has_parquet:
            add("/parquet", self.parquet, methods=["POST"], response_class=Response,
                responses=PARQUET | refusals(*GUARDED, 403, 408))  # fmt: skip
        key = {"type": "integer", "minimum": 1, "maximum": answers.LARGEST_KEY}
        add("/heatmap", self.heatmap, methods=["POST"], responses=refusals(*UPLOADED, 404),
            openapi_extra=upload_body(key=key))  # fmt: skip
        add("/bank", self.browse, responses=refusals(*GUARDED))
        add("/image/{key}", self.image, response_class=Response,
            responses=JPEG | refusals(*GUARDED, 403, 404))  # fmt: skip
        add("/info", self.info, responses=refusals(*GUARDED))
        add("/health", self.health, responses=refusals(400, 413))
        add("/metrics", self.show_metrics, response_class=Response,
            responses=TEXT | refusals(*GUARDED))  # fmt: skip

    # ------------------------------------------------------------------ handlers

    async def search(
        self,
        request: Request,
        k: Annotated[
            int, Query(ge=1, le=answers.LARGEST_K, description="Matches per image; 1 to 100.")
        ] = 10,
        threshold: Annotated[
            float | None,
            Query(ge=-1, le=1, description="Least score of a copy; the bank's by default."),
        ] = None,
    ) -> answers.SearchAnswer:
        """Is this image (or are these) in the bank?"""
        upload = await read_upload(request, self.limits)

        async def look(position: int, image: Pixels) -> answers.Result:
            digest = hashlib.sha256(upload.contents[position]).hexdigest()
            found = await self._search(Search(image, k, threshold, digest))
            matches = [answers.Match.of(m, self.engine.name_of(m.id, m.image)) for m in found]
            return answers.Result(image=upload.names[position], digest=digest, matches=matches)

        results = await self.decoding.each(upload.contents, look)
        used = self.engine.threshold if threshold is None else threshold
        return answers.SearchAnswer(threshold=used, results=results)

    async def add(self, request: Request) -> answers.Added:
        """Add images to the bank. Answered when they are safe on disk."""
        upload = await read_upload(request, self.limits)

        async def add(_: int, image: Pixels) -> str:
            return str(await self._ask("add", image, image.size / FEW_VALUES))

        return answers.Added(ids=await self.decoding.each(upload.contents, add))

    async def remove(self, removal: answers.Removal) -> answers.Removed:
        """Take images out of the bank; files of yours stay."""
        return answers.Removed(removed=await self._ask("remove", removal.ids))

    async def decide(self, ruling: answers.Ruling) -> answers.Decided:
        """Remember whether an image is a copy of one of the bank, whatever they score."""
        item = Ruling(ruling.image, ruling.id, ruling.is_copy)
        return answers.Decided(decisions=await self._ask("decide", item))

    async def decisions(self) -> answers.DecisionFile:
        """All that was decided, as a file for `dedup --decisions`."""
        known = await run_in_threadpool(self.engine.bank.storage.records.decisions)
        return answers.DecisionFile(**known.to_dict())

    async def parquet(self, rows: answers.ExportedRows) -> Response:
        """The page's results as a Parquet file."""
        content = await run_in_threadpool(_parquet, [row.model_dump(by_alias=True) for row in rows])
        return Response(content, media_type="application/octet-stream")

    async def heatmap(self, request: Request) -> answers.Heatmaps:
        """Which part of the image matches the one of the bank, and the other way round."""
        upload = await read_upload(request, self.limits)
        key = whole_number(upload.fields.get("key", ""), 1, answers.LARGEST_KEY)
        if key is None:
            raise Refused(400, f"key: expected a whole number from 1 to {answers.LARGEST_KEY}")
        # Before the query's turn: the bank's image may have to wait for the same one.
        shown = await run_in_threadpool(reduced, await self._shown(key, IMAGE_SIDE))

        async def compare(_: int, image: Pixels) -> Any:  # noqa: ANN401 - two heatmaps
            return await self._ask("heatmap", Pair(image, shown), HEATMAP_WEIGHT)

        ((query, reference),) = await self.decoding.each(upload.contents[:1], compare)
        return answers.Heatmaps(
            query=answers.Grid(**grid(query)), reference=answers.Grid(**grid(reference))
        )

    async def browse(
        self,
        offset: Annotated[int, Query(ge=0, le=2**53, description="Images to skip.")] = 0,
        limit: Annotated[
            int, Query(ge=1, le=answers.LARGEST_PAGE, description="Images to list; 1 to 200.")
        ] = 60,
        text: Annotated[
            str, Query(max_length=answers.LONGEST_TEXT, description="Only ids that contain this.")
        ] = "",
    ) -> answers.Page:
        """List the images of the bank."""
        records = self.engine.bank.storage.records
        total, images = await run_in_threadpool(records.page, offset, limit, text)
        return answers.Page(total=total, images=[self._listed(image) for image in images])

    async def image(
        self,
        key: answers.Key,
        side: Annotated[
            int, Query(ge=16, le=LARGEST_SIDE, description="Pixels along the long side, at most.")
        ] = 480,
    ) -> Response:
        """A JPEG of an image of the bank."""
        pixels = await self._shown(key, side)
        content = await run_in_threadpool(jpeg, pixels, side, QUALITY)
        return Response(
            content, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=300"}
        )

    async def info(self) -> answers.Info:
        """What is served."""
        settings = self.engine.bank.settings
        return answers.Info(
            images=len(self.engine.bank),
            # A model's folder on this machine is nobody's business: its last part names it.
            model=settings.model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1],
            threshold=self.engine.threshold,
            threshold_facts=self.engine.threshold_facts,
            tiles=self.engine.tiles,
            verify=bool(self.engine.bank.verify),
            read_only=self.read_only,
            parquet=self.has_parquet,
            version=__version__,
        )

    async def health(self) -> answers.Health:
        """Is the server alive?"""
        return answers.Health(status="ok")

    async def show_metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(self.metrics.render(), media_type="text/plain; version=0.0.4")

    # ------------------------------------------------------------------ shared

    async def _search(self, search: Search) -> list[BankMatch]:
        """Matches of an image; small ones never wait for a crowd of large ones."""
        size = search.pixels.size
        if size <= SMALL_VALUES:
            return list(await self._ask("search", search))
        return list(await self._ask("large search", search, size / FEW_VALUES))

    async def _ask(self, kind: str, item: object, weight: float = 0.0) -> Any:  # noqa: ANN401 - the handler's own type
        if self.worker is None:
            raise Refused(503, "the server is starting; try again in a second")
        try:
            return await self.worker.ask(kind, item, weight)
        except OSError as error:
            raise refusal_of(error) from error

    async def _shown(self, key: int, side: int) -> Pixels:
        """Pixels of an image of the bank."""
        file = await run_in_threadpool(self.engine.file_of, key)
        try:
            return await self.decoding.show(file, side)
        except (ImageError, Refused) as error:
            if isinstance(error, Refused) and error.status == 503:
                raise
            raise Refused(404, "its file can no longer be read") from error

    def _listed(self, image: BankImage) -> answers.Listed:
        return answers.Listed(
            key=image.key,
            id=image.id,
            name=self.engine.name_of(image.id, image),
            bytes=None if image.file is None or image.is_lost else image.file.size,
        )


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow, parquet = arrow()
    kinds = {"rank": pyarrow.int32(), "copy": pyarrow.bool_()}
    kinds |= dict.fromkeys(("score", "threshold"), pyarrow.float64())
    columns = [info.alias or name for name, info in answers.ExportedRow.model_fields.items()]
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in columns])
    written = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema), written)
    return written.getvalue()


def _correct_description(app: FastAPI, secured: bool) -> None:
    """Describe what FastAPI cannot know: bad parameters get a 400, and who needs the token."""
    document = app.openapi()  # made once, and kept by the app
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            answer = operation["responses"].get("422", {}).get("content", {})
            if "HTTPValidationError" in str(answer):
                del operation["responses"]["422"]
    if secured:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        document["paths"]["/health"]["get"]["security"] = []


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


async def _refused(_: Request, error: Exception) -> Response:
    if not isinstance(error, Refused):
        raise error
    return JSONResponse({"error": error.message}, error.status, headers=error.headers)


async def _http(_: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _invalid(_: Request, error: Exception) -> Response:
    """Say what was expected; never what came, which may be anything."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    if place[0] == "path":  # a key that cannot be one
        return JSONResponse({"error": "there is no such image"}, 404)
    status = 413 if first["type"] == "too_long" else 400
    return JSONResponse({"error": f"{'.'.join(place[1:]) or 'body'}: {first['msg']}"}, status)


async def _failed(_: Request, error: Exception) -> Response:
    """The client learns nothing about the inside; the log says it all."""
    return JSONResponse({"error": "the server failed; its log says why"}, 500)
