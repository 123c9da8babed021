"""Attack the running server; measure what honest clients notice.

    python benchmarks faults/attack [--campaigns bombs neighbours idle] [--rounds 4]

- ``bombs``: small uploads that are huge or endless when decoded, 24 at a time, while an honest
  client searches; before each round it searches alone, because a busy machine is slow without any
  bomb too. Figures: its waiting times and failures, and the peak memory of the server, alone and
  with its decoders: its resident set, and what is private of theirs (the rest it has too).
- ``neighbours``: good heatmaps and removals with bad ones between them.
- ``idle``: connections that say nothing, and ``/health`` beside them.

The server is the real program with the shipped model.
"""

import argparse
import asyncio
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from pathlib import Path

import httpx2 as httpx
import numpy as np

import results
from faults.bombs import bombs, encoded
from sscd_vec.cli.pictures import draw

CAMPAIGNS = ("bombs", "neighbours", "idle")
IMAGES = 12
AT_ONCE = 24
ALONE = 4  # searches before each round
Figures = dict[str, object]
Sent = Coroutine[object, object, int]

# ------------------------------------------------------------------ the server


class Program:
    """``sscd-vec serve`` on a bank of drawn images, and how much memory its processes take."""

    def __init__(self, folder: Path, *options: str) -> None:
        """Make the bank and start the server."""
        photos = folder / "photos"
        photos.mkdir(parents=True)
        for seed in range(IMAGES):
            draw(seed).save(photos / f"{seed:02}.jpg", quality=90)
        bank = str(folder / "bank.faiss")
        run = [sys.executable, "-m", "sscd_vec"]
        subprocess.run([*run, "index", str(photos), "--to", bank], check=True)
        self._server = subprocess.Popen(
            [*run, "serve", bank, "--port", "0", "--json", *options], stdout=subprocess.PIPE
        )
        assert self._server.stdout is not None
        self.url = str(json.loads(self._server.stdout.readline())["url"])
        self.peak = self.tree_peak = 0
        self.loads: list[float] = []
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def stop(self) -> None:
        """End it."""
        self._server.terminate()
        self._server.wait(30)

    def _watch(self) -> None:
        while self._server.poll() is None:
            own = _mib(self._server.pid, "status", "VmRSS:")
            decoders = started(self._server.pid)
            private = sum(_mib(pid, "smaps_rollup", "Private_") for pid in decoders)
            self.peak, self.tree_peak = max(self.peak, own), max(self.tree_peak, own + private)
            self.loads.append(os.getloadavg()[0])
            time.sleep(0.05)


def _mib(pid: int, file: str, start: str) -> int:
    """Memory of a process: the sum of all lines that start so."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(start)) // 1024


def children(pid: int) -> list[int]:
    """Processes a process started."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(p) for task in tasks for p in (task / "children").read_text().split()]
    except OSError:
        return []


def started(pid: int) -> list[int]:
    """Children that run a program of their own.

    Until a new process does, it borrows the memory of its parent (vfork), which would count twice.
    """
    own = _command_line(pid)
    return [child for child in children(pid) if _command_line(child) not in (own, b"")]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


# ------------------------------------------------------------------ campaigns over HTTP


class Honest:
    """A client that searches for one small image again and again."""

    def __init__(self, session: httpx.AsyncClient) -> None:
        """Nothing is asked yet."""
        self._session = session
        self._image = encoded(draw(3).resize((320, 240)), "JPEG", quality=80)
        self.alone: list[float] = []
        self.beside: list[float] = []
        self.failures = 0

    async def search(self, waits: list[float]) -> None:
        """Ask once and rest."""
        begun = time.monotonic()
        try:
            answer = await self._session.post("/search", files={"image": ("x", self._image)})
            self.failures += answer.status_code != 200
        except httpx.HTTPError:
            self.failures += 1
        waits.append(time.monotonic() - begun)
        await asyncio.sleep(0.2)

    async def search_beside(self, attack: Iterable[Coroutine[object, object, None]]) -> None:
        """Search alone for a while, then until an attack is over."""
        for _ in range(ALONE):
            await self.search(self.alone)
        running = [asyncio.create_task(one) for one in attack]
        while not all(one.done() for one in running):
            await self.search(self.beside)
        await asyncio.gather(*running)


async def attack_with_bombs(url: str, rounds: int, seed: int) -> Figures:
    """Bombs of every kind, many at once, beside an honest client."""
    chosen = random.Random(seed)
    kinds = bombs()
    statuses: Counter[str] = Counter()

    async with httpx.AsyncClient(base_url=url, timeout=120) as session:
        honest = Honest(session)
        await honest.search([])  # everything is loaded

        async def bomb(name: str) -> None:
            files = [("image", ("x", content)) for content in kinds[name]]
            answer = await session.post(chosen.choice(("/search", "/add")), files=files)
            statuses[f"{name} {answer.status_code}"] += 1

        mixed = [chosen.choices(list(kinds), k=AT_ONCE) for _ in range(rounds)]
        for names in [*mixed, *([name] * AT_ONCE for name in kinds)]:
            await honest.search_beside(map(bomb, names))
    return {
        "bombs": sum(statuses.values()),
        "statuses": dict(sorted(statuses.items())),
        "honest_searches": len(honest.beside),
        "honest_failures": honest.failures,
        "honest_above_2_seconds": sum(wait > 2 for wait in honest.beside),
        "honest_seconds": _quantiles(honest.beside),
        "searches_without_bombs": len(honest.alone),
        "above_2_seconds_without_bombs": sum(wait > 2 for wait in honest.alone),
        "seconds_without_bombs": _quantiles(honest.alone),
    }


def _quantiles(waits: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(waits, p)), 2) for p in (50, 90, 100)}


async def attack_neighbours(url: str, good: int, bad: int) -> Figures:
    """Good and bad heatmaps and removals, shuffled and sent together."""
    image = encoded(draw(3).resize((160, 120)), "JPEG", quality=80)
    ribbon = encoded(draw(3).resize((600, 2)), "PNG")
    async with httpx.AsyncClient(base_url=url, timeout=300) as session:
        key = str((await session.get("/bank")).json()["images"][0]["key"])

        async def heatmap(content: bytes, wanted: str) -> int:
            answer = await session.post(
                "/heatmap", files={"image": ("x", content)}, data={"key": wanted}
            )
            return int(answer.status_code)

        async def remove(ids: object) -> int:
            return int((await session.post("/remove", json={"ids": ids})).status_code)

        fine = [heatmap(image, key) for _ in range(good)] + [remove(["x"]) for _ in range(good)]
        wrong = [heatmap(ribbon, key) for _ in range(bad)]
        wrong += [heatmap(image, "9" * 30) for _ in range(bad)]
        wrong += [remove([""]) for _ in range(bad)]
        answers = await asyncio.gather(*_shuffled(fine, wrong))
    return {
        "good": 2 * good,
        "good_failed": sum(is_good and status not in (200, 503) for status, is_good in answers),
        "good_told_to_wait": sum(is_good and status == 503 for status, is_good in answers),
        "bad": 3 * bad,
        "bad_statuses": dict(Counter(str(s) for s, is_good in answers if not is_good)),
    }


def _shuffled(
    fine: list[Sent], wrong: list[Sent]
) -> list[Coroutine[object, object, tuple[int, bool]]]:
    async def marked(request: Sent, is_good: bool) -> tuple[int, bool]:
        return await request, is_good

    everything = [marked(each, True) for each in fine] + [marked(each, False) for each in wrong]
    random.Random(27).shuffle(everything)
    return everything


def attack_with_silence(url: str, connections: int) -> Figures:
    """Open connections that say nothing, then ask for ``/health``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, connections + 100)), hard))
    address = httpx.URL(url)
    silent = []
    try:
        for _ in range(connections):
            silent.append(socket.create_connection((address.host, address.port), timeout=30))
        waits = []
        for _ in range(10):
            begun = time.monotonic()
            status = httpx.get(f"{url}/health", timeout=30).status_code
            waits.append(time.monotonic() - begun)
            if status != 200:
                raise AssertionError(f"/health answered {status}")
        image = encoded(draw(3).resize((160, 120)), "JPEG")
        found = httpx.post(f"{url}/search", files={"image": ("x", image)}, timeout=60)
    finally:
        for connection in silent:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return {
        "connections": connections,
        "health_answers": len(waits),
        "health_seconds_at_most": round(max(waits), 2),
        "search_status": found.status_code,
    }


# ------------------------------------------------------------------ all of them


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaigns", nargs="+", choices=CAMPAIGNS, default=CAMPAIGNS)
    parser.add_argument("--rounds", type=int, default=4, help="of 24 bombs of mixed kinds")
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=27)
    options = parser.parse_args()
    for campaign in options.campaigns:
        with tempfile.TemporaryDirectory() as folder:
            program = Program(Path(folder))
            try:
                figures = _run(campaign, program.url, options)
            finally:
                program.stop()
        figures |= {
            "peak_mib": {"server": program.peak, "with_decoders": program.tree_peak},
            "load_average_of_the_machine": round(float(np.mean(program.loads)), 1),
        }
        print(campaign, figures, flush=True)
        results.write(f"faults_{campaign}", figures)


def _run(campaign: str, url: str, options: argparse.Namespace) -> Figures:
    if campaign == "bombs":
        return asyncio.run(attack_with_bombs(url, options.rounds, options.seed))
    if campaign == "neighbours":
        return asyncio.run(attack_neighbours(url, good=40, bad=8))
    return attack_with_silence(url, options.connections)


if __name__ == "__main__":
    main()
