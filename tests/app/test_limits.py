"""Back-pressure, time limits and micro-batches, with a worker that can be held up."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from sscd_vec.app.limits import (
    LARGE_BODY,
    Guard,
    Limits,
    Message,
    Receive,
    Refused,
    Scope,
    Send,
)
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.uploads import Budget
from sscd_vec.app.worker import Worker

HEADERS = [(b"host", b"localhost"), (b"content-type", b"image/png")]


def _scope(method: str = "POST", headers: list[tuple[bytes, bytes]] | None = None) -> Scope:
    return {"type": "http", "method": method, "path": "/search", "headers": headers or HEADERS}


async def _ask(guard: Guard, receive: Receive | None = None) -> tuple[int, dict[bytes, bytes]]:
    sent: list[Message] = []

    async def nothing() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await guard(_scope(), receive or nothing, send)
    return sent[0]["status"], dict(sent[0]["headers"])


async def _ok(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def test_requests_beyond_the_queue_are_told_to_come_back() -> None:
    async def scenario() -> None:
        release = asyncio.Event()
        running = 0
        most = 0

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await release.wait()
            running -= 1
            await _ok(scope, receive, send)

        guard = Guard(slow, Limits(concurrent=2, waiting=3), Metrics())
        asked = [asyncio.create_task(_ask(guard)) for _ in range(8)]
        await asyncio.sleep(0.05)
        refused = [task.result() for task in asked if task.done()]
        assert [status for status, _ in refused] == [503] * 3
        assert all(headers[b"retry-after"] == b"1" for _, headers in refused)
        release.set()
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        assert sorted(statuses) == [200] * 5 + [503] * 3
        assert most == 2
        assert (await _ask(guard))[0] == 200  # the slots are free again

    asyncio.run(scenario())


def test_slow_upload_and_slow_work_end() -> None:
    async def reading(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        await _ok(scope, receive, send)

    async def working(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await asyncio.sleep(60)

    async def trickle() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def scenario() -> None:
        limits = Limits(timeout=0.2)
        assert (await _ask(Guard(reading, limits, Metrics()), trickle))[0] == 408
        metrics = Metrics()
        assert (await _ask(Guard(working, limits, metrics)))[0] == 503
        assert 'sscd_vec_refused_total{reason="timeout"} 1' in metrics.render().decode()

    asyncio.run(scenario())


def test_uploads_are_counted_together() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def reading(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await release.wait()
            await _ok(scope, receive, send)

        async def large() -> Message:
            return {"type": "http.request", "body": bytes(LARGE_BODY + 1), "more_body": False}

        guard = Guard(reading, Limits(body=LARGE_BODY + 1, concurrent=8), Metrics())
        asked = [asyncio.create_task(_ask(guard, large)) for _ in range(4)]
        await asyncio.sleep(0.05)
        ((status, headers),) = [task.result() for task in asked if task.done()]
        assert (status, headers[b"retry-after"], headers[b"connection"]) == (503, b"1", b"close")
        small = asyncio.create_task(_ask(guard))
        await asyncio.sleep(0.05)
        assert not small.done()  # let in: what large ones hold is not counted against it
        release.set()
        assert (await small)[0] == 200
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        assert sorted(statuses) == [200, 200, 200, 503]
        assert guard.held == 0
        assert (await _ask(guard, large))[0] == 200

    asyncio.run(scenario())


def test_small_requests_wait_neither_for_large_bodies_nor_for_slow_uploads() -> None:
    async def scenario() -> None:
        release = asyncio.Event()
        large = bytes(LARGE_BODY + 1)

        async def working(scope: Scope, receive: Receive, send: Send) -> None:
            received = b""
            while (message := await receive())["more_body"]:
                received += message["body"]
            if received + message["body"] == large:
                await release.wait()
            await _ok(scope, receive, send)

        async def upload() -> Message:
            return {"type": "http.request", "body": large, "more_body": False}

        async def silent() -> Message:
            await release.wait()
            return {"type": "http.disconnect"}

        guard = Guard(working, Limits(concurrent=2), Metrics())
        waiting = [
            asyncio.create_task(_ask(guard, one)) for one in (upload, upload, silent, silent)
        ]
        await asyncio.sleep(0.05)
        assert (await asyncio.wait_for(_ask(guard), 10))[0] == 200
        assert not any(task.done() for task in waiting)
        release.set()
        statuses = [status for status, _ in await asyncio.gather(*waiting)]
        assert statuses == [200, 200, 400, 400]  # the silent ones broke off
        assert guard.held == guard.admitted == 0

    asyncio.run(scenario())


def test_pixels_are_waited_for_in_order_and_come_back() -> None:
    async def scenario() -> None:
        budget = Budget(10)
        begun: list[str] = []
        release = {name: asyncio.Event() for name in "abcd"}

        async def hold(name: str, pixels: int) -> None:
            async with budget.take(pixels):
                begun.append(name)
                await release[name].wait()

        async def settled() -> str:
            await asyncio.sleep(0.02)
            return "".join(begun)

        tasks = {
            n: asyncio.create_task(hold(n, p)) for n, p in zip("abcd", (6, 9, 3, 1), strict=True)
        }
        assert await settled() == "a"  # c and d would fit, but b came before them
        tasks["b"].cancel()
        assert await settled() == "acd"  # who gives up stands in nobody's way
        tasks["a"].cancel()
        last = asyncio.create_task(hold("b", 6))
        assert await settled() == "acdb"  # what a cancelled request held is free again
        for event in release.values():
            event.set()
        await asyncio.gather(last, tasks["c"], tasks["d"])
        async with budget.take(10):
            pass
        async with budget.take(11):  # more than there are: all of them
            assert budget._free == 0

    asyncio.run(scenario())


class _Held:
    """A handler that waits until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.batches: list[list[Any]] = []

    def __call__(self, items: Sequence[Any]) -> list[Any]:
        self.gate.wait(10)
        self.batches.append(list(items))
        return [ValueError("bad item") if item == "bad" else item * 2 for item in items]


async def _until_taken(worker: Worker) -> None:
    """Wait until the worker's thread has what was handed in."""
    await asyncio.sleep(0)  # let it be handed in
    while worker.depth:
        await asyncio.sleep(0.01)


def test_waiting_requests_share_a_batch() -> None:
    held = _Held()
    worker = Worker({"double": held}, Metrics(), batch=4, waiting=50)

    async def scenario() -> list[Any]:
        first = asyncio.create_task(worker.ask("double", 0))
        await _until_taken(worker)
        rest = [asyncio.create_task(worker.ask("double", n)) for n in range(1, 10)]
        await asyncio.sleep(0.05)
        held.gate.set()
        return list(await asyncio.gather(first, *rest))

    assert asyncio.run(scenario()) == [2 * n for n in range(10)]
    assert [len(batch) for batch in held.batches] == [1, 4, 4, 1]
    worker.close()


def test_one_bad_item_fails_alone_and_kinds_do_not_mix() -> None:
    held = _Held()
    other = _Held()
    held.gate.set()
    other.gate.set()
    worker = Worker({"double": held, "other": other}, Metrics(), patience=0.05)

    async def scenario() -> list[Any]:
        return list(
            await asyncio.gather(
                *(worker.ask("double", x) for x in (1, "bad", 3)),
                worker.ask("other", 5),
                worker.ask("double", 7),
                return_exceptions=True,
            )
        )

    answers = asyncio.run(scenario())
    assert isinstance(answers[1], ValueError)
    assert [answers[0], answers[2], answers[3], answers[4]] == [2, 6, 10, 14]
    assert other.batches == [[5]]
    worker.close()


def test_a_search_waits_for_one_batch_of_slow_work_at_most() -> None:
    slow, quick = _Held(), _Held()
    quick.gate.set()
    worker = Worker({"slow": slow, "quick": quick}, Metrics())
    done: list[object] = []

    async def ask(kind: str, item: int, weight: float) -> None:
        done.append(await worker.ask(kind, item, weight) // 2)

    async def scenario() -> None:
        first = asyncio.create_task(ask("slow", 0, 1.0))
        await _until_taken(worker)
        tasks = [asyncio.create_task(ask("slow", n, 0.5)) for n in range(1, 7)]
        await asyncio.sleep(0.02)
        tasks += [asyncio.create_task(ask("quick", n, 0.0)) for n in (100, 101)]
        await asyncio.sleep(0.02)
        slow.gate.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(scenario())
    assert slow.batches == [[0], [1, 2], [3, 4], [5, 6]]
    assert quick.batches == [[100, 101]]
    assert done.index(100) < done.index(3)
    worker.close()


def test_full_queue_and_given_up_requests() -> None:
    held = _Held()
    worker = Worker({"double": held}, Metrics(), waiting=2)

    async def scenario() -> None:
        tasks = [asyncio.create_task(worker.ask("double", 0))]
        await _until_taken(worker)
        tasks += [asyncio.create_task(worker.ask("double", n)) for n in (1, 2)]
        await asyncio.sleep(0.02)
        with pytest.raises(Refused) as refusal:
            await worker.ask("double", 3)
        assert refusal.value.status == 503
        tasks[1].cancel()
        await asyncio.sleep(0.02)
        held.gate.set()
        assert await tasks[0] == 0 and await tasks[2] == 4

    asyncio.run(scenario())
    assert held.batches == [[0], [2]]  # nobody waits for 1 any more
    start = time.monotonic()
    worker.close()
    assert time.monotonic() - start < 5


def test_metrics_escape_and_accumulate() -> None:
    metrics = Metrics()
    metrics.requests.labels(path='a"b\\c\nd', status="200").inc()
    metrics.seconds.labels(path="/x").observe(0.03)
    metrics.seconds.labels(path="/x").observe(100.0)
    text = metrics.render().decode()
    assert 'path="a\\"b\\\\c\\nd"' in text
    assert 'sscd_vec_request_seconds_bucket{le="0.025",path="/x"} 0' in text
    assert 'sscd_vec_request_seconds_bucket{le="0.05",path="/x"} 1' in text
    assert 'sscd_vec_request_seconds_bucket{le="+Inf",path="/x"} 2' in text
    assert 'sscd_vec_request_seconds_sum{path="/x"} 100.03' in text
