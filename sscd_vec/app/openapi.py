"""The API described in OpenAPI 3.1."""

from typing import Any

from sscd_vec.app.limits import Limits

_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}


def _schema(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_INTEGER = {"type": "integer"}
_MATCH = _schema(
    id=_TEXT,
    score=_NUMBER,
    copy={"type": ["boolean", "null"]},
    key={"type": ["integer", "null"]},
)
_GRID = _schema(width=_INTEGER, height=_INTEGER, values={"type": "string", "format": "byte"})
_PICTURE = _schema(key=_INTEGER, id=_TEXT, bytes=_INTEGER)
_INFO = _schema(
    pictures=_INTEGER,
    model=_TEXT,
    threshold={"type": ["number", "null"]},
    tiles=_INTEGER,
    version=_TEXT,
)


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _answers(good: dict[str, Any], *errors: int) -> dict[str, Any]:
    meaning = {
        400: "The request makes no sense; the error says why.",
        401: "The token is missing or wrong.",
        404: "There is no such picture.",
        408: "The upload was too slow.",
        413: "Too many bytes, images or pixels.",
        415: "Not an image of a kind that is read.",
        422: "A broken image.",
        503: "Busy; Retry-After says when to ask again.",
    }
    return {"200": good} | {
        str(code): {
            "description": meaning[code],
            "content": {"application/json": {"schema": _ERROR}},
        }
        for code in errors
    }


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _upload(**more: dict[str, Any]) -> dict[str, Any]:
    image = {"type": "string", "format": "binary"}
    return {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": _array(image), **more},
                    "required": ["image", *more],
                }
            },
            "image/*": {"schema": image},
        },
    }


def describe(version: str, limits: Limits, secured: bool) -> dict[str, Any]:
    """The whole description.

    Args:
        version: Of the package.
        limits: Named in the text.
        secured: Whether a token is needed.
    """
    bad = (401, 408, 413, 415, 422, 503)
    count = {
        "name": "k",
        "in": "query",
        "description": "Matches per image, 1 to 100; 10 by default.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100},
    }
    key = {
        "name": "key",
        "in": "path",
        "required": True,
        "description": "A key from a match or from /bank.",
        "schema": _INTEGER,
    }
    paging = [
        {
            "name": "offset",
            "in": "query",
            "description": "Pictures to skip.",
            "schema": {"type": "integer", "minimum": 0},
        },
        {
            "name": "limit",
            "in": "query",
            "description": "Pictures to list, 1 to 200.",
            "schema": {"type": "integer", "minimum": 1, "maximum": 200},
        },
        {
            "name": "text",
            "in": "query",
            "description": "Only ids that contain this.",
            "schema": _TEXT,
        },
    ]
    results = _schema(
        threshold={"type": ["number", "null"]}, results=_array(_schema(matches=_array(_MATCH)))
    )
    ids = _schema(ids=_array(_TEXT))
    removal = {
        "required": True,
        "content": {"application/json": {"schema": ids, "example": {"ids": ["upload:0123"]}}},
    }
    paths: dict[str, Any] = {
        "/search": {
            "post": {
                "summary": "Is this image (or are these) in the bank?",
                "parameters": [count],
                "requestBody": _upload(),
                "responses": _answers(
                    _json("Best matches of each image, in the order sent.", results), 400, *bad
                ),
            }
        },
        "/add": {
            "post": {
                "summary": "Add images to the bank. Answered when they are safe on disk.",
                "requestBody": _upload(),
                "responses": _answers(_json("The ids they have now.", ids), 400, *bad),
            }
        },
        "/remove": {
            "post": {
                "summary": "Take pictures out of the bank; files on disk stay.",
                "requestBody": removal,
                "responses": _answers(
                    _json("How many were there.", _schema(removed=_INTEGER)), 400, 401, 413, 503
                ),
            }
        },
        "/heatmap": {
            "post": {
                "summary": "Which part of the image matches that picture, and the other way "
                "round: a grid of bytes, row by row, over each.",
                "requestBody": _upload(key=_INTEGER),
                "responses": _answers(
                    _json("Two grids.", _schema(query=_GRID, reference=_GRID)), 400, 404, *bad
                ),
            }
        },
        "/bank": {
            "get": {
                "summary": "List the pictures of the bank.",
                "parameters": paging,
                "responses": _answers(
                    _json("One page of them.", _schema(total=_INTEGER, pictures=_array(_PICTURE))),
                    400,
                    401,
                    503,
                ),
            }
        },
        "/picture/{key}": {
            "get": {
                "summary": "A small JPEG of a picture of the bank.",
                "parameters": [key],
                "responses": _answers(
                    {"description": "The picture.", "content": {"image/jpeg": {}}}, 401, 404, 503
                ),
            }
        },
        "/info": {
            "get": {
                "summary": "What is served.",
                "responses": _answers(_json("Model, size and threshold.", _INFO), 401, 503),
            }
        },
        "/health": {
            "get": {
                "summary": "Is the server alive?",
                "responses": {"200": _json("It is.", _schema(status=_TEXT))},
            }
        },
        "/metrics": {
            "get": {
                "summary": "Counters for Prometheus.",
                "responses": _answers({"description": "Text.", "content": {"text/plain": {}}}, 401),
            }
        },
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "sscd-vec",
            "version": version,
            "description": f"Image copy detection. A request may have {limits.body >> 20} MiB and "
            f"{limits.files} images of {limits.pixels / 1e6:g} megapixels each.",
        },
        "paths": paths,
    }
    if secured:
        document["components"] = {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}
        }
        document["security"] = [{"token": []}]
    return document
