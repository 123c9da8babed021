"""The API as a client sees it: answers, refusals, and what never happens."""

import base64
import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sscd_vec.app.engine import Engine
from sscd_vec.app.limits import Limits
from sscd_vec.app.server import create_app
from sscd_vec.cli.pictures import draw

# The machine may have other things to do: no test waits so long for a good answer.
SMALL = Limits(body=2 * 2**20, files=3, pixels=4_000_000, timeout=300.0, decoding=300.0)


def uploads(engine: Engine) -> Path:
    assert engine.bank.location is not None
    return engine.bank.location.folder / "uploads"


def _bytes(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    app = create_app(engine, limits=SMALL)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def copy() -> bytes:
    return _bytes(draw(3).resize((200, 150)), quality=60)


def test_search_finds_the_original_with_a_verdict(client: TestClient, copy: bytes) -> None:
    answer = client.post("/search?k=3", files={"image": ("x.jpg", copy)})
    assert answer.status_code == 200, answer.text
    matches = answer.json()["results"][0]["matches"]
    assert len(matches) == 3
    assert matches[0]["id"].endswith("picture-03.png")
    assert matches[0]["copy"] is True and matches[0]["score"] > 0.8
    assert [m["score"] for m in matches] == sorted((m["score"] for m in matches), reverse=True)
    assert any(not match["copy"] for match in matches)


def test_every_match_has_a_verdict_and_its_reason(client: TestClient, copy: bytes) -> None:
    answer = client.post("/search?k=3", files={"image": ("x.jpg", copy)}).json()
    best = answer["results"][0]["matches"][0]
    assert best["verdict"] == "copy" and best["reason"] and "false_match_rate" in best
    assert 'sscd_vec_verdicts_total{verdict="copy"} 1' in client.get("/metrics").text


def test_a_threshold_of_the_request_is_honoured_or_refused(client: TestClient, copy: bytes) -> None:
    def ask(threshold: str) -> Any:  # noqa: ANN401 - an answer
        return client.post(f"/search?threshold={threshold}", files={"image": ("x.jpg", copy)})

    low, high = ask("-1").json(), ask("1").json()
    assert (low["threshold"], high["threshold"]) == (-1, 1)
    assert all(match["verdict"] == "copy" for match in low["results"][0]["matches"])
    assert not any(match["copy"] for match in high["results"][0]["matches"])
    for bad in ("high", "1.5", "nan", "-inf", ""):
        refused = ask(bad)
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("threshold: ")


def test_decisions_are_remembered_by_content(
    client: TestClient, engine: Engine, copy: bytes
) -> None:
    def best(content: bytes = copy) -> dict[str, Any]:
        answer = client.post("/search?k=1", files={"image": ("any name.jpg", content)}).json()
        result = answer["results"][0]
        return {**result["matches"][0], "digest": result["digest"]}

    found = best()
    assert found["copy"] is True and found["decision"] is None
    ruling = {"image": found["digest"], "id": found["id"], "is_copy": False}
    assert client.post("/decide", json=ruling).json() == {"decisions": 1}
    assert best()["copy"] is False and best()["verdict"] == "no" and best()["decision"] is False
    assert best(copy + b" ")["copy"] is True  # another file
    assert engine.bank.search(copy, 1)[0].is_copy is False  # not only on the page
    listed = client.get("/decisions").json()
    assert listed["pairs"][0]["is_copy"] is False
    assert client.post("/decide", json=ruling | {"is_copy": True}).json() == {"decisions": 1}
    assert best()["decision"] is True
    assert client.post("/decide", json=ruling | {"id": "/no/such"}).status_code == 404
    assert client.post("/decide", json=ruling | {"image": "no digest"}).status_code == 400


def test_results_as_parquet(client: TestClient) -> None:
    row = {"image": "a.jpg", "rank": 1, "id": "/x", "name": "x", "score": 0.5, "threshold": 0.25,
           "copy": True, "verdict": "copy", "reason": ""}  # fmt: skip
    answer = client.post("/parquet", json=[row, row | {"rank": 2}])
    assert answer.status_code == 200, answer.text
    assert pq.read_table(io.BytesIO(answer.content)).to_pylist() == [row, row | {"rank": 2}]
    assert client.post("/parquet", json=[row | {"score": "high"}]).status_code == 400


def test_several_images_and_a_raw_body(client: TestClient, copy: bytes) -> None:
    other = _bytes(draw(7), "PNG")
    several = client.post("/search", files=[("image", ("a", copy)), ("image", ("b", other))])
    best = [result["matches"][0]["id"][-6:-4] for result in several.json()["results"]]
    assert best == ["03", "07"]
    raw = client.post("/search", content=other, headers={"Content-Type": "image/png"})
    assert raw.json()["results"][0]["matches"][0]["id"].endswith("picture-07.png")


def test_add_search_browse_and_remove(client: TestClient, engine: Engine) -> None:
    new = _bytes(draw(99))
    added = client.post("/add", files={"image": ("../../etc/passwd", new)})
    assert added.status_code == 200
    (name,) = added.json()["ids"]
    assert client.post("/add", files={"image": ("y", new)}).json()["ids"] == [name]
    assert client.get("/info").json()["images"] == 13
    hit = client.post("/search", files={"image": ("x", new)}).json()["results"][0]["matches"][0]
    assert hit["id"] == name and hit["copy"]
    listed = client.get("/bank?text=upload").json()
    assert listed["total"] == 1 and listed["images"][0]["id"] == name
    kept = list((uploads(engine)).iterdir())
    assert len(kept) == 1 and kept[0].parent == uploads(engine)
    assert client.post("/remove", json={"ids": [name, "unknown"]}).json() == {"removed": 1}
    assert client.get("/bank?text=upload").json()["total"] == 0
    assert not kept[0].exists()


def test_removing_a_file_of_the_user_leaves_the_file(client: TestClient, photos: Path) -> None:
    victim = str(photos / "picture-05.png")
    assert client.post("/remove", json={"ids": [victim]}).json() == {"removed": 1}
    assert (photos / "picture-05.png").exists()
    after = client.post("/search", files={"image": ("x", _bytes(draw(5)))}).json()
    assert not after["results"][0]["matches"][0]["copy"]


def test_images_and_heatmap(client: TestClient, copy: bytes) -> None:
    match = client.post("/search", files={"image": ("x", copy)}).json()["results"][0]["matches"][0]
    for query, side in (("", 240), ("?side=1600", 240), ("?side=100", 100)):
        shown = client.get(f"/image/{match['key']}{query}")
        assert shown.headers["content-type"] == "image/jpeg"
        with Image.open(io.BytesIO(shown.content)) as image:
            assert max(image.size) == side
    maps = client.post("/heatmap", files={"image": ("x", copy)}, data={"key": match["key"]}).json()
    for whose in ("query", "reference"):
        grid = np.frombuffer(base64.b64decode(maps[whose]["values"]), np.uint8)
        assert grid.size == maps[whose]["width"] * maps[whose]["height"] == 64
        assert (grid.min(), grid.max()) == (0, 255)
    missing = client.post("/heatmap", files={"image": ("x", copy)}, data={"key": "4711"})
    assert missing.status_code == 404


def test_verified_matches_have_outlines(engine: Engine, photos: Path) -> None:
    engine.bank.verify = True
    width, height = draw(3).size
    crop = _bytes(draw(3).crop((0, 0, width * 3 // 4, height)), quality=90)
    with TestClient(create_app(engine, limits=SMALL), base_url="http://127.0.0.1") as client:
        info = client.get("/info").json()
        found = client.post("/search?k=3", files={"image": ("x.jpg", crop)}).json()
    assert info["verify"] and info["threshold"] == engine.bank.second_stage.threshold
    assert info["threshold_facts"]["source"] == "calibrated"
    best, *others = found["results"][0]["matches"]
    assert best["id"].endswith("picture-03.png") and best["copy"] and best["verified"]
    corners = np.array(best["region"]["reference"])
    assert corners.min(axis=0) == pytest.approx([0, 0], abs=0.04)
    assert corners.max(axis=0) == pytest.approx([0.75, 1], abs=0.04)
    assert all(match["verified"] and match["region"] is None for match in others)


def test_image_whose_file_is_gone(client: TestClient, photos: Path) -> None:
    for path in photos.iterdir():
        path.unlink()
    assert client.get("/image/1").status_code == 404
    assert client.get("/bank").json()["total"] == 12


# ---------------------------------------------------------------------- what is refused


def _png_bomb(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data).to_bytes(4, "big")
        return len(data).to_bytes(4, "big") + kind + data + crc

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    rows = zlib.compress(b"\0" * 100_000, 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    )


def _zip_polyglot() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("evil.txt", "hello")
    return _bytes(draw(1)) + buffer.getvalue()


def _icon_of(image: bytes) -> bytes:
    """An icon whose header says 256 pixels, whatever the PNG inside says."""
    where = len(image).to_bytes(4, "little") + (22).to_bytes(4, "little")
    return b"\0\0\1\0\1\0" + b"\0\0\0\0\1\0\x20\0" + where + image


HOSTILE = {
    "bomb in an icon": (_icon_of(_png_bomb(5000, 5000)), 415),
    "bomb of 10 gigapixels": (_png_bomb(100_000, 100_000), 413),
    "bomb of 25 megapixels": (_png_bomb(5000, 5000), 413),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>', 415),
    "html": (b"<!doctype html><script>alert(1)</script>", 415),
    "pdf": (b"%PDF-1.7\n1 0 obj\n", 415),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(id) system\n", 415),
    "zip and jpeg at once": (_zip_polyglot(), 415),
    "html and gif at once": (
        b"GIF89a" + _bytes(draw(1), "GIF")[6:] + b"<script>alert(1)</script>",
        415,
    ),
    "script in a jpeg comment": (_bytes(draw(1), comment=b"<script>alert(1)</script>"), 415),
    "empty": (b"", 422),
    "noise": (bytes(range(256)) * 40, 415),
    "truncated jpeg": (_bytes(draw(1))[:2000], 422),
    "truncated png": (_bytes(draw(1), "PNG")[:5000], 422),
    "a line of pixels": (_bytes(Image.new("RGB", (3000, 1)), "PNG"), 422),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("path", ["/search", "/add"])
def test_hostile_upload_is_refused(client: TestClient, path: str, name: str) -> None:
    content, status = HOSTILE[name]
    answer = client.post(path, files={"image": ("x.jpg", content, "image/jpeg")})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]
    assert client.get("/info").json()["images"] == 12
    assert client.get("/health").json() == {"status": "ok"}


def test_many_images_within_the_limit_are_a_bomb_together(engine: Engine) -> None:
    large = _bytes(draw(1).resize((900, 900)))
    limits = Limits(pixels=1_000_000, timeout=300.0, decoding=300.0)
    with TestClient(create_app(engine, limits=limits), base_url="http://localhost") as client:
        for path in ("/search", "/add"):
            refused = client.post(path, files=[("image", ("x", large))] * 5)
            assert refused.status_code == 413, refused.text
            assert "send fewer at once" in refused.json()["error"]
        assert client.post("/search", files=[("image", ("x", large))] * 4).status_code == 200
        assert client.get("/info").json()["images"] == 12


@pytest.mark.parametrize("path", ["/", "/docs", "/health", "/static/page.js", "/nowhere"])
def test_large_body_is_refused_everywhere(client: TestClient, path: str) -> None:
    headers = {"Content-Length": str(SMALL.body + 1)}
    answer = client.post(path, content=b"", headers=headers)
    assert answer.status_code == 413 and answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"x" * (SMALL.body + 1), {"Content-Type": "image/png"}, 413),
        (b"", {"Content-Type": "image/png"}, 422),
        (b"hello", {"Content-Type": "text/plain"}, 415),
        (b"hello", {"Content-Type": "multipart/form-data"}, 400),
        (b"--x\r\nbroken", {"Content-Type": "multipart/form-data; boundary=x"}, 400),
        (b"", {"Content-Type": "image/png", "Content-Length": "1000000000"}, 413),
        (b"", {"Content-Type": "image/png", "Content-Length": "-5"}, 413),
    ],
)
def test_malformed_request_is_refused(
    client: TestClient, body: bytes, headers: dict[str, str], status: int
) -> None:
    answer = client.post("/search", content=body, headers=headers)
    assert answer.status_code == status, answer.text


def test_body_without_length_is_cut_off(client: TestClient) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 64 * SMALL.body:
            sent += 2**16
            yield b"\0" * 2**16

    answer = client.post("/search", content=endless(), headers={"Content-Type": "image/png"})
    assert answer.status_code == 413


def test_too_many_files_and_no_file(client: TestClient, copy: bytes) -> None:
    many = [("image", ("x", copy))] * 4
    assert client.post("/search", files=many).status_code == 413
    assert client.post("/search", data={"image": "text"}, files={}).status_code in (400, 415)
    empty = client.post("/search", files={"image": ("", b"")})
    assert empty.status_code in (400, 422)


@pytest.mark.parametrize(
    "path",
    [
        "/image/..%2f..%2fetc%2fpasswd",
        "/image//etc/passwd",
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e%2fserver.py",
        "/static/index.html%00.css",
        "/image/99999999",
        "/image/-1",
        "/etc/passwd",
    ],
)
def test_paths_lead_nowhere(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "root:" not in answer.text and "import" not in answer.text


@pytest.mark.parametrize(
    "query", ["k=0", "k=101", "k=x", "k=1e2", "k=-1", "k=" + "9" * 400, "k=%D9%A3"]
)
def test_numbers_are_checked(client: TestClient, copy: bytes, query: str) -> None:
    assert client.post(f"/search?{query}", files={"image": ("x", copy)}).status_code == 400


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"ids": 5}', b'{"ids": [1]}', b'{"ids":' + b"[" * 50_000]
)
def test_removal_is_checked(client: TestClient, body: bytes) -> None:
    assert client.post("/remove", content=body).status_code == 400


def test_filter_text_is_no_pattern(client: TestClient) -> None:
    assert client.get("/bank", params={"text": "%"}).json()["total"] == 0
    assert client.get("/bank", params={"text": "' OR 1=1 --"}).json()["total"] == 0
    assert client.get("/bank", params={"text": "picture-0"}).json()["total"] == 10


# ---------------------------------------------------------------------- who may ask


def test_token(engine: Engine, copy: bytes) -> None:
    app = create_app(engine, limits=SMALL, token="open sesame")
    with TestClient(app, base_url="http://localhost") as client:
        for path in ("/info", "/bank", "/metrics", "/image/1"):
            assert client.get(path).status_code == 401
        assert client.post("/search", files={"image": ("x", copy)}).status_code == 401
        wrong = {"Authorization": "Bearer open"}
        assert client.get("/info", headers=wrong).status_code == 401
        right = {"Authorization": "Bearer open sesame"}
        assert client.get("/info", headers=right).status_code == 200
        for path in ("/", "/health", "/docs", "/static/page.js"):
            assert client.get(path).status_code == 200


def test_other_hosts_and_origins_are_refused(client: TestClient, copy: bytes) -> None:
    for host in ("evil.example", "[::1", "127.0.0.1.evil.example", "", "localhost@evil.example"):
        assert client.get("/info", headers={"Host": host}).status_code == 400
    files = {"image": ("x", copy)}
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1@evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert client.post("/add", files=files, headers=headers).status_code == 403
    own = {"Origin": "http://127.0.0.1"}
    assert client.post("/search", files=files, headers=own).status_code == 200


def test_secure_headers_and_no_cors(client: TestClient) -> None:
    for path in ("/", "/info", "/nowhere"):
        headers = client.get(path, headers={"Origin": "http://127.0.0.1"}).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert not any(name.startswith("access-control") for name in headers)
    preflight = client.options(
        "/add", headers={"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code in (403, 405)


def test_read_only_server_cannot_be_changed(engine: Engine, copy: bytes) -> None:
    with TestClient(create_app(engine, read_only=True), base_url="http://localhost") as client:
        assert client.post("/add", files={"image": ("x", copy)}).status_code == 404
        assert client.post("/remove", json={"ids": []}).status_code == 404
        ruling = {"image": "0" * 64, "id": "x", "is_copy": True}
        assert client.post("/decide", json=ruling).status_code == 404
        assert client.post("/search", files={"image": ("x", copy)}).status_code == 200


# ---------------------------------------------------------------------- the rest


def test_openapi_describes_every_route_and_answers(client: TestClient, copy: bytes) -> None:
    document = client.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/search", "/add", "/remove", "/heatmap", "/bank", "/image/{key}", "/info", "/health",
        "/metrics", "/decide", "/decisions", "/parquet",
    }  # fmt: skip

    def required(path: str, method: str) -> set[str]:
        answer = document["paths"][path][method]["responses"]["200"]["content"]
        name = answer["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
        return set(document["components"]["schemas"][name]["required"])

    answer = client.post("/search", files={"image": ("x", copy)}).json()
    assert set(answer) == required("/search", "post")
    match = document["components"]["schemas"]["Match"]
    assert set(answer["results"][0]["matches"][0]) == set(match["required"])
    assert set(client.get("/info").json()) == required("/info", "get")
    assert "422" not in document["paths"]["/bank"]["get"]["responses"]


def test_metrics_count_what_happened(client: TestClient, copy: bytes) -> None:
    for _ in range(3):
        client.post("/search", files={"image": ("x", copy)})
    client.post("/search", files={"image": ("x", b"nope")})
    text = client.get("/metrics").text
    assert 'sscd_vec_requests_total{path="/search",status="200"} 3' in text
    assert 'sscd_vec_requests_total{path="/search",status="415"} 1' in text
    assert "sscd_vec_images_total 3" in text
    assert "sscd_vec_bank_images 12" in text
    assert 'sscd_vec_request_seconds_bucket{le="+Inf",path="/search"} 4' in text


def test_inner_failure_is_hidden(
    client: TestClient, engine: Engine, copy: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine.bank, "search_descriptors", fail)
    answer = client.post("/search", files={"image": ("x", copy)})
    assert answer.status_code == 500
    assert "secret" not in answer.text and json.loads(answer.text)["error"]
    monkeypatch.undo()
    assert client.post("/search", files={"image": ("x", copy)}).status_code == 200
