"""Encoding a collection of images into Parquet files, a shard at a time, here or on Ray.

A shard is a tar, a Parquet file with a column of images, or a run of loose files; it becomes one
file of descriptors (see ``shards``), written whole or not at all under a name of its own. So a job
that was interrupted goes on with the shards that are missing, and a shard that two workers encode,
because the first was killed or slow, is there once.
"""

import hashlib
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sscd_vec.batch import EncodeBatch, as_image
from sscd_vec.files import (
    ImageFile,
    PathLike,
    Unreadable,
    find_images,
    printable_path,
)
from sscd_vec.shards import ENDING, Precision, ShardInfo, ShardRows, ShardWriter, arrow, read_info

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder

LOOSE = 8192  # files of a folder that make a shard
BLOCK = 512  # images encoded and written at a time
IMAGE_COLUMNS = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes", "content")


@dataclass(frozen=True)
class Shard:
    """Images to encode into one file.

    Attributes:
        source: The tar or Parquet file, or the place loose files were found in and a number.
        state: Changes when the source does.
        name: Of the file of descriptors.
        images: Loose files; empty for a tar or Parquet file, which is read when it is encoded.
    """

    source: str
    state: str
    name: str
    images: tuple[ImageFile | Unreadable, ...] = ()


@dataclass(frozen=True)
class Done:
    """The outcome for a shard.

    Attributes:
        name: Of the file of descriptors.
        rows: Images in it.
        failed: How many of them could not be read.
        error: Why the shard could not be read at all; '' if it could.
        skipped: Whether its file was there already.
    """

    name: str
    rows: int = 0
    failed: int = 0
    error: str = ""
    skipped: bool = False


class EncodeShard:
    """Encodes shards; one model per process.

    Args:
        to: Folder of the Parquet files.
        model: Name, folder or file of a model, or an ``Encoder``.
        device: Where it runs.
        precision: Of the descriptors in the files.
        image_column: Of Parquet inputs; by default the first that is called like one.
        id_column: Of Parquet inputs; by default ``FILE#ROW``.
    """

    def __init__(
        self,
        to: PathLike,
        model: "PathLike | ImageEncoder | None" = None,
        *,
        device: str | None = None,
        precision: Precision = "float32",
        image_column: str | None = None,
        id_column: str | None = None,
    ) -> None:
        """Load nothing yet."""
        self.folder, self._precision = Path(to), precision
        self._image_column, self._id_column = image_column, id_column
        self._encode = EncodeBatch(model, device=device)

    def __call__(self, shard: Shard) -> Done:
        """Encode one shard, unless its file is there; a source that is damaged is reported."""
        if self.is_done(shard):
            return Done(shard.name, skipped=True)
        encoder = self._encode.encoder
        info = ShardInfo(encoder.fingerprint, encoder.dim, shard.source, shard.state)
        done = Done(shard.name)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with ShardWriter(self.folder / shard.name, info, self._precision) as writer:
                for ids, images, files in self._blocks(shard):
                    descriptors, errors = self._encode.encode(images)
                    writer.write(ShardRows(ids, descriptors, errors, files))
                    failed = done.failed + sum(map(bool, errors))
                    done = replace(done, rows=done.rows + len(ids), failed=failed)
        except (ValueError, FileNotFoundError) as error:
            return Done(shard.name, error=str(error))
        return done

    def is_done(self, shard: Shard) -> bool:
        """Whether its file is there, made from the source as it is now.

        Raises:
            ValueError: The file there was made with another encoder.
        """
        found = read_info(self.folder / shard.name)
        if found is None or (found.source, found.state) != (shard.source, shard.state):
            return False
        if found.encoder != self._encode.encoder.fingerprint:
            raise ValueError(
                f"{printable_path(self.folder)} holds descriptors of encoder {found.encoder}, this "
                f"one is {self._encode.encoder.fingerprint}; encode into another folder"
            )
        return True

    def _blocks(self, shard: Shard) -> Iterator[tuple[list[str], list[Any], list[Any]]]:
        """Ids, images and files, ``BLOCK`` at a time."""
        if shard.source.endswith(ENDING):
            yield from self._parquet_blocks(Path(shard.source))
            return
        images: Sequence[ImageFile | Unreadable] = shard.images
        if not images:
            images = find_images(shard.source)
        for begin in range(0, len(images), BLOCK):
            block = images[begin : begin + BLOCK]
            ids = [i.id if isinstance(i, ImageFile) else printable_path(i.path) for i in block]
            files = [image if isinstance(image, ImageFile) else None for image in block]
            # A plain file by its path: the encoder decodes large JPEG files at a reduced size.
            yield ids, [i if _is_inside(i) else i.path for i in block], files

    def _parquet_blocks(self, path: Path) -> Iterator[tuple[list[str], list[Any], list[Any]]]:
        _, parquet = arrow()
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            image = _find_column(path, names, self._image_column, IMAGE_COLUMNS)
            key = self._id_column and _find_column(path, names, self._id_column, ())
            columns = [image, *([key] if key and key != image else [])]
            row = 0
            for batch in file.iter_batches(BLOCK, columns=columns):
                images = [as_image(cell) for cell in batch.column(image).to_pylist()]
                numbers = range(row, row + len(images))
                row += len(images)
                ids = (
                    list(map(str, batch.column(key).to_pylist()))
                    if key
                    else [f"{printable_path(path)}#{number}" for number in numbers]
                )
                yield ids, images, [None] * len(ids)


def plan(places: Iterable[PathLike], *, leave_out: Path | None = None) -> list[Shard]:
    """The shards of folders, tars, Parquet files, lists of files and single files.

    Args:
        places: What to encode. The tars and Parquet files of a folder are shards of their own.
        leave_out: A folder that is not entered where it lies below a place.

    Raises:
        FileNotFoundError: A place does not exist.
    """
    found: dict[str, Shard] = {}
    for place in map(Path, places):
        if not place.exists():
            raise FileNotFoundError(f"{printable_path(place)}: no such file or folder")
        for path in _packed(place, leave_out):
            found.setdefault(str(path), _packed_shard(path))
        if place.suffix.lower() not in (".tar", ENDING):
            for shard in _loose_shards(place, leave_out):
                found.setdefault(shard.source, shard)
    return list(found.values())


def remove_stale(folder: Path, places: Iterable[PathLike], shards: Sequence[Shard]) -> None:
    """Remove files of descriptors for loose images that these places no longer have.

    A folder that has shrunk has fewer shards than before; its old ones would count twice.
    """
    roots = {printable_path(Path(place).resolve()) for place in places}
    planned = {shard.source for shard in shards}
    for path in folder.glob(f"*{ENDING}"):
        info = read_info(path)
        if info is not None and info.source not in planned:
            root, mark, number = info.source.rpartition("#")
            if mark and number.isdecimal() and root in roots:
                path.unlink()


def run_here(encode: EncodeShard, shards: Sequence[Shard]) -> Iterator[Done]:
    """Encode shards one after the other in this process."""
    return map(encode, shards)


def run_on_ray(
    encode: EncodeShard,
    shards: Sequence[Shard],
    address: str,
    *,
    workers: int | None = None,
    gpus: float = 0.0,
) -> Iterator[Done]:
    """Encode shards on Ray Data, one model per actor, in the order they are finished.

    Every node must see the inputs and the folder of descriptors under the same paths. Ray gives the
    shards of a worker or node that died to another one.

    Args:
        encode: What to do; its settings are sent to the actors.
        shards: What to encode.
        address: Of a cluster: ``auto``, ``host:6379`` or ``ray://host:10001``; ``local`` starts
            one here.
        workers: Actors; by default one per GPU, or one per core without.
        gpus: Of each actor.

    Raises:
        ImportError: Ray is not installed.
    """
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        items = [{"shard": pickle.dumps(shard)} for shard in shards]
        count = workers or _workers(ray.cluster_resources(), gpus)
        finished = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            _OnRay,
            fn_constructor_args=(encode,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=max(1, min(count, len(items)))),
            num_gpus=gpus or None,
            num_cpus=None if gpus else 1,
        )
        for row in finished.iter_rows():
            yield pickle.loads(row["done"])
    finally:
        if started:
            ray.shutdown()


class _OnRay:
    """An actor of Ray Data; pickled shards in, pickled results out."""

    def __init__(self, encode: EncodeShard) -> None:
        self._encode = encode

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        return {"done": [pickle.dumps(self._encode(pickle.loads(s))) for s in batch["shard"]]}


def _ray() -> Any:  # noqa: ANN401 - an engine is only imported when it is asked for
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ImportError("--ray needs Ray: pip install 'sscd-vec[ray]'") from error
    return ray


def _workers(resources: Mapping[str, float], gpus: float) -> int:
    return int(resources.get("GPU", 0) / gpus) if gpus else int(resources.get("CPU", 1))


# ---------------------------------------------------------------------- planning


def _packed(place: Path, leave_out: Path | None) -> list[Path]:
    """The tars and Parquet files a place stands for."""
    endings = (".tar", ENDING)
    if place.is_file():
        return [place.resolve()] if place.suffix.lower() in endings else []
    found = (path.resolve() for path in place.rglob("*") if path.suffix.lower() in endings)
    out = None if leave_out is None else leave_out.resolve()
    return sorted(p for p in found if p.is_file() and (out is None or out not in p.parents))


def _packed_shard(path: Path) -> Shard:
    status = path.stat()
    state = _digest(f"{status.st_size} {status.st_mtime_ns}")
    return Shard(str(path), state, _file_name(path.stem, str(path)))


def _loose_shards(place: Path, leave_out: Path | None) -> Iterator[Shard]:
    problems: list[Unreadable] = []
    files = find_images(place, problems.append, leave_out=leave_out, tars=False)
    images: list[ImageFile | Unreadable] = [*files, *problems]
    for number, begin in enumerate(range(0, len(images), LOOSE)):
        part = tuple(images[begin : begin + LOOSE])
        source = f"{printable_path(place.resolve())}#{number}"
        name = _file_name(f"{place.resolve().stem}-{number:05}", source)
        yield Shard(source, _digest(repr(part)), name, part)


def _file_name(stem: str, source: str) -> str:
    """A name that only this source has."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', stem)}-{_digest(source)[:10]}{ENDING}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _is_inside(image: ImageFile | Unreadable) -> bool:
    return isinstance(image, Unreadable) or bool(image.member)


def _find_column(path: Path, names: Sequence[str], wanted: str | None, usual: Sequence[str]) -> str:
    found = [name for name in ([wanted] if wanted else usual) if name in names]
    if not found:
        what = repr(wanted) if wanted else f"of images ({', '.join(usual)})"
        raise ValueError(
            f"{printable_path(path)}: expected a column {what}, got {list(names)}; name it with "
            "--image-column or --id-column"
        )
    return found[0]
