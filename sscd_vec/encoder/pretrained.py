"""A name to a file: models shipped with the package, and the released ones, downloaded once.

No checksum of a released file is published, so none is invented: its hash is recorded when it first
arrives, after its CRCs and every tensor were checked, and compared each time it is used.
"""

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sscd_vec.encoder.checkpoint import (
    CONFIG_FILE,
    CheckpointError,
    check_archive,
    file_sha256,
    read_checkpoint,
)
from sscd_vec.encoder.download import Progress, discard_partial, download

log = logging.getLogger(__name__)

BASE_URL = "https://dl.fbaipublicfiles.com/sscd-copy-detection/"
SHIPPED = Path(__file__).resolve().parent.parent / "models"


@dataclass(frozen=True)
class Released:
    """One of the paper's published models.

    Attributes:
        file: Its smallest plain file in the public folder.
        trunk: What the file must hold.
        dim: Size of its descriptor.
    """

    file: str
    trunk: str = "resnet50"
    dim: int = 512


RELEASED: Mapping[str, Released] = MappingProxyType(
    {
        f"sscd_{data}_{augmentation}": Released(f"sscd_{data}_{augmentation}.torchvision.pt")
        for data in ("disc", "imagenet")
        for augmentation in ("blur", "advanced", "mixup")
    }
    | {"sscd_disc_large": Released("sscd_disc_large.classy.pt", "resnext101_32x4d", 1024)}
)


def resolve(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    base_url: str | None = None,
    show_progress: bool | None = None,
) -> Path:
    """Find the file or folder of a model, downloading a released one if need be.

    Args:
        name_or_path: A path; or a name, of a model shipped in the package or of a released one; or
            None for the shipped model.
        cache_dir: Where downloads are kept (default: ``cache_folder()``).
        local_files_only: Never use the network.
        base_url: Where released files are (default: ``$SSCD_VEC_BASE_URL`` or the authors' folder).
        show_progress: Draw a bar on standard error; by default where that is a terminal.

    Returns:
        What ``read_checkpoint`` reads.

    Raises:
        FileNotFoundError: Nothing of that name; lists the known ones.
        DownloadError: The file could not be fetched.
        CheckpointError: The file is damaged or is not the one it was.
    """
    if name_or_path is None:
        return _only_shipped()
    path = Path(name_or_path)
    if path.exists():
        return path
    name = str(name_or_path)
    if name in shipped():
        return SHIPPED / name
    if name not in RELEASED:
        raise FileNotFoundError(_unknown(name))
    folder = cache_folder(cache_dir)
    target = folder / RELEASED[name].file
    if target.exists():
        _verify(target)
        return target
    if local_files_only:
        raise FileNotFoundError(
            f"{name} is not in the cache ({target}) and local_files_only forbids a download. Load "
            "it once with a network, or put the file there."
        )
    folder.mkdir(parents=True, exist_ok=True)
    url = (base_url or os.environ.get("SSCD_VEC_BASE_URL") or BASE_URL).rstrip("/") + "/"
    with _locked(target.with_name(target.name + ".lock")):
        if not target.exists():
            _fetch(name, url + target.name, target, show_progress)
    return target


def cache_folder(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where downloads are kept: the argument, ``$SSCD_VEC_CACHE``, or the user's cache folder."""
    chosen = cache_dir or os.environ.get("SSCD_VEC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "sscd-vec"


def present(cache_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Names of the models that load without a network: shipped and already downloaded."""
    folder = cache_folder(cache_dir)
    return sorted(
        {*shipped(), *(name for name, it in RELEASED.items() if (folder / it.file).exists())}
    )


def shipped() -> list[str]:
    """Names of the models inside the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG_FILE}"))


def _only_shipped() -> Path:
    names = shipped()
    if len(names) == 1:
        return SHIPPED / names[0]
    if names:
        raise FileNotFoundError(f"several models are shipped: name one of {', '.join(names)}")
    raise FileNotFoundError(
        "this install has no model of its own. Name a released one, which is downloaded once "
        f"({', '.join(RELEASED)}), or pass the path of a model file or folder."
    )


def _unknown(name: str) -> str:
    here = f"shipped: {', '.join(shipped())}; " if shipped() else ""
    known = f"{here}released: {', '.join(RELEASED)}"
    if re.search(r"[/\\]|\.\w+$", name):
        return f"no model file or folder at {name!r}. Known names: {known}."
    return f"unknown model {name!r}, and no such file or folder here. Known names: {known}."


def _fetch(name: str, url: str, target: Path, show_progress: bool | None) -> None:
    """Download to a name of its own, check everything, record the hash, and only then rename."""
    arrived = target.with_name(target.name + ".arrived")
    if not arrived.exists():
        log.info("downloading %s", url)
        with _bar(target.name, show_progress) as progress:
            download(url, arrived, progress)
    try:
        check_archive(arrived)
        config, _ = read_checkpoint(arrived)
        expected = RELEASED[name]
        if (config.trunk, config.dim) != (expected.trunk, expected.dim):
            raise CheckpointError(
                f"holds {config.trunk} with {config.dim} dimensions, "
                f"{expected.trunk} with {expected.dim} expected"
            )
    except CheckpointError as error:
        arrived.unlink()
        discard_partial(arrived)
        raise CheckpointError(
            f"what {url} sent is not {name}: {error}. It was deleted; load again to fetch it anew."
        ) from error
    record = {"sha256": file_sha256(arrived), "size": arrived.stat().st_size, "url": url}
    _write_record(target, record | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
    os.replace(arrived, target)


def _verify(target: Path) -> None:
    """Compare the file with the hash recorded at first; one put there by hand gets its own."""
    check_archive(target)
    digest = file_sha256(target)
    try:
        recorded = json.loads(_record(target).read_text(encoding="utf-8")).get("sha256")
    except (OSError, ValueError, AttributeError):
        recorded = None
    if recorded is None:
        with contextlib.suppress(OSError):  # a cache that cannot be written to still works
            _write_record(target, {"sha256": digest, "size": target.stat().st_size, "url": None})
    elif recorded != digest:
        raise CheckpointError(
            f"{target} has changed since it was downloaded (SHA-256 {digest[:12]}…, "
            f"{recorded[:12]}… recorded). Delete it and load again to fetch it anew."
        )


def _record(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _write_record(target: Path, record: Mapping[str, object]) -> None:
    writing = target.with_name(target.name + ".json.new")
    writing.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    os.replace(writing, _record(target))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes, so that two of them share one download."""
    with path.open("a+b") as file:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
            try:
                yield
            finally:
                file.seek(0)
                msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file gives it back
            yield


@contextlib.contextmanager
def _bar(title: str, show: bool | None) -> Iterator[Progress | None]:
    """A progress bar on standard error."""
    if not (sys.stderr.isatty() if show is None else show):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
