"""``Bank``: images in, verdicts out, on any index."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.matches import Match, Metadata
from sscd_vec.bank.location import UPLOADS, BankError, Location
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Added, Answer, BankMatch, merge_looks
from sscd_vec.bank.settings import BankSettings
from sscd_vec.bank.setup import Setup
from sscd_vec.bank.storage import Storage, is_writable
from sscd_vec.bank.views import best_by_image
from sscd_vec.files import ImageFile, PathLike, Unreadable, find_images
from sscd_vec.normalize import Kind, Normalizer
from sscd_vec.normalize.scales import SCALES, needs_larger_look
from sscd_vec.progress import progress_bar

if TYPE_CHECKING:
    from sscd_vec.bank.describe import Described, ImageEncoder, Source
    from sscd_vec.bank.duplicates import Copies
    from sscd_vec.encoder.images import ImageInput

Float32 = NDArray[np.float32]
Scales = Literal["auto", "one", "both"]
SAVE_EVERY = 60.0  # seconds between commits of a long ``add``
TILED_HITS = 8  # an image may own many of the nearest vectors: fetch enough to see k of them


class Bank:
    """Known images: add them, and ask whether another one is a copy.

    ``Bank("known.faiss")`` opens a bank or makes one, with the model in the box, its normalizer and
    its threshold. Several processes may use one bank: writers take turns, and everyone sees what
    the others wrote.

    Args:
        location: ``known.faiss``, ``known.db`` (Milvus Lite) or ``http://host:19530/known``; None
            for a bank in memory.
        model: Name, folder or file of an encoder, or an ``Encoder``; the bank's own by default,
            and for a new bank the one in the box.
        normalizer: A ``Normalizer``, or its name or file; the bank's own by default, and for a new
            bank the one that comes with the model.
        index: For a new bank, a FAISS factory string ("IVF4096,SQ8") or a Milvus index type
            ("HNSW").
        threshold: Least score of a copy, instead of the calibrated one.
        tiles: For a new bank: index overlapping crops, 1/``tiles`` of each side, too.
        collection: Name of the Milvus collection, instead of the one in the address.
        state: Folder for the bank's own files; beside the index by default.
        token: Of a Milvus server; never written down.
        device: Where the encoder runs.
        cache: File that keeps descriptors of files, so that none is encoded twice.
        create: Whether to make a bank that does not exist.
        read_only: Write nothing; the default where the storage cannot be written to.
        trust: Accept a bank somebody else made: load the model it names, show the files it names.
        wait: For another writer: True waits, False raises, a number waits so many seconds.

    Raises:
        BankError: There is no bank and ``create`` is false, it is damaged, or it was made with
            something else than what was asked for.
    """

    def __init__(
        self,
        location: PathLike | None = None,
        *,
        model: "PathLike | ImageEncoder | None" = None,
        normalizer: PathLike | Normalizer | None = None,
        index: str | None = None,
        threshold: float | None = None,
        tiles: int | None = None,
        collection: str | None = None,
        state: PathLike | None = None,
        token: str | None = None,
        device: str | None = None,
        cache: Path | None = None,
        create: bool = True,
        read_only: bool | None = None,
        trust: bool = False,
        wait: bool | float = True,
    ) -> None:
        """Open the bank, or make it."""
        self.location = (
            None
            if location is None
            else Location.parse(location, collection=collection, state=state)
        )
        self.threshold, self._cache = threshold, cache
        self._setup = Setup(self.location, model, device=device, trust=trust)
        exists = self.location is not None and self.location.exists
        if exists:
            self._setup.read(tiles)
        else:
            _require_free(self.location, create)
            self._setup.make(normalizer, tiles or 1)
        if read_only is None:
            read_only = self.location is not None and not is_writable(self.location)
        self.storage = Storage(
            self.location,
            self.normalizer,
            index=index,
            token=token,
            read_only=read_only,
            wait=wait,
        )
        if exists and normalizer is not None:
            self.replace_normalizer(normalizer)

    # ------------------------------------------------------------------ changing it

    def add(
        self,
        images: "PathLike | Iterable[PathLike | ImageInput]",
        ids: Sequence[str] | None = None,
        *,
        metadata: Sequence[Metadata | None] | None = None,
        keep: bool = False,
        leave_out: Path | None = None,
        show_progress: bool | None = None,
    ) -> Added:
        """Add images: new ones, and those that changed. When it returns they are safe.

        Interrupted, it keeps what it has encoded; run again, it goes on from there.

        Args:
            images: Without ``ids``: files, folders, tars and lists of paths. With ``ids``:
                anything the encoder takes: paths, bytes, arrays, PIL images.
            ids: An id for each image; the files' paths by default.
            metadata: One JSON object or None for each image; only with ``ids``.
            keep: Keep a JPEG of images that are not files, so that matches can be shown.
            leave_out: A folder that is not entered where it lies below one of ``images``.
            show_progress: Whether to draw a progress bar; by default on a terminal.
        """
        if metadata is not None and ids is None:
            raise ValueError("metadata: expected only with ids, one for each image")
        done = Added()
        sources = self._sources(images, ids, keep, leave_out, done)
        more = {} if metadata is None else dict(zip(ids or (), metadata, strict=True))
        todo = [source for source in sources if not self._is_known(source)]
        done.unchanged = len(sources) - len(todo)
        pending: list[Described] = []
        saved = time.monotonic()
        try:
            with progress_bar("adding", len(todo), show_progress) as bar:
                for part in self._describe(todo, self.settings.tiles, self._cache):
                    pending += part
                    done.unreadable += [
                        Unreadable(Path(one.source.id), one.reason) for one in part if one.reason
                    ]
                    bar.advance(len(part))
                    if time.monotonic() - saved > SAVE_EVERY:
                        done.added += self._store(pending, more)
                        pending, saved = [], time.monotonic()
        finally:
            done.added += self._store(pending, more)  # also when interrupted
        return done

    def remove(self, ids: str | Iterable[str]) -> int:
        """Remove images by id; ids that are not there are ignored.

        Files of the user stay. JPEGs the bank kept itself are deleted.

        Returns:
            How many were there.
        """
        names = [ids] if isinstance(ids, str) else list(ids)
        kept = [
            image.file.path
            for image in map(self.storage.records.by_id, names)
            if image is not None and image.file is not None and self._is_upload(image.file.path)
        ]
        count = self.storage.remove(names)
        for path in kept:
            path.unlink(missing_ok=True)
        return count

    def replace_normalizer(self, normalizer: PathLike | Normalizer) -> None:
        """Use another query side (background, β, thresholds) from now on; vectors stay.

        Raises:
            BankError: Its reference side is another one: the vectors would have to be made anew.
        """
        self.storage.index.normalizer = self._setup.replace_normalizer(normalizer)

    # ------------------------------------------------------------------ asking it

    def search(
        self, image: "ImageInput", k: int = 10, *, tiles: int = 1, scales: Scales = "auto"
    ) -> list[BankMatch]:
        """The ``k`` best matches of one image, best first.

        Args:
            image: Anything the encoder takes.
            k: At most so many matches.
            tiles: Also look for overlapping crops of the image, 1/``tiles`` of each side: finds
                images pasted into it, at ten times the cost for 2.
            scales: Whether to look at the image twice as large too, where a copy inside a collage
                or on another background is found: ``"auto"`` when the first look finds no copy,
                ``"one"`` never, ``"both"`` always. The second look costs as much as four; with
                tiles there is none.

        Raises:
            ImageError: It is not a usable image.
        """
        from sscd_vec.encoder.images import ImageError, input_name

        answer = next(self.search_many([image], k, tiles=tiles, scales=scales))
        if answer.error:
            raise ImageError(input_name(image), answer.error)
        return answer.matches

    def search_many(
        self,
        images: "PathLike | Iterable[ImageInput | ImageFile]",
        k: int = 10,
        *,
        tiles: int = 1,
        scales: Scales = "auto",
        show_progress: bool | None = False,
    ) -> Iterator[Answer]:
        """Search for many images, in order; those that cannot be read say why.

        Args:
            images: A folder, tar or list of paths, or an iterable of images.
            k: At most so many matches each.
            tiles: See ``search``.
            scales: See ``search``.
            show_progress: Whether to draw a progress bar.
        """
        from sscd_vec.bank.describe import Source

        if scales not in get_args(Scales):
            raise ValueError(f"scales: expected one of {get_args(Scales)}, got {scales!r}")
        if tiles > 1 or self.settings.tiles > 1:
            scales = "one"  # the crops are a larger look already
        problems: list[Unreadable] = []
        if isinstance(images, str | os.PathLike):
            sources = [Source.of_file(f) for f in find_images(images, problems.append)]
        else:
            sources = [Source.of_query(image, n) for n, image in enumerate(images)]
        for problem in problems:
            yield Answer(str(problem.path), [], problem.reason)
        with progress_bar("searching", len(sources), show_progress) as bar:
            for part in self._describe(sources, tiles, None):
                matches = self._look_larger(part, self._search_part(part, k), k, scales)
                for one, found in zip(part, matches, strict=True):
                    yield Answer(one.source.id, found, one.reason)
                bar.advance(len(part))

    def search_descriptors(self, queries: Sequence[Float32], k: int = 10) -> list[list[BankMatch]]:
        """Search for images already described: for each ``(views, d)``, the whole one first.

        Raises:
            BankError: The index was lost.
        """
        if not queries:
            return []
        self.storage.refresh()
        self._require_vectors()
        tiled = self.settings.tiles > 1
        many = k * TILED_HITS if tiled else k
        matches = self.storage.index.search(np.concatenate(queries), k=many)
        answers: list[list[BankMatch]] = []
        row = 0
        for query in queries:
            hits = [match for one in matches[row : row + len(query)] for match in one]
            row += len(query)
            answers.append(self._match(hits, self.threshold_of(self.score_kind(len(query))), k))
        return answers

    def duplicates(
        self,
        threshold: float | None = None,
        *,
        heatmaps: bool = False,
        show_progress: bool | None = None,
    ) -> "Copies":
        """Groups of copies among the bank's own images, and which one of each to keep.

        Args:
            threshold: Least symmetric score of a copy; the calibrated one by default.
            heatmaps: Also compute which parts match: two forward passes per copy.
            show_progress: Whether to draw a progress bar; by default on a terminal.

        Raises:
            UncalibratedError: No threshold is given or calibrated.
        """
        from sscd_vec.bank.duplicates import find_copies

        return find_copies(self, threshold, heatmaps=heatmaps, show_progress=show_progress)

    def score_kind(self, tiles: int = 1) -> Kind:
        """Which kind of score a search with that many tiles gives."""
        return "tiled" if tiles > 1 or self.settings.tiles > 1 else "search"

    def threshold_of(self, kind: Kind) -> float | None:
        """The least score of a copy: given, else calibrated, else None."""
        if self.threshold is not None:
            return self.threshold
        found = self.normalizer.thresholds.get(kind)
        return None if found is None else found.value

    def __len__(self) -> int:
        """How many images."""
        return len(self.storage.records)

    def __contains__(self, id: object) -> bool:
        """Whether an image with this id is there."""
        if not isinstance(id, str):
            return False
        known = self.storage.records.by_id(id)
        return known is not None and not known.is_lost or bool(self.storage.index.present([id]))

    def images(self) -> list[BankImage]:
        """All images on record, in order of adding."""
        return self.storage.records.all()

    def get(self, id: str) -> BankImage | None:
        """What the bank knows about an image."""
        return self.storage.records.by_id(id)

    @property
    def encoder(self) -> "ImageEncoder":
        """The model, loaded when first needed."""
        return self._setup.encoder

    @property
    def normalizer(self) -> Normalizer:
        """Its normalizer; ``replace_normalizer`` changes the query side."""
        return self._setup.normalizer

    @property
    def settings(self) -> BankSettings:
        """What it was made with."""
        return self._setup.settings

    def may_show(self, path: Path) -> bool:
        """Whether a file lies in the bank or in a folder this user added images from."""
        real = path.resolve()
        roots = self.settings.root_folders
        return self._is_upload(path) or any(real.is_relative_to(root) for root in roots)

    def close(self) -> None:
        """Let go of files, connections and locks."""
        self.storage.close()

    def __enter__(self) -> Self:
        """Nothing to do: it is open."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def __str__(self) -> str:
        """Where it is, without credentials."""
        return "a bank in memory" if self.location is None else str(self.location)

    def __repr__(self) -> str:
        """Where it is and how large."""
        return f"Bank({str(self)!r}, {len(self)} images)"

    # ------------------------------------------------------------------ how it does it

    def _sources(
        self,
        images: "PathLike | Iterable[Any]",
        ids: Sequence[str] | None,
        keep: bool,
        leave_out: Path | None,
        done: Added,
    ) -> "list[Source]":
        from sscd_vec.bank.describe import Source, named_sources

        if ids is None:
            paths = _paths(images)
            files = find_images(paths, done.unreadable.append, leave_out=leave_out)
            self._setup.remember_roots(paths)
            return [Source.of_file(file) for file in files]
        given = [images] if isinstance(images, str | os.PathLike) else images
        sources = named_sources(given, ids)
        if not keep or self.location is None:
            return sources
        uploads = self.location.folder / UPLOADS
        return [each if each.file else each.keep_copy(uploads) for each in sources]

    def _is_known(self, source: "Source") -> bool:
        """Whether the bank has this image as it is now."""
        from sscd_vec.bank.describe import digest_of

        known = self.get(source.id)
        if known is None or known.is_lost:
            return False
        if source.file is not None and known.file is not None:
            return known.file == source.file
        return known.digest == digest_of(source)

    def _describe(
        self, sources: "Sequence[Source]", tiles: int, cache: Path | None
    ) -> "Iterator[list[Described]]":
        if not sources:
            return
        from sscd_vec.bank.describe import describe, opened_cache

        with opened_cache(cache, self.encoder, tiles) as known:
            yield from describe(self.encoder, sources, tiles=tiles, cache=known)

    def _search_part(self, part: "Sequence[Described]", k: int) -> list[list[BankMatch]]:
        """Matches of each image; none for those that could not be read."""
        queries = [one.descriptors for one in part if one.descriptors is not None]
        found = iter(self.search_descriptors(queries, k))
        return [[] if one.descriptors is None else next(found) for one in part]

    def _look_larger(
        self,
        part: "Sequence[Described]",
        found: list[list[BankMatch]],
        k: int,
        scales: Scales,
    ) -> list[list[BankMatch]]:
        """Add what a second look at twice the size finds, where one is wanted."""
        from sscd_vec.bank.describe import describe

        limit = self.threshold_of("search")

        def is_open(matches: list[BankMatch]) -> bool:
            if scales == "auto" and limit is not None and matches:
                return needs_larger_look(matches[0].score, limit)
            return scales == "both"

        rows = [
            row
            for row, (one, matches) in enumerate(zip(part, found, strict=True))
            if one.descriptors is not None and is_open(matches)
        ]
        looks = describe(self.encoder, [part[row].source for row in rows], scale=SCALES[1])
        larger = [matches for look in looks for matches in self._search_part(look, k)]
        merged = list(found)
        for row, matches in zip(rows, larger, strict=True):
            merged[row] = merge_looks(found[row], matches, k)
        return merged

    def _store(
        self, described: "Sequence[Described]", metadata: Mapping[str, Metadata | None]
    ) -> int:
        ready = [(one, one.descriptors) for one in described if one.descriptors is not None]
        self.storage.write(
            [
                BankImage(one.source.id, one.digest, len(rows), one.source.file)
                for one, rows in ready
            ],
            [rows for _, rows in ready],
            [metadata.get(one.source.id) for one, _ in ready] if metadata else None,
        )
        return len(ready)

    def _match(self, hits: Sequence[Match], threshold: float | None, k: int) -> list[BankMatch]:
        """Vectors found, as images: the best score of each."""
        best = best_by_image((str(hit.id), float(hit.score)) for hit in hits)
        metadata = {str(hit.id): hit.metadata for hit in hits}
        return [BankMatch(i, s, threshold, self.get(i), metadata.get(i)) for i, s in best[:k]]

    def _is_upload(self, path: Path) -> bool:
        if self.location is None:
            return False
        return path.resolve().is_relative_to((self.location.folder / UPLOADS).resolve())

    def _require_vectors(self) -> None:
        lost = self.storage.records.lost
        if lost and not len(self.storage.index):
            raise BankError(
                f"{self}: its index is missing or empty, but {lost} images are on record; restore "
                "the index from a copy, or add the images again"
            )


def _require_free(location: Location | None, create: bool) -> None:
    """Refuse to make a bank where none was wanted, or where something else is."""
    if location is None:
        return
    if not create:
        raise BankError(
            f"there is no bank at {location} ({location.folder} is missing); make one with "
            f"`sscd-vec index IMAGES --to {location}` or Bank({str(location)!r}).add(images), or "
            "name the folder that holds the rest of it (state=, --state)"
        )
    if location.backend == "faiss" and Path(location.index).exists():
        raise BankError(
            f"{location} exists but is not a bank ({location.folder} is missing); choose another "
            "name, or search it with FaissIndex.open"
        )
    location.knock()


def _paths(images: Any) -> list[PathLike]:  # noqa: ANN401 - checked here
    """Paths the caller gave, one or many."""
    given = [images] if isinstance(images, str | os.PathLike) else images
    if isinstance(given, bytes | np.ndarray) or not isinstance(given, Iterable):
        raise TypeError("images without a path need ids: bank.add([image], ids=['name'])")
    paths = list(given)
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise TypeError("images without a path need ids: bank.add(images, ids=[...])")
    return paths
