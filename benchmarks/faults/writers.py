"""Several writers on one bank, some of them killed: is every acknowledged image found?

    python benchmarks faults/writers --rounds 20 [--backends faiss lite milvus] [--kinds two …]

- ``two``, ``four``: so many processes add images of their own at once.
- ``kill``: four processes add, and each is killed (-9) at a random moment.
- ``server``: a server takes images over HTTP while another process adds beside it; in every second
  round the server is killed while it takes an image. A Milvus Lite file belongs to one process, so
  there the other one must be told so instead.

Afterwards every image that was acknowledged must be found, index and records must agree, and adding
everything again must heal what is missing.
"""

import argparse
import contextlib
import http.client
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import results
from faults.thumbnails import open_bank, write_images
from sscd_vec.files import find_images
from sscd_vec.locks import LockHeldError

FILES = {"faiss": "known.faiss", "lite": "known.db"}
BACKENDS = (*FILES, "milvus")  # the last one a server
KINDS = {"two": 2, "four": 4, "kill": 4, "server": 1}
IMAGES = 24
CHUNK = 3  # images a writer adds before it lets others in
LOCKED = 75  # exit code of a writer that was told to wait for another
PATIENCE = 300.0
Round = dict[str, object]
Place = tuple[str, str]  # of the index, and of the bank's own files


# ------------------------------------------------------------------ processes of their own


def write(place: str, state: str, acks: str, wait: float, paths: Sequence[str]) -> None:
    """Add images, a few at a time, and note each as acknowledged."""
    with open(acks, "ab", buffering=0) as file:
        for start in range(0, len(paths), CHUNK):
            try:
                with open_bank(place, state=state, wait=wait) as bank:
                    for path in paths[start : start + CHUNK]:
                        bank.add([path], show_progress=False)
                        os.write(file.fileno(), f"{path}\n".encode())
            except LockHeldError:
                sys.exit(LOCKED)


def serve(place: str, state: str) -> None:
    """Serve the bank on a free port, and say on which."""
    import socket

    import uvicorn

    from sscd_vec.app.connections import server_config
    from sscd_vec.app.engine import Engine
    from sscd_vec.app.limits import Limits
    from sscd_vec.app.metrics import Metrics
    from sscd_vec.app.server import create_app

    listening = socket.create_server(("127.0.0.1", 0))
    with listening, open_bank(place, state=state, wait=60.0) as bank:
        engine, limits = Engine(bank, Metrics()), Limits(timeout=PATIENCE, decoding=PATIENCE)
        config = server_config(create_app(engine, limits=limits), limits, engine.metrics)
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(config).run(sockets=[listening])


# ------------------------------------------------------------------ one round


class Rounds:
    """Rounds of one kind on one backend, in folders of their own."""

    def __init__(
        self, kind: str, backend: str, folder: Path, images: int = IMAGES, uri: str | None = None
    ) -> None:
        """Nothing happens yet; ``uri`` is where a Milvus server listens."""
        self.kind, self.backend, self.folder, self.images = kind, backend, folder, images
        self._uri = uri

    def run(self, number: int) -> Round:
        """Make a bank, let the writers loose, look.

        Raises:
            AssertionError: An acknowledged image is lost, or the bank does not heal.
        """
        chance = random.Random(f"{self.kind}{self.backend}{number}")
        home = self.folder / f"{self.kind}-{self.backend}-{number}"
        paths = [str(path) for path in write_images(home / "images", self.images, number)]
        if self._uri is None:
            place = str(home / FILES[self.backend])
        else:
            place = f"{self._uri}/{self.kind}{number}"
        acks = home / "acks"
        bank = (place, str(home / "bank"))
        open_bank(place, state=bank[1]).close()
        acks.touch()
        begun = time.monotonic()
        if self.kind == "server":
            refused = self._beside_a_server(bank, acks, paths, chance, kill=number % 2 == 1)
        else:
            self._writers(bank, acks, paths, chance)
            refused = 0
        acknowledged = set(acks.read_text().split("\n")[:-1])
        found = self._check(bank, acknowledged, home / "images", paths)
        seconds = round(time.monotonic() - begun, 1)
        return {"acknowledged": len(acknowledged), **found, "refused": refused, "seconds": seconds}

    def _writers(
        self, bank: Place, acks: Path, paths: Sequence[str], chance: random.Random
    ) -> None:
        count = KINDS[self.kind]
        children = [
            _start("--write", *bank, str(acks), "600", *paths[n::count]) for n in range(count)
        ]
        if self.kind == "kill":
            for child in chance.sample(children, count):
                _wait_for_more(acks, chance.randint(1, 6), child)
                time.sleep(chance.uniform(0, 0.05))
                child.send_signal(signal.SIGKILL)
        codes = [child.wait(PATIENCE) for child in children]
        if self.kind != "kill" and any(codes):
            raise AssertionError(f"writers ended with {codes}")

    def _beside_a_server(
        self, bank: Place, acks: Path, paths: Sequence[str], chance: random.Random, *, kill: bool
    ) -> int:
        """Add half of the images over HTTP; return how many writers were told to wait."""
        server = _start("--serve", *bank, stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            half = len(paths) // 2
            wait = "1" if self.backend == "lite" else "600"
            writer = _start("--write", *bank, str(acks), wait, *paths[half:])
            last = chance.randrange(1, half) if kill else half
            for path in paths[:last]:
                _upload(port, path, acks)
            if kill:  # while it works on another image, which may be acknowledged or not
                asking = threading.Thread(
                    target=_upload_if_alive, args=(port, paths[last], acks), daemon=True
                )
                asking.start()
                time.sleep(chance.uniform(0, 0.1))
                server.kill()
                asking.join(PATIENCE)
            code = writer.wait(PATIENCE)
        finally:
            server.kill()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
        if code not in ((LOCKED, 0) if self.backend == "lite" else (0,)):
            raise AssertionError(f"the writer ended with {code}")
        return int(code == LOCKED)

    def _check(
        self, place: Place, acknowledged: set[str], folder: Path, paths: Sequence[str]
    ) -> Round:
        with open_bank(place[0], state=place[1]) as bank:
            lost = [path for path in acknowledged if not bank.search(path)[:1][0].is_copy]
            if lost:
                raise AssertionError(f"{len(lost)} acknowledged images are lost: {lost[:3]}")
            before = len(bank)
            done = bank.add(folder, show_progress=False)
            missing = [path for path in paths if not bank.search(path)[0].is_copy]
            if missing or len(bank) != len(bank.storage.index):
                raise AssertionError(
                    f"not healed: {len(missing)} missing, {len(bank)} on record, "
                    f"{len(bank.storage.index)} in the index"
                )
            if len(find_images(folder)) != len(paths):
                raise AssertionError("files of the user are gone")
        return {"found": len(acknowledged), "on_record": before, "healed": done.added}


def _start(*arguments: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*results.RUN, "faults/writers", *arguments], stdout=stdout)


def _wait_for_more(acks: Path, more: int, child: "subprocess.Popen[bytes]") -> None:
    """Wait until so many more images are acknowledged, or the child has ended."""
    goal = acks.read_text().count("\n") + more
    deadline = time.monotonic() + PATIENCE
    while acks.read_text().count("\n") < goal and child.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the writers stand still")
        time.sleep(0.005)


def _upload_if_alive(port: int, path: str, acks: Path) -> None:
    with contextlib.suppress(OSError, http.client.HTTPException):  # the server was killed
        _upload(port, path, acks)


def _upload(port: int, path: str, acks: Path) -> None:
    """Add an image over HTTP and note it as acknowledged."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/add", Path(path).read_bytes(), {"Content-Type": "image/png"}
    )
    for _ in range(100):
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                json.load(io.TextIOWrapper(answer))
            with acks.open("ab", buffering=0) as file:
                file.write(f"{path}\n".encode())
            return
        except urllib.error.HTTPError as error:
            with error:
                if error.code != 503:
                    raise
        time.sleep(0.2)
    raise AssertionError("the server stays busy")


# ------------------------------------------------------------------ all of them


def run_all(kinds: Sequence[str], backends: Sequence[str], rounds: int) -> None:
    """Run and record; rounds that are recorded already are not run again."""
    recorded: dict[str, list[Round]] = {}
    commit = results.commit()
    if (results.RESULTS / "faults_writers.json").exists():
        recorded = cast(dict[str, Any], results.read("faults_writers")["figures"])["each"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        for backend in backends:
            uri = None
            if backend not in FILES:
                from faults.milvus_server import running

                uri = servers.enter_context(running(Path(folder, "milvus"))).uri
            for kind in kinds:
                done = recorded.setdefault(f"{kind} {backend}", [])
                campaign = Rounds(kind, backend, Path(folder), uri=uri)
                for number in range(len(done), rounds):
                    done.append({"commit": commit, **campaign.run(number)})
                    print(kind, backend, number, done[-1], flush=True)
                    results.write("faults_writers", summary(recorded))


def summary(recorded: dict[str, list[Round]]) -> dict[str, object]:
    """One row per kind and backend, and every round."""
    rows = {
        name: {
            "rounds": len(each),
            **{
                key: sum(int(str(one[key])) for one in each)
                for key in ("acknowledged", "found", "healed", "refused")
            },
        }
        for name, each in recorded.items()
    }
    return {"images_per_round": IMAGES, "campaigns": rows, "each": recorded}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=BACKENDS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--write", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        place, state, acks, wait, *paths = options.write
        write(place, state, acks, float(wait), paths)
    elif options.serve:
        serve(*options.serve)
    else:
        run_all(options.kinds, options.backends, options.rounds)


if __name__ == "__main__":
    main()
