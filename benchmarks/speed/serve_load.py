"""Load on `sscd-vec serve`: many clients at once for a minute, statuses, latencies and memory.

    python benchmarks speed/serve_load [--model MODEL] [--clients 50] [--seconds 600]
    python benchmarks speed/serve_load --clients 200 --seconds 60 --name serve_crowd

Starts the real program on a bank of drawn pictures. Each client searches for an edited copy again
and again, with a fresh choice of picture; one that is told to come back (503 with ``Retry-After``)
waits as long. An error is any other answer than these two. Memory is the server's resident set with
its decoders', sampled each second and compared before, in the first and in the second half. Latency
is that of answered searches; on a machine that is busy with other work the CPU time says more.
"""

import argparse
import asyncio
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2 as httpx
import numpy as np

import results
from accuracy.command_model import default_model, label, open_encoder
from faults.attack import started
from speed.measure import resident_mib
from sscd_vec.cli.pictures import EDITS, draw

PICTURES = 48
POLITE = "503, come back later"


def main() -> None:
    """Make a bank, start the server, load it, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model or imagenet:TRUNK; the shipped one by default")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--name", default="serve_load", help="of the record")
    parser.add_argument("--concurrent", type=int, default=16)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder, "photos")
        photos.mkdir()
        for seed in range(PICTURES):
            draw(seed).save(photos / f"{seed:03}.jpg", quality=90)
        model = asked.model or default_model()
        if model.startswith("imagenet:"):
            open_encoder(model).save_pretrained(Path(folder, "model"))
            model = str(Path(folder, "model"))
        bank = Path(folder, "bank.faiss")
        program = [sys.executable, "-m", "sscd_vec"]
        environment = {**os.environ, "SSCD_VEC_CACHE": str(Path(folder, "cache"))}
        index = [*program, "index", str(photos), "--to", str(bank), "--model", model]
        subprocess.run(index, check=True, env=environment)
        serve = [*program, "serve", str(bank), "--port", "0", "--concurrent", str(asked.concurrent)]
        server = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            address = _address(server)
            figures = asyncio.run(load(address, server.pid, asked.clients, asked.seconds))
        finally:
            server.terminate()
            server.wait(20)
    print(figures)
    fingerprint = open_encoder(asked.model).fingerprint
    results.write(asked.name, {"model": label(asked.model), **figures}, encoder=fingerprint)


async def load(address: str, pid: int, clients: int, seconds: float) -> dict[str, object]:
    """Run the clients and watch the server."""
    bodies = []
    names = list(EDITS)
    for seed in range(PICTURES):
        edited = EDITS[names[seed % 3]](draw(seed), np.random.default_rng(seed))
        buffer = io.BytesIO()
        edited.save(buffer, "JPEG", quality=75)
        bodies.append(buffer.getvalue())
    statuses: dict[str, int] = {}
    latencies: list[float] = []
    memory: list[float] = []
    busy: list[float] = []
    cpu = cpu_seconds(pid)
    stop = time.monotonic() + seconds

    async def client(number: int) -> None:
        rng = np.random.default_rng(number)
        async with httpx.AsyncClient(base_url=address, timeout=60) as session:
            while time.monotonic() < stop:
                body = bodies[int(rng.integers(len(bodies)))]
                start = time.monotonic()
                try:
                    answer = await session.post("/search", files={"image": ("x.jpg", body)})
                    status = str(answer.status_code)
                except httpx.HTTPError as error:
                    status = type(error).__name__
                if status == "503" and "retry-after" in answer.headers:
                    status = POLITE
                    await asyncio.sleep(int(answer.headers["retry-after"]))
                elif status == "200":
                    latencies.append(time.monotonic() - start)
                statuses[status] = statuses.get(status, 0) + 1

    async def watch() -> None:
        while time.monotonic() < stop:
            memory.append(resident_mib(pid) + sum(map(resident_mib, started(pid))))
            busy.append(os.getloadavg()[0])
            await asyncio.sleep(1)

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    async with httpx.AsyncClient(base_url=address) as session:
        text = (await session.get("/metrics")).text
    batches = float(re.search(r"^sscd_vec_batch_images_count (\S+)", text, re.M)[1])  # type: ignore[index]
    images = float(re.search(r"^sscd_vec_images_total (\S+)", text, re.M)[1])  # type: ignore[index]
    half = len(memory) // 2
    requests = sum(statuses.values())
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": requests,
        "statuses": statuses,
        "errors": requests - len(latencies) - statuses.get(POLITE, 0),
        "searches_per_second": round(len(latencies) / seconds, 1),
        "cpu_seconds_per_search": round((cpu_seconds(pid) - cpu) / len(latencies), 4),
        "load_average_of_the_machine": round(float(np.mean(busy)), 1),
        "latency_ms": {
            f"p{p}": round(1000 * float(np.percentile(latencies, p)), 1) for p in (50, 90, 99, 100)
        },
        "images_per_batch": round(images / batches, 2),
        "memory_mib": {
            "start": round(memory[0]),
            "first_half_max": round(max(memory[:half])),
            "second_half_max": round(max(memory[half:])),
        },
    }


def cpu_seconds(pid: int) -> float:
    """CPU time of the server and its decoders so far."""
    total = 0.0
    for each in (pid, *started(pid)):
        fields = Path(f"/proc/{each}/stat").read_text().rsplit(")", 1)[1].split()
        total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def _address(server: "subprocess.Popen[str]") -> str:
    assert server.stderr is not None
    for line in server.stderr:
        found = re.search(r"http://\S+:\d+", line)
        if found:
            return found[0]
    raise RuntimeError("the server ended without listening")


if __name__ == "__main__":
    main()
