"""Strangers' banks, banks that cannot be written, and a disk that fills up.

    python benchmarks faults/banks [--campaigns strangers read_only disk_full]

- ``strangers``: altered banks, opened and asked for everything in a process of another user's
  settings. It must answer or refuse; nothing outside the bank may be shown, changed or deleted.
- ``read_only``: a bank on a read-only file system is searched and served (needs root to mount).
- ``disk_full``: images are added until a small disk is full. What was acknowledged is found, what
  was refused is not, nothing else is left behind, and adding goes on once there is room.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

import results
from faults.thumbnails import open_bank, write_images
from sscd_vec.app.engine import Engine
from sscd_vec.app.limits import Limits
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.server import create_app
from sscd_vec.bank import Bank, BankError
from sscd_vec.bank.location import NORMALIZER, RECORDS, SETTINGS, UPLOADS

CAMPAIGNS = ("strangers", "read_only", "disk_full")
Alteration = Callable[[Path, Path], None]


@contextmanager
def client_of(bank: Bank) -> Iterator[TestClient]:
    """A client of a server of this bank."""
    app = create_app(Engine(bank, Metrics()), limits=Limits(timeout=300.0, decoding=300.0))
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        yield client


# ------------------------------------------------------------------ strangers' banks


def _plant(folder: Path, victim: Path, name: str = "upload:x") -> None:
    row = (name, "", 1, 9, 9, os.fsencode(victim), "", 0)
    with sqlite3.connect(folder / RECORDS) as database:
        columns = "id, digest, vectors, size, modified, path, member, offset"
        database.execute(f"INSERT INTO images ({columns}) VALUES (?,?,?,?,?,?,?,?)", row)
    database.close()


def _sql(statement: str) -> Alteration:
    def alter(folder: Path, victim: Path) -> None:
        with sqlite3.connect(folder / RECORDS) as database:
            database.execute(statement)
        database.close()

    return alter


def _link_uploads(folder: Path, victim: Path) -> None:
    shutil.rmtree(folder / UPLOADS, ignore_errors=True)
    (folder / UPLOADS).symlink_to(victim.parent)
    _plant(folder, victim)


def _link_one_upload(folder: Path, victim: Path) -> None:
    (folder / UPLOADS).mkdir(exist_ok=True)
    (folder / UPLOADS / "x.jpg").symlink_to(victim)
    _plant(folder, folder / UPLOADS / "x.jpg")


def _climb(folder: Path, victim: Path) -> None:
    (folder / UPLOADS).mkdir(exist_ok=True)
    _plant(folder, folder / UPLOADS / ".." / ".." / ".." / "victims" / victim.name)


def _pipe(name: str) -> Alteration:
    def alter(folder: Path, victim: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return alter


def _settings(**changes: object) -> Alteration:
    def alter(folder: Path, victim: Path) -> None:
        path = folder / SETTINGS
        named = {k: str(victim) if v == "victim" else v for k, v in changes.items()}
        path.write_text(json.dumps(json.loads(path.read_text()) | named))
        _plant(folder, victim)

    return alter


STRANGERS: dict[str, Alteration] = {
    "a row with a path outside": _plant,
    "uploads as a link": _link_uploads,
    "an upload as a link": _link_one_upload,
    "a path that climbs": _climb,
    "a normalizer that is a pipe": _pipe(NORMALIZER),
    "records that are a pipe": _pipe(RECORDS),
    "roots of their own": _settings(roots=[b"/".hex()]),
    "a device as the model": _settings(model="/dev/zero"),
    "a released model": _settings(model="sscd_disc_mixup"),
    "a path as the model": _settings(model="victim"),
    "absurd tiles": _settings(tiles=10**9),
    "absurd vectors": _sql("UPDATE images SET vectors=4611686018427387904"),
    "numbers that are text": _sql("UPDATE images SET size='x', offset='y'"),
    "paths that are numbers": _sql("UPDATE images SET path=7"),
    "a trigger": _sql(
        "CREATE TRIGGER t AFTER DELETE ON images BEGIN SELECT load_extension('/x'); END"
    ),
    "a view instead of a table": _sql("ALTER TABLE facts RENAME TO other"),
}


def attack_with_a_strange_bank(name: str, folder: Path) -> str:
    """Alter a bank, use everything it offers in another process, look at the victims.

    Returns:
        How it ended: ``served`` or ``refused``.

    Raises:
        AssertionError: Something outside the bank was shown or touched, or it hung.
    """
    victims = folder / "victims"
    victim = write_images(victims, 1, 5)[0]
    theirs = folder / "theirs"
    theirs.mkdir()
    place = theirs / "known.faiss"
    with open_bank(place) as bank:
        bank.add(write_images(folder / "images", 3, 7), show_progress=False)
    os.utime(victim, (1e9, 1e9))
    STRANGERS[name](Path(f"{place}.bank"), victim)
    before = (victim.read_bytes(), victim.stat().st_mtime_ns, sorted(victims.iterdir()))
    environment = {**os.environ, "SSCD_VEC_CACHE": str(folder / "another user")}
    child = subprocess.run(
        [*results.RUN, "faults/banks", "--use", str(place), str(folder / "images")],
        timeout=600, capture_output=True, text=True, env=environment,
    )  # fmt: skip
    if child.returncode != 0:
        raise AssertionError(f"{name}: {child.stdout[-500:]}{child.stderr[-2000:]}")
    if before != (victim.read_bytes(), victim.stat().st_mtime_ns, sorted(victims.iterdir())):
        raise AssertionError(f"{name}: a file outside the bank was touched")
    return child.stdout.split()[-1]


def use_bank(place: str, images: str) -> None:
    """Open a stranger's bank as a server does, and ask for everything; say how it ended."""
    with contextlib.suppress(BankError, ValueError), Bank(place) as bank:
        bank.encoder  # noqa: B018 - the model it names, as for a user who names none
    try:
        with open_bank(place, normalizer=None) as bank, client_of(bank) as client:
            _ask_everything(client, Path(images))
    except BankError as error:
        print(error)
        print("refused")
        return
    print("served")


def _ask_everything(client: TestClient, images: Path) -> None:
    image = next(images.iterdir()).read_bytes()
    client.post("/search", files={"image": ("x", image)})
    for key in range(1, 9):
        if client.get(f"/image/{key}").status_code == 200:
            raise SystemExit("an image outside the bank was shown")
        client.post("/heatmap", files={"image": ("x", image)}, data={"key": str(key)})
    listed = client.get("/bank")
    ids = [one["id"] for one in listed.json()["images"]] if listed.status_code == 200 else []
    client.post("/remove", json={"ids": [*ids, "upload:x"]})
    client.post("/add", files={"image": ("x", image)})


def attack_with_strange_banks(names: list[str]) -> dict[str, object]:
    """All of them, each in a folder of its own."""
    endings = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            endings[name] = attack_with_a_strange_bank(name, Path(folder))
            print(name, endings[name], flush=True)
    return {"banks": len(endings), "touched_or_shown": 0, "endings": endings}


# ------------------------------------------------------------------ storage


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory at ``folder``; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def serve_read_only(folder: Path) -> dict[str, object]:
    """Make a bank, make its file system read-only, search and serve it.

    Raises:
        AssertionError: It is not found, or something changed.
    """
    paths = write_images(folder / "images", 8, 3)
    disk = folder / "disk"
    disk.mkdir()
    with mounted(disk, "size=16m"):
        with open_bank(disk / "known.faiss") as bank:
            bank.add(paths, show_progress=False)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with open_bank(disk / "known.faiss", normalizer=None) as bank, client_of(bank) as client:
            found = [bool(bank.search(path)[0].is_copy) for path in paths]
            served = [_best(client, path.read_bytes())["copy"] for path in paths]
            refused = client.post("/add", files={"image": ("x", paths[0].read_bytes())})
    if not all(found) or not all(served) or refused.status_code != 404:
        raise AssertionError(f"read-only: {found} {served} {refused.status_code}")
    return {"images": len(paths), "found": sum(found), "served": sum(served)}


def fill_the_disk(folder: Path, megabytes: int = 2) -> dict[str, object]:
    """Add images over HTTP until the disk is full, then make room.

    Raises:
        AssertionError: An acknowledged image is not found, a refused one is, or rubbish stays.
    """
    disk = folder / "disk"
    disk.mkdir()
    with mounted(disk, f"size={megabytes}m"), open_bank(disk / "known.faiss") as bank:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(megabytes * 2**20 // 2))
        with client_of(bank) as client:
            added, refused = _add_until_full(client)
            uploads = len(list((disk / "known.faiss.bank" / UPLOADS).iterdir()))
            lost = [image for image in added if not _best(client, image)["copy"]]
            joined = [image for image in refused if _best(client, image)["copy"]]
            ballast.unlink()
            again = [client.post("/add", files={"image": ("x", i)}).status_code for i in refused]
    with_room = sum(status == 200 for status in again)
    if lost or joined or uploads != len(added) or with_room != len(refused):
        raise AssertionError(f"{len(lost)} lost, {len(joined)} joined, {uploads} kept, {again}")
    return {"acknowledged": len(added), "found": len(added), "refused_507": len(refused),
            "left_behind": 0, "added_with_room": with_room}  # fmt: skip


def _add_until_full(client: TestClient) -> tuple[list[bytes], list[bytes]]:
    """Images that were added, and three that were not."""
    added: list[bytes] = []
    refused: list[bytes] = []
    for number in range(10_000):
        image = _large_image(number)
        status = client.post("/add", files={"image": ("x", image)}).status_code
        if status not in (200, 507):
            raise AssertionError(f"a full disk is answered with {status}")
        (added if status == 200 else refused).append(image)
        if len(refused) == 3:
            return added, refused
    raise AssertionError("the disk does not fill up")


def _large_image(number: int) -> bytes:
    """Squares that tell images apart, with noise that makes their files large."""
    rng = np.random.default_rng(number)
    squares = Image.fromarray(rng.integers(40, 216, (8, 8, 3), dtype=np.uint8))
    pixels = np.asarray(squares.resize((320, 320), Image.Resampling.NEAREST), np.int16)
    noise = rng.integers(-40, 40, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray((pixels + noise).astype(np.uint8)).save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def _best(client: TestClient, image: bytes) -> dict[str, Any]:
    answer = client.post("/search", files={"image": ("x", image)})
    matches = answer.json()["results"][0]["matches"]
    return dict(matches[0]) if matches else {"copy": False}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--campaigns", nargs="+", choices=CAMPAIGNS, default=CAMPAIGNS)
    parser.add_argument("--use", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.use:
        use_bank(*options.use)
        return
    for campaign in options.campaigns:
        with tempfile.TemporaryDirectory() as folder:
            if campaign == "strangers":
                figures = attack_with_strange_banks(list(STRANGERS))
            else:
                run = serve_read_only if campaign == "read_only" else fill_the_disk
                figures = run(Path(folder))
        print(campaign, figures, flush=True)
        results.write(f"faults_{campaign}", figures)


if __name__ == "__main__":
    main()
