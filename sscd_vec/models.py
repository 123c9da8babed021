"""A name to a folder or file: models shipped in the package, released ones, their normalizers.

Nothing here needs torch. No checksum of a released file is published, so none is invented: the
hash is recorded when the file first arrives, after it was checked, and compared on every use.
"""

import contextlib
import json
import logging
import os
import re
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from sscd_vec.download import discard_partial, download
from sscd_vec.files import PathLike, file_sha256, printable_path, write_whole
from sscd_vec.locks import locked
from sscd_vec.progress import progress_bar

log = logging.getLogger(__name__)

BASE_URL = "https://dl.fbaipublicfiles.com/sscd-copy-detection/"
SHIPPED = Path(__file__).resolve().parent / "pretrained"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
NORMALIZER_FILE = "normalizer.safetensors"
VERIFIER_FILE = "verifier.json"
_MOST_SOURCE = 64 * 2**20  # bytes of TorchScript source, which is checked but never run


class CheckpointError(ValueError):
    """A file that is not a model this library can read, and why."""


@dataclass(frozen=True)
class Released:
    """One of the paper's published models.

    Attributes:
        file: Its smallest plain file in the public folder.
        trunk: The trunk that file must hold.
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

Validate = Callable[[Path, Released], object]


def resolve(
    name_or_path: PathLike | None = None,
    *,
    cache_dir: PathLike | None = None,
    local_files_only: bool = False,
    base_url: str | None = None,
    show_progress: bool | None = None,
    validate: Validate | None = None,
) -> Path:
    """Find the file or folder of a model; download a released one if it is not in the cache.

    Args:
        name_or_path: A path, the name of a shipped or released model, or None for the shipped one.
        cache_dir: Where downloads are kept (default: ``cache_folder()``).
        local_files_only: Never use the network.
        base_url: Where released files are (default: ``$SSCD_VEC_BASE_URL`` or the authors' folder).
        show_progress: Draw a bar on standard error; by default only on a terminal or notebook.
        validate: Called once with a file that is new in the cache and with what it should be;
            raises ``CheckpointError`` to refuse it. The archive's CRCs are checked in any case.

    Returns:
        What ``Encoder.from_pretrained`` reads.

    Raises:
        FileNotFoundError: Nothing of that name; lists the known ones.
        DownloadError: The file could not be fetched.
        CheckpointError: The file is damaged, or is not the one it was.
    """
    if name_or_path is None:
        return SHIPPED / _only_shipped()
    path = Path(name_or_path)
    if path.exists():
        return path
    name = str(name_or_path)
    if name in shipped():
        return SHIPPED / name
    if name not in RELEASED:
        raise FileNotFoundError(_unknown(name))
    return _released(
        name, cache_folder(cache_dir), local_files_only, base_url, show_progress, validate
    )


def normalizer_path(name_or_path: PathLike | None = None) -> Path:
    """Find a normalizer file.

    Args:
        name_or_path: The file itself, a model folder that holds one, the name of a shipped model,
            or None for the shipped model's.

    Raises:
        FileNotFoundError: There is none; says what to do.
    """
    fit = "Fit one on your own images: Normalizer.fit, or `sscd-vec normalize fit`."
    return _beside_model(name_or_path, NORMALIZER_FILE, "normalizer", fit)


def verifier_path(name_or_path: PathLike | None = None) -> Path:
    """Find the weights of a verifier.

    Args:
        name_or_path: The file itself, a model folder that holds one, the name of a shipped model,
            or None for the shipped model's.

    Raises:
        FileNotFoundError: There are none; says what to do.
    """
    fit = "Fit them with `python benchmarks release/fit_verifier`, or name a shipped model."
    return _beside_model(name_or_path, VERIFIER_FILE, "verifier", fit)


def stable_name(name_or_path: PathLike | None = None) -> str:
    """A name that finds the same model from anywhere: paths become absolute, None a name."""
    if name_or_path is None:
        return _only_shipped()
    path = Path(name_or_path)
    return str(path.resolve()) if path.exists() else str(name_or_path)


def cache_folder(cache_dir: PathLike | None = None) -> Path:
    """Where downloads are kept: the argument, ``$SSCD_VEC_CACHE``, or the user's cache folder."""
    chosen = cache_dir or os.environ.get("SSCD_VEC_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "sscd-vec"


def present(cache_dir: PathLike | None = None) -> list[str]:
    """Names of the models that load without a network: shipped and already downloaded."""
    folder = cache_folder(cache_dir)
    return sorted(
        {*shipped(), *(name for name, it in RELEASED.items() if (folder / it.file).exists())}
    )


def shipped() -> list[str]:
    """Names of the models inside the package."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG_FILE}"))


def check_archive(path: Path) -> None:
    """Check a file that begins like a zip, as torch's files do; any other file passes.

    Raises:
        CheckpointError: A record is damaged, the file ends early, or it would unpack to more bytes
            than it has.
    """
    with path.open("rb") as file:
        looks_zipped = file.read(4) == b"PK\x03\x04"
    if not zipfile.is_zipfile(path):
        if looks_zipped:
            raise CheckpointError("the archive is cut off: its end is missing")
        return
    try:
        with zipfile.ZipFile(path) as archive:
            _check_sizes(archive, path.stat().st_size)
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, zlib.error, NotImplementedError) as error:
        raise CheckpointError(f"the archive is damaged ({error})") from error
    if damaged is not None:
        raise CheckpointError(f"the archive is damaged: record {damaged} fails its CRC")


def _check_sizes(archive: zipfile.ZipFile, size: int) -> None:
    """Stored records that share no bytes cannot unpack to more than the file itself."""
    stored = source = 0
    for record in archive.infolist():
        if record.compress_type == zipfile.ZIP_STORED:
            stored += record.file_size
        elif "/code/" in record.filename:  # torch compresses TorchScript source and nothing else
            source += record.file_size
        else:
            raise CheckpointError(
                f"record {record.filename[:80]} is compressed, which torch never writes"
            )
    if stored > size:
        raise CheckpointError(
            f"the archive of {size} bytes claims to hold {stored}: its records overlap"
        )
    if source > _MOST_SOURCE:
        raise CheckpointError(
            f"the archive's code unpacks to {source} bytes; at most {_MOST_SOURCE} are read"
        )


def _only_shipped() -> str:
    names = shipped()
    if len(names) == 1:
        return names[0]
    if names:
        raise FileNotFoundError(f"several models are shipped: name one of {', '.join(names)}")
    raise FileNotFoundError(
        "this install has no model of its own. Name a released one, which is downloaded once "
        f"({', '.join(RELEASED)}), or pass the path of a model file or folder."
    )


def _beside_model(name_or_path: PathLike | None, file: str, what: str, remedy: str) -> Path:
    """A file that belongs to a model: given itself, or found in the model's folder."""
    name = _only_shipped() if name_or_path is None else name_or_path
    path = Path(name)
    if path.is_file():
        return path
    folder = path if path.is_dir() or str(name) not in shipped() else SHIPPED / str(name)
    if (folder / file).is_file():
        return folder / file
    if folder.is_dir():
        raise FileNotFoundError(f"no {file} in {printable_path(folder)}. {remedy}")
    if str(name) in RELEASED:
        raise FileNotFoundError(f"the released model {name} comes without a {what}. {remedy}")
    raise FileNotFoundError(
        f"no {what} {os.fspath(name)!r}: expected a file, a folder with {file}, or "
        f"a shipped model ({', '.join(shipped())}). {remedy}"
    )


def _unknown(name: str) -> str:
    here = f"shipped: {', '.join(shipped())}; " if shipped() else ""
    known = f"{here}released: {', '.join(RELEASED)}"
    if re.search(r"[/\\]|\.\w+$", name):
        return f"no model file or folder at {name!r}. Known names: {known}."
    return f"unknown model {name!r}, and no such file or folder here. Known names: {known}."


def _released(
    name: str,
    folder: Path,
    local_files_only: bool,
    base_url: str | None,
    show_progress: bool | None,
    validate: Validate | None,
) -> Path:
    """The cached file of a released model, downloaded if need be."""
    target = folder / RELEASED[name].file
    if target.exists():
        _verify(name, target, validate)
        return target
    if local_files_only:
        raise FileNotFoundError(
            f"{name} is not in the cache ({target}) and local_files_only forbids a download. Load "
            "it once with a network, or put the file there."
        )
    folder.mkdir(parents=True, exist_ok=True)
    url = (base_url or os.environ.get("SSCD_VEC_BASE_URL") or BASE_URL).rstrip("/") + "/"
    lock = target.with_name(target.name + ".lock")
    with locked(lock, purpose=f"download {name}"):
        if not target.exists():
            _fetch(name, url + target.name, target, show_progress, validate)
    return target


def _fetch(
    name: str, url: str, target: Path, show_progress: bool | None, validate: Validate | None
) -> None:
    """Download to a name of its own, check everything, record the hash, and only then rename."""
    arrived = target.with_name(target.name + ".arrived")
    if not arrived.exists():
        log.info("downloading %s", url)
        with progress_bar(target.name, None, show_progress, unit="bytes") as bar:
            download(url, arrived, bar.update)
    try:
        _check_arrival(name, arrived, validate)
    except CheckpointError as error:
        arrived.unlink()
        discard_partial(arrived)
        raise CheckpointError(
            f"what {url} sent is not {name}: {error}. It was deleted; load again to fetch it anew."
        ) from error
    _write_record(target, arrived, url)
    os.replace(arrived, target)


def _verify(name: str, target: Path, validate: Validate | None) -> None:
    """Compare the file with its recorded hash; check and record one that was put there by hand."""
    try:
        recorded = json.loads(_record(target).read_text(encoding="utf-8")).get("sha256")
    except (OSError, ValueError, AttributeError):
        recorded = None
    if not isinstance(recorded, str):
        _check_arrival(name, target, validate)
        with contextlib.suppress(OSError):  # a cache that cannot be written to still works
            _write_record(target, target, None)
    elif recorded != (digest := file_sha256(target)):
        raise CheckpointError(
            f"{target} has changed since it was downloaded (SHA-256 {digest[:12]}…, "
            f"{recorded[:12]}… recorded). Delete it and load again to fetch it anew."
        )


def _check_arrival(name: str, path: Path, validate: Validate | None) -> None:
    check_archive(path)
    if validate is not None:
        validate(path, RELEASED[name])


def _record(target: Path) -> Path:
    return target.with_name(target.name + ".json")


def _write_record(target: Path, file: Path, url: str | None) -> None:
    record = {
        "sha256": file_sha256(file),
        "size": file.stat().st_size,
        "url": url,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_whole(_record(target), json.dumps(record, indent=2) + "\n")
