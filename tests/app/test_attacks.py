"""What attackers sent and what failed under them: each test stands for a fault that was found."""

import asyncio
import errno
import io
import json
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sscd_vec.app.connections import Connections
from sscd_vec.app.engine import Engine, Pair
from sscd_vec.app.limits import Limits, Refused
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.server import create_app
from sscd_vec.app.uploads import KEPT_PIXELS, Cost, Decoding, Lane, Pixels
from sscd_vec.bank import Bank
from sscd_vec.bank.location import LOCK, RECORDS
from sscd_vec.bank.records import BankImage, Records
from sscd_vec.cli.pictures import draw
from sscd_vec.encoder.isolation import Measured
from sscd_vec.files import find_images
from sscd_vec.locks import locked
from tests.app.running import Running
from tests.tiny_encoder import TinyEncoder

PATIENT = Limits(timeout=300.0, decoding=300.0)
WAIT = 300.0  # seconds for something that happens at once on an idle machine


@pytest.fixture
def client(engine: Engine) -> Iterator[TestClient]:
    app = create_app(engine, limits=PATIENT)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:  # noqa: ANN401
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def uploads(engine: Engine) -> Path:
    assert engine.bank.location is not None
    return engine.bank.location.uploads


# ---------------------------------------------------------------------- bombs


def tile_bomb() -> bytes:
    """A TIFF of 64×64 pixels whose only tile has 46 336²."""
    tags = {
        256: 64,
        257: 64,
        258: 8,
        259: 8,
        262: 1,
        277: 1,
        322: 46336,
        323: 46336,
        324: 8,
        325: 9,
    }
    directory = struct.pack("<H", len(tags))
    for tag, value in tags.items():
        directory += struct.pack("<HHLL", tag, 4, 1, value)
    return b"II*\0" + struct.pack("<L", 17) + b"\0" * 9 + directory + b"\0" * 4


def scan_bomb() -> bytes:
    """A progressive JPEG that repeats its last scan a thousand times."""
    plain = encoded(draw(1).resize((256, 256)), progressive=True)
    last = plain.rindex(b"\xff\xda")
    return plain[:last] + plain[last:-2] * 1000 + b"\xff\xd9"


BOMBS = {
    "tile": (tile_bomb(), 413),
    "scans": (scan_bomb(), 422),
    "comments": (b"P3\n" + b"#\n" * 200_000 + b"2 2\n255\n" + b"0 " * 12, 422),
    "one colour": (encoded(Image.new("L", (9000, 9000)), "PNG"), 413),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_before_it_is_decoded(client: TestClient, name: str) -> None:
    content, status = BOMBS[name]
    answer = client.post("/search", files={"image": ("x", content)})
    assert answer.status_code == status, answer.text
    good = client.post("/search", files={"image": ("x", encoded(draw(3)))})
    assert good.status_code == 200


def test_a_decoder_that_takes_too_long_is_killed(engine: Engine) -> None:
    slow = encoded(Image.new("RGB", (6000, 5000), "red"), "PNG", compress_level=1)
    app = create_app(engine, limits=Limits(decoding=0.02))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        answer = client.post("/search", files={"image": ("x", slow)})
        assert answer.status_code == 422
        assert "its decoder was killed" in answer.json()["error"]
        assert client.get("/health").status_code == 200


async def keep(_: int, pixels: Pixels) -> Pixels:
    return pixels


def test_large_images_are_held_small() -> None:
    async def pixels_of(decoding: Decoding, content: bytes) -> Pixels:
        return (await decoding.each([content], keep))[0]

    async def scenario() -> None:
        decoding = Decoding(Limits(decoding=300.0))
        try:
            for width, height in ((4000, 3000), (2048, 2048), (2049, 2049), (12_000, 400)):
                content = encoded(Image.new("RGB", (width, height), (7, 7, 7)), "PNG")
                held = await pixels_of(decoding, content)
                assert held.shape[0] * held.shape[1] <= KEPT_PIXELS
                assert (held == 7).all()
                assert held.shape[0] / held.shape[1] == pytest.approx(height / width, rel=0.01)
        finally:
            decoding.close()

    asyncio.run(scenario())


def test_slow_images_leave_the_processor_and_the_memory_to_others() -> None:
    """Small images are decoded by other processes, and slow ones share one budget of memory."""

    async def scenario() -> None:
        decoding = Decoding(Limits(decoding=300.0))
        slow = encoded(Image.new("RGB", (3000, 3000)), "PNG")
        try:
            assert len(await decoding.each([slow, encoded(draw(3))], keep)) == 2
            for each in decoding._slow._running:
                pid = each._child.pid
                assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
            assert decoding._slow._running and decoding._fast._running
            async with decoding._memory.take(decoding._memory.total):
                waiting = asyncio.create_task(decoding.each([slow], keep))
                await asyncio.wait_for(decoding.each([encoded(draw(3))], keep), WAIT)
                assert not waiting.done()
            await asyncio.wait_for(waiting, WAIT)
        finally:
            decoding.close()

    asyncio.run(scenario())


def test_a_request_holds_one_slow_image_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def scenario(*contents: bytes) -> None:
        decoding = Decoding(Limits(decoding=300.0))
        decode = decoding._decode

        async def noted(*args: Any) -> Pixels:  # noqa: ANN401
            events.append("decode")
            return await decode(*args)

        async def work(position: int, _: Pixels) -> int:
            events.append("work")
            return position

        monkeypatch.setattr(decoding, "_decode", noted)
        try:
            assert await decoding.each(contents, work) == list(range(len(contents)))
        finally:
            decoding.close()

    small, slow = encoded(draw(3)), encoded(Image.new("RGB", (2100, 2100)), "PNG")
    asyncio.run(scenario(small, slow, small))
    assert events == ["decode", "work"] * 3
    events.clear()
    asyncio.run(scenario(small, small))
    assert events == ["decode", "decode", "work", "work"]


def test_small_images_are_searched_beside_a_crowd_of_large_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each image of an album is a batch of its own, and the small one's turn comes between them."""
    album = [("image", ("x", encoded(draw(n).resize((1500, 1500))))) for n in range(4)]
    plain, batches = engine.search, []

    def search(requests: Any) -> Any:  # noqa: ANN401
        batches.append([request.pixels.shape[0] for request in requests])
        return plain(requests)

    monkeypatch.setattr(engine, "search", search)
    app = create_app(engine, limits=PATIENT)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        assert client.post("/search", files=album).status_code == 200
        small = encoded(draw(3).resize((320, 240)))
        assert client.post("/search", files={"image": ("x", small)}).status_code == 200
    assert max(map(len, batches)) <= 2 and sum(map(len, batches)) == 5
    assert set(engine.handlers()) >= {"search", "large search"}


def test_a_heatmap_of_two_slow_images_does_not_wait_for_itself(engine: Engine) -> None:
    large = encoded(draw(3).resize((2300, 2300)), "PNG", compress_level=1)
    app = create_app(engine, limits=PATIENT)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        path = engine.bank.images()[3].file
        assert path is not None
        path.path.write_bytes(large)
        (key,) = [i.key for i in engine.bank.images() if i.file and i.file.path == path.path]
        answer = client.post("/heatmap", files={"image": ("x", large)}, data={"key": str(key)})
        assert answer.status_code == 200, answer.text


def test_slow_images_wait_in_lanes_of_their_own() -> None:
    async def scenario() -> None:
        lane, release, entered = Lane(1, 2), asyncio.Event(), 0

        async def visit() -> None:
            nonlocal entered
            async with lane.enter():
                entered += 1
                await release.wait()

        visits = [asyncio.create_task(visit()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert entered == 1
        with pytest.raises(Refused, match="too many large images"):
            await visit()
        visits[2].cancel()  # whoever gives up makes room
        await asyncio.sleep(0.01)
        visits.append(asyncio.create_task(visit()))
        release.set()
        await asyncio.gather(visits[0], visits[1], visits[3])
        await visit()
        assert entered == 4

    asyncio.run(scenario())
    large = Measured(3000, 4000, 1)
    assert Cost.of(large, encoded(draw(1), "PNG")).work == 12_000_000
    assert Cost.of(large, encoded(draw(1).resize((256, 256)))).work == 3_000_000
    assert Cost.of(large, scan_bomb()).work > 16_000_000


# ---------------------------------------------------------------------- batch neighbours


def test_a_bad_request_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TinyEncoder.heatmap

    def heatmap(self: TinyEncoder, image: Any, other: Any) -> Any:  # noqa: ANN401
        if image.min() == image.max():
            raise RuntimeError("nothing to see")
        return plain(self, image, other)

    monkeypatch.setattr(TinyEncoder, "heatmap", heatmap)
    good = Pair(np.asarray(draw(1)), np.asarray(draw(2)))
    bad = Pair(np.zeros((9, 9, 3), np.uint8), np.asarray(draw(2)))
    answers = engine.handlers()["heatmap"]([good, bad, good])
    assert [isinstance(answer, RuntimeError) for answer in answers] == [False, True, False]


def test_a_bad_removal_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Bank.remove

    def remove(self: Bank, ids: Any) -> int:  # noqa: ANN401
        if "bad" in ids:
            raise RuntimeError("bad")
        return plain(self, ids)

    monkeypatch.setattr(Bank, "remove", remove)
    ids = [image.id for image in engine.bank.images()]
    answers = engine.handlers()["remove"]([[ids[0]], ["bad"], [ids[1], ids[2]]])
    assert answers[0] == 1 and answers[2] == 2 and isinstance(answers[1], RuntimeError)
    assert len(engine.bank) == 9


# ---------------------------------------------------------------------- numbers and text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/image/9223372036854775808", 404),
        ("/image/" + "9" * 5000, 404),
        ("/image/0", 404),
        ("/image/1?side=" + "9" * 5000, 400),
        ("/bank?text=" + "a" * 50_001, 400),
        ("/bank?offset=9223372036854775808", 400),
        ("/bank?offset=" + "9" * 5000, 400),
        ("/bank?limit=-1", 400),
        ("/bank?text=%ff%00%ed%a0%80", 200),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_and_text_are_bounded(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    assert len(answer.content) < 1000  # an error does not repeat what came


@pytest.mark.parametrize("key", ["9223372036854775808", "9" * 4000, "9" * 20_000, "٣", "-1", ""])
def test_heatmap_keys_are_bounded(client: TestClient, key: str) -> None:
    files = {"image": ("x", encoded(draw(3)))}
    assert client.post("/heatmap", files=files, data={"key": key}).status_code == 400


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"ids": ["\\ud800"]}', 400),
        ('{"ids": [""]}', 400),
        (json.dumps({"ids": ["é" * 8192]}), 200),
        (json.dumps({"ids": ["a" * 8193]}), 400),
        (json.dumps({"ids": ["a"] * 10_001}), 413),
        (json.dumps({"ids": ["a", "a", "\0", "upload:\u202e"]}), 200),
        ('{"ids": ' + "9" * 5000 + "}", 400),
    ],
    ids=lambda value: str(value)[:24],
)
def test_ids_are_bounded(client: TestClient, body: str, status: int) -> None:
    answer = client.post("/remove", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    "kinds", [["application/json"], [], ["application/json", "image/png"]], ids=str
)
def test_json_that_would_grow_in_memory_is_refused_unread(
    client: TestClient, kinds: list[str]
) -> None:
    """Empty lists: 32 MiB of them become a gigabyte, and the server does nothing else meanwhile."""
    bomb = b'{"ids": [' + b"[[]]," * 2**20 + b"[]]}"
    headers = [("content-type", kind) for kind in kinds]
    for path in ("/remove", "/decide", "/parquet"):
        answer = client.post(path, content=bomb, headers=headers)
        assert answer.status_code == 413, answer.text
        pieces = (bomb[start : start + 2**20] for start in range(0, len(bomb), 2**20))
        assert client.post(path, content=pieces, headers=headers).status_code == 413


def test_a_full_disk_refuses_no_search(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms stay in memory: what is larger than a megabyte was written to a temporary file."""

    def rollover(self: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", rollover)
    noise = np.random.default_rng(1).integers(0, 256, (700, 700, 3), np.uint8)
    large = encoded(Image.fromarray(noise), "PNG")
    assert len(large) > 2**20
    assert client.post("/search", files={"image": ("x", large)}).status_code == 200


def test_a_file_name_of_any_codec_is_echoed_as_text(client: TestClient) -> None:
    image = encoded(draw(3))
    names = {"utf-8": "a.jpg", "unicode_escape": "\\ud800.jpg", "zlib": "z", "idna": "xn--"}
    for codec, name in names.items():
        body = (
            b'--x\r\nContent-Disposition: form-data; name="image"; filename="'
            + name.encode() + b'"\r\n\r\n' + image + b"\r\n--x--\r\n"
        )  # fmt: skip
        kind = {"Content-Type": f"multipart/form-data; boundary=x; charset={codec}"}
        answer = client.post("/search", content=body, headers=kind)
        assert answer.status_code in (200, 400), answer.text
        if codec == "utf-8":
            assert answer.json()["results"][0]["image"] == "a.jpg"


def test_answers_name_files_and_no_folder_of_the_server(client: TestClient, photos: Path) -> None:
    files = [("image", (name, encoded(draw(3)))) for name in ("first.jpg", "<second>\n.jpg")]
    results = client.post("/search", files=files).json()["results"]
    assert results[0]["image"] == "first.jpg" and "<second>" in results[1]["image"]
    raw = client.post(
        "/search", content=encoded(draw(3)), headers={"Content-Type": "image/jpeg"}
    ).json()
    assert raw["results"][0]["image"] == "1"
    assert results[0]["matches"][0]["name"] == "photos/picture-03.png"
    listed = client.get("/bank").json()["images"]
    assert all(str(photos.parent) not in image["name"] for image in listed)


# ---------------------------------------------------------------------- connections


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends a connection; waits for it."""
    connection.settimeout(WAIT)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def test_silent_and_slow_connections_are_closed(engine: Engine) -> None:
    with Running(engine, Limits(idle=1.0)) as server:
        place = ("127.0.0.1", server.port)
        with socket.create_connection(place) as silent, socket.create_connection(place) as slow:
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            assert is_closed(silent) and is_closed(slow)
        with socket.create_connection(place) as kept:
            kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            kept.settimeout(WAIT)
            assert b"200 OK" in kept.recv(4096)
            kept.sendall(b"GET /health")  # bytes alone do not keep it open
            assert is_closed(kept)


def test_idle_connections_make_room(engine: Engine) -> None:
    with Running(engine, Limits(idle=600.0, connections=30, per_address=20)) as server:
        place = ("127.0.0.1", server.port)
        idle = [socket.create_connection(place) for _ in range(60)]
        try:
            with socket.create_connection(place) as asking:
                asking.settimeout(WAIT)
                asking.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b"200 OK" in asking.recv(4096)
            assert all(is_closed(connection) for connection in idle[:40])
            assert 'sscd_vec_refused_total{reason="idle"}' in engine.metrics.render().decode()
        finally:
            for connection in idle:
                connection.close()


class _Fake:
    def __init__(self, is_working: bool) -> None:
        self.is_working, self.is_open = is_working, True

    def abort(self) -> None:
        self.is_open = False


def test_who_makes_room_for_whom() -> None:
    crowd: Any = Connections(Limits(connections=5, per_address=3), Metrics())
    busy, first, second = _Fake(True), _Fake(False), _Fake(False)
    assert all(crowd.admit(one, "a") for one in (busy, first, second))
    crowd.rest(first, "a")  # it asked again since
    assert crowd.admit(_Fake(True), "a") and not second.is_open and first.is_open
    assert crowd.admit(_Fake(True), "a") and not first.is_open
    assert not crowd.admit(_Fake(False), "a")  # all of theirs are at work
    others = [_Fake(False), _Fake(False)]
    assert all(crowd.admit(one, "b") for one in others) and len(crowd) == 5
    assert not crowd.admit(_Fake(False), "c")  # the largest crowd has none to close
    crowd.leave(busy, "a")
    assert crowd.admit(_Fake(False), "c") and len(crowd) == 5


# ---------------------------------------------------------------------- disks and other writers


def test_an_added_image_is_on_disk_before_the_answer(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: set[int] = set()
    plain = os.fsync

    def fsync(handle: int) -> None:
        plain(handle)
        forced.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    assert client.post("/add", files={"image": ("x", encoded(draw(99)))}).status_code == 200
    (kept,) = uploads(engine).iterdir()
    assert engine.bank.location is not None
    assert {kept.stat().st_ino, os.stat(engine.bank.location.index).st_ino} <= forced
    assert {uploads(engine).stat().st_ino} <= forced  # its name too


def test_a_full_disk_adds_nothing_and_leaves_nothing(
    client: TestClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = {"image": ("x", encoded(draw(99)))}

    def commit(self: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(engine.bank.storage.index), "commit", commit)
        refused = client.post("/add", files=image)
    assert refused.status_code == 507 and "disk is full" in refused.json()["error"]
    assert list(uploads(engine).iterdir()) == []
    assert client.get("/info").json()["images"] == 12
    assert client.post("/add", files=image).status_code == 200
    assert len(list(uploads(engine).iterdir())) == 1


def test_another_writer_is_waited_for_politely(client: TestClient, engine: Engine) -> None:
    engine.bank.storage._wait = 0.1
    assert engine.bank.location is not None
    with locked(engine.bank.location.folder / LOCK, purpose="test it"):
        busy = client.post("/add", files={"image": ("x", encoded(draw(99)))})
        assert busy.status_code == 503 and busy.headers["retry-after"] == "1"
        found = client.post("/search", files={"image": ("x", encoded(draw(3)))})
        assert found.status_code == 200  # searching goes on
    assert client.post("/add", files={"image": ("x", encoded(draw(99)))}).status_code == 200


def test_read_only_storage_is_served(bank: Bank, encoder: TinyEncoder) -> None:
    assert bank.location is not None
    with Bank(bank.location.index, model=encoder, read_only=True) as opened:
        app = create_app(Engine(opened, Metrics()), limits=PATIENT)
        with TestClient(app, base_url="http://127.0.0.1") as client:
            assert client.get("/info").json()["read_only"] is True
            files = {"image": ("x", encoded(draw(3)))}
            assert client.post("/search", files=files).json()["results"][0]["matches"][0]["copy"]
            assert client.post("/add", files=files).status_code == 404
            bank.add([np.asarray(draw(99))], ids=["new"])  # by another program
            files = {"image": ("x", encoded(draw(99)))}
            best = client.post("/search", files=files).json()["results"][0]["matches"][0]
            assert best["id"] == "new" and best["key"] is not None


# ---------------------------------------------------------------------- strangers' banks


def test_a_strangers_row_shows_and_deletes_nothing(
    client: TestClient, engine: Engine, tmp_path: Path, photos: Path
) -> None:
    victim = tmp_path / "private.png"
    victim.write_bytes((photos / "picture-00.png").read_bytes())
    assert engine.bank.location is not None
    records = Records(engine.bank.location.folder / RECORDS)
    records.announce([BankImage("upload:x", "", 1, find_images(victim)[0])], 0)
    records.confirm(records.generation)
    (planted,) = records.page(0, 9, "upload:x")[1]
    records.close()
    assert client.get(f"/image/{planted.key}").status_code == 403
    files = {"image": ("x", encoded(draw(3)))}
    refused = client.post("/heatmap", files=files, data={"key": str(planted.key)})
    assert refused.status_code == 403
    assert client.post("/remove", json={"ids": ["upload:x"]}).status_code == 200
    assert victim.exists()
