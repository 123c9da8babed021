"""``Bank``: images in, verdicts out, on any index."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from sscd_vec.adapters.matches import Metadata
from sscd_vec.bank.decisions import Decision, Decisions, is_digest
from sscd_vec.bank.location import FEATURES, Location
from sscd_vec.bank.records import BankImage
from sscd_vec.bank.results import Added, Answer, BankMatch, Copies
from sscd_vec.bank.settings import BankSettings
from sscd_vec.bank.setup import Setup
from sscd_vec.bank.storage import Storage
from sscd_vec.bank.views import crop_count
from sscd_vec.files import ImageFile, PathLike
from sscd_vec.normalize import Kind, Normalizer, UncalibratedError
from sscd_vec.verify import is_available

if TYPE_CHECKING:
    from sscd_vec.bank.describe import ImageEncoder
    from sscd_vec.bank.searching import Scales
    from sscd_vec.bank.second_stage import SecondStage
    from sscd_vec.encoder.images import ImageInput

Float32 = NDArray[np.float32]


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
        read_only: Write nothing; the default where the storage cannot be written to. A FAISS file
            is mapped then: it opens at once and processes share its pages.
        trust: Accept a bank someone else made: load the model it names, show the files it names.
        wait: For another writer: True waits, False raises, a number waits that many seconds.
        verify: Whether searches confirm candidates by geometry (extra ``verify``); a number is how
            many candidates of a query to look at, 20 by default.
        local: Whether to keep local features of added images beside the bank, 70 kB each, so that
            verification need not read their files; a bank that keeps them goes on by default.

    Raises:
        ImportError: ``verify`` or ``local`` needs OpenCV, which is not installed.
        BankError: There is no bank and ``create`` is false, it is damaged, or it was made with
            something other than what was asked for.
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
        verify: bool | int = False,
        local: bool | None = None,
    ) -> None:
        """Open the bank, or make it."""
        self.location = None
        if location is not None:
            self.location = Location.parse(location, collection=collection, state=state)
        self.threshold, self.descriptor_cache = threshold, cache
        self.setup = Setup(self.location, model, device=device, trust=trust)
        exists = self.setup.read_or_make(normalizer, tiles, create=create)
        self.storage = Storage(
            self.location, self.normalizer,
            index=index, token=token, read_only=read_only, wait=wait,
        )  # fmt: skip
        if exists and normalizer is not None:
            self.replace_normalizer(normalizer)
        self.verify, self._local = verify, local
        if verify or local:
            try:
                _ = self.second_stage
            except BaseException:
                self.storage.close()
                raise

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

        If interrupted, it keeps what it has encoded; run it again to continue.

        Args:
            images: Without ``ids``: files, folders, tars, lists of paths, and Parquet files of
                descriptors (``sscd-vec encode``). With ``ids``: anything the encoder takes: paths,
                bytes, arrays, PIL images.
            ids: An id for each image; the files' paths by default.
            metadata: One JSON object or None for each image; only with ``ids``.
            keep: Keep a JPEG of images that are not files, so that matches can be shown.
            leave_out: A folder that is not entered where it lies below one of ``images``.
            show_progress: Whether to draw a progress bar; by default on a terminal.
        """
        from sscd_vec.bank.changing import add_images

        return add_images(
            self, images, ids,
            metadata=metadata, keep=keep, leave_out=leave_out, show_progress=show_progress,
        )  # fmt: skip

    def remove(self, ids: str | Iterable[str]) -> int:
        """Remove images by id; ids that are not there are ignored.

        Files of the user stay. JPEGs the bank kept itself are deleted.

        Returns:
            How many were there.
        """
        from sscd_vec.bank.changing import remove_images

        return remove_images(self, [ids] if isinstance(ids, str) else list(ids))

    def replace_normalizer(self, normalizer: PathLike | Normalizer) -> None:
        """Use another query side (background, β, thresholds) from now on; vectors stay.

        Raises:
            BankError: Its reference side is another one: the vectors would have to be made again.
        """
        self.storage.index.normalizer = self.setup.replace_normalizer(normalizer)

    def decide(self, first: str, second: str, is_copy: bool) -> None:
        """Remember whether two images are copies, whatever they score.

        Searches and ``duplicates`` respect it. It holds for the images' content, also under
        another name.

        Args:
            first: Id of an image of the bank, or the SHA-256 of any image.
            second: Likewise.
            is_copy: What you decided.

        Raises:
            ValueError: The bank has no image of that id.
        """
        decisions = Decisions()
        decisions.add([Decision(self._digest_of(first), self._digest_of(second), is_copy)])
        self.add_decisions(decisions)

    def add_decisions(self, decisions: Decisions) -> None:
        """Remember many decisions, such as ``Decisions.load`` reads from a report's file."""
        self.storage.decide(decisions)

    def decisions(self) -> Decisions:
        """All decisions, with the scores of the images that are in the bank."""
        from sscd_vec.bank.duplicates import scored_decisions

        return scored_decisions(self)

    # ------------------------------------------------------------------ asking it

    def search(
        self,
        image: "ImageInput",
        k: int = 10,
        *,
        tiles: int = 1,
        scales: "Scales" = "auto",
        verify: bool | int | None = None,
        threshold: float | None = None,
    ) -> list[BankMatch]:
        """The ``k`` best matches of one image, best first.

        Args:
            image: Anything the encoder takes.
            k: At most this many matches.
            tiles: Also look for overlapping crops of the image, 1/``tiles`` of each side: finds
                images pasted into it, at ten times the cost for 2.
            scales: Whether to look at the image twice as large too, where a copy inside a collage
                or on another background is found: ``"auto"`` when the first look finds no copy,
                ``"one"`` never, ``"both"`` always. The second look costs as much as four; with
                tiles there is none.
            verify: Whether to confirm candidates by geometry, or how many of them; as the bank was
                opened by default. A verified match has one score of everything (0 to 1), a
                threshold for it, and the outlines of what was copied in ``region``; a collage has
                a match for every image in it.
            threshold: Least score of a copy, instead of the bank's.

        Raises:
            ImageError: It is not a usable image.
        """
        from sscd_vec.encoder.images import ImageError, input_name

        answer = next(
            self.search_many(
                [image], k, tiles=tiles, scales=scales, verify=verify, threshold=threshold
            )
        )
        if answer.error:
            raise ImageError(input_name(image), answer.error)
        return answer.matches

    def search_many(
        self,
        images: "PathLike | Iterable[ImageInput | ImageFile]",
        k: int = 10,
        *,
        tiles: int = 1,
        scales: "Scales" = "auto",
        verify: bool | int | None = None,
        threshold: float | None = None,
        show_progress: bool | None = False,
    ) -> Iterator[Answer]:
        """Search for many images, in order; those that cannot be read say why.

        Args:
            images: A folder, tar or list of paths, a Parquet file of descriptors or a folder of
                them, or an iterable of images.
            k: At most this many matches each.
            tiles: See ``search``.
            scales: See ``search``.
            verify: See ``search``.
            threshold: See ``search``.
            show_progress: Whether to draw a progress bar.
        """
        from sscd_vec.bank.searching import search_images

        verify = self.verify if verify is None else verify
        return search_images(
            self, images, k, tiles=tiles, scales=scales,
            verify=verify, threshold=threshold, show_progress=show_progress,
        )  # fmt: skip

    def search_descriptors(
        self,
        queries: Sequence[Float32],
        k: int = 10,
        *,
        images: "Sequence[ImageInput | None] | None" = None,
        threshold: float | None = None,
        penalty: float = 0.0,
    ) -> list[list[BankMatch]]:
        """Search for images already described: for each ``(views, d)``, the whole one first.

        Args:
            queries: The descriptors.
            k: At most this many matches each.
            images: The images themselves, so that pixels can decide where scores cannot.
            threshold: Least score of a copy, instead of the bank's.
            penalty: What every score loses.

        Raises:
            BankError: The index was lost.
        """
        from sscd_vec.bank.searching import search_described

        return search_described(
            self, queries, k, images=images, threshold=threshold, penalty=penalty
        )

    def duplicates(
        self,
        threshold: float | None = None,
        *,
        prefer: str | None = None,
        protect: Sequence[Path] = (),
        heatmaps: bool = False,
        verify: bool | None = None,
        exhaustive: bool | None = None,
        memory: int = 1 << 30,
        show_progress: bool | None = None,
    ) -> Copies:
        """Groups of copies among the bank's own images, and which one of each to keep.

        Args:
            threshold: Least symmetric score of a copy; the calibrated one by default.
            prefer: What to keep where the evidence does not decide: ``largest``, ``oldest``,
                ``format:heic`` or ``path:GLOB``.
            protect: Folders whose images are never proposed to be moved; groups of only such
                images are left out.
            heatmaps: Also compute which parts match: two forward passes per copy.
            verify: Whether geometry decides about pairs near the threshold and outlines copies; as
                the bank was opened by default.
            exhaustive: Compare every pair of images. By default up to 50 000 images; more are
                compared with lists of neighbours, and ``recall`` says what that finds.
            memory: Bytes held at a time by a comparison through lists.
            show_progress: Whether to draw a progress bar; by default on a terminal.

        Raises:
            UncalibratedError: No threshold is given or calibrated.
        """
        from sscd_vec.bank.duplicates import find_copies

        verify = bool(self.verify if verify is None else verify)
        return find_copies(
            self, threshold, prefer=prefer, protect=protect, heatmaps=heatmaps, verify=verify,
            exhaustive=exhaustive, memory=memory, show_progress=show_progress,
        )  # fmt: skip

    def score_kind(self, tiles: int = 1) -> Kind:
        """Which kind of score a search with that many tiles gives."""
        return "tiled" if tiles > 1 or self.settings.tiles > 1 else "search"

    def compared_views(self, views: int) -> int | None:
        """Comparisons of views per image if the query has that many; None for whole images."""
        if self.score_kind(views) == "search":
            return None
        return views * crop_count(self.settings.tiles)

    def threshold_of(self, kind: Kind, views: int | None = None) -> float | None:
        """The least score of a copy in a bank of this size: given, else calibrated, else None."""
        if self.threshold is not None:
            return self.threshold
        try:
            return self.normalizer.threshold(kind, len(self), views)
        except UncalibratedError:
            return None

    def __len__(self) -> int:
        """Number of images."""
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
        return self.setup.encoder

    @cached_property
    def second_stage(self) -> "SecondStage":
        """What verifies matches, made when first needed.

        Raises:
            ImportError: OpenCV is not installed; says how to install it.
        """
        from sscd_vec.bank.second_stage import SecondStage

        return SecondStage(self, keep=bool(self._local))

    @property
    def normalizer(self) -> Normalizer:
        """Its normalizer; ``replace_normalizer`` changes the query side."""
        return self.setup.normalizer

    @property
    def settings(self) -> BankSettings:
        """What it was made with."""
        return self.setup.settings

    def may_show(self, path: Path) -> bool:
        """Whether a file lies in the bank or in a folder this user added images from."""
        return self.setup.may_show(path)

    def shown_file(self, image: BankImage | None) -> ImageFile | None:
        """The file of an image, if there is one that may be shown."""
        if image is None or image.file is None or not self.may_show(image.file.path):
            return None
        return image.file

    def close(self) -> None:
        """Release files, connections and locks."""
        if "second_stage" in vars(self):
            self.second_stage.close()
        self.storage.close()

    def __enter__(self) -> Self:
        """Nothing to do: it is open."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def __str__(self) -> str:
        """Where it is, without credentials."""
        return "a bank in memory" if self.location is None else str(self.location)

    def __repr__(self) -> str:
        """Where it is and how large."""
        return f"Bank({str(self)!r}, {len(self)} images)"

    # ------------------------------------------------------------------ how it does it

    @property
    def keeps_features(self) -> bool:
        """Whether local features of added images are kept; not where OpenCV is missing."""
        if self._local is not None or self.location is None:
            return bool(self._local)
        return (self.location.folder / FEATURES).exists() and is_available()

    def _digest_of(self, name: str) -> str:
        known = self.get(name)
        if known is not None:
            return known.digest
        if is_digest(name):
            return name
        raise ValueError(f"expected an id of {self} or a SHA-256 in hex, got {name!r}")
