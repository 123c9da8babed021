"""Which images a step trains on: found once, split, put in order, and made into views.

All randomness comes from ``(seed, step)`` or ``(seed, epoch)``. A checkpoint's position in the data
is therefore its step, and the views do not depend on the number of ranks.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sscd_vec.files import (
    IMAGE_EXTENSIONS,
    ImageFile,
    PathLike,
    Unreadable,
    find_images,
    printable_path,
)
from sscd_vec.trainer.augment.choices import NO_MIX, PASTE, draw_pairs, generator
from sscd_vec.trainer.augment.drawn import KINDS, draw_image
from sscd_vec.trainer.augment.overlay import Overlays
from sscd_vec.trainer.augment.recipe import Recipe
from sscd_vec.trainer.augment.views import Batch, augment, mix
from sscd_vec.trainer.config import MOST_DETAIL, TrainConfig
from sscd_vec.trainer.pixels import (
    Decoded,
    MemoryPixels,
    PixelSource,
    Storage,
    as_squares,
    decode,
)

EPOCHS_KEY = 1 << 63  # epochs' generators are keyed apart from steps'
DRAWN_KEY = 1 << 62  # and so are those of drawn images
DRAWN = 1 << 40  # drawn images are numbered from here, read ones from 0
KINDS_AT_ONCE = 2  # kinds of drawn images in one batch, so that several are of one kind
FILLERS = 32  # images outside the batch for composed views
MOST_VALIDATION = 2000
PREVIEW_IMAGES = 24
GOOD_STEPS_PER_EPOCH = 4  # what a suggested batch gives


@dataclass(frozen=True)
class Images:
    """The images of a run, found and split, not yet decoded.

    Attributes:
        places: Where they were found.
        training: Those to train on.
        held_out: Those to validate on.
        unreadable: By name, why other files cannot be read.
    """

    places: list[PathLike]
    training: list[ImageFile]
    held_out: list[ImageFile]
    unreadable: dict[str, str]

    @classmethod
    def find(
        cls,
        places: PathLike | Iterable[PathLike],
        config: TrainConfig,
        recipe: Recipe,
        ranks: int = 1,
    ) -> "Images":
        """List images and split them: others to validate on, or some that are held out.

        Raises:
            FileNotFoundError: A place does not exist.
            ValueError: A place holds no image, or there are too few for the batch.
        """
        given = _listed(places)
        training, unreadable = find_training_images(given)
        if config.validation:
            held_out = find_training_images([config.validation])[0][:MOST_VALIDATION]
        else:
            training, held_out = hold_out(training, config.holdout, MOST_VALIDATION)
        check_batch(config.batch, recipe, len(training), ranks)
        return cls(given, training, held_out, unreadable)

    def decode(
        self, config: TrainConfig, show: bool | None = False, *, validate: bool = True
    ) -> tuple[PixelSource, PixelSource]:
        """Images to train on and to validate on; none of the latter unless ``validate``."""
        pixels = decode(self.training, config, show)
        return pixels, MemoryPixels(self.held_out if validate else [], Storage(config.pixels))

    @staticmethod
    def sample(
        places: PathLike | Iterable[PathLike], config: TrainConfig
    ) -> tuple[PixelSource, int]:
        """A few images for a preview, evenly spaced, and how many there are in all."""
        found, _ = find_training_images(_listed(places))
        spread = np.linspace(0, len(found) - 1, min(len(found), PREVIEW_IMAGES)).astype(int)
        return decode([found[i] for i in spread], config), len(found)


def find_training_images(places: Iterable[PathLike]) -> tuple[list[ImageFile], dict[str, str]]:
    """List the images of folders, tars and list files in a fixed order.

    Returns:
        The images, and by name why other files cannot be read.

    Raises:
        FileNotFoundError: A place does not exist.
        ValueError: A place holds no image, or is a compressed or damaged tar.
    """
    found: dict[str, ImageFile] = {}
    unreadable: dict[str, str] = {}

    def report(problem: Unreadable) -> None:
        unreadable[printable_path(problem.path)] = problem.reason

    for place in places:
        here = find_images(place, report)
        if not here:
            raise ValueError(
                f"no images in {printable_path(place)}: expected files ending in "
                f"{', '.join(sorted(IMAGE_EXTENSIONS))}"
            )
        found.update((image.id, image) for image in here)
    return list(found.values()), unreadable


def hold_out(
    images: Sequence[ImageFile], fraction: float, most: int
) -> tuple[list[ImageFile], list[ImageFile]]:
    """Split off an evenly spaced ``fraction`` of the images, at most ``most``.

    Returns:
        The images to train on, and those held out.
    """
    count = min(int(len(images) * fraction), most)
    chosen = {i * len(images) // count for i in range(count)} if count else set()
    kept = [image for i, image in enumerate(images) if i not in chosen]
    return kept, [images[i] for i in sorted(chosen)]


def check_batch(batch: int, recipe: Recipe, images: int, ranks: int = 1) -> None:
    """Refuse a batch that the images or the ranks cannot fill; suggests one that works."""
    if images < _read_per_batch(batch, recipe):
        raise ValueError(
            f"batch={batch} source images, but there are only {images} to train on: use a smaller "
            f"batch, such as {suggested_batch(images, ranks)} (--batch), or add images"
        )
    if batch % ranks:
        raise ValueError(f"batch={batch} does not divide among {ranks} processes")


def suggested_batch(images: int, ranks: int = 1) -> int:
    """The largest power of two, times the ranks, that gives four steps per epoch."""
    share = max(2, images // GOOD_STEPS_PER_EPOCH // ranks)
    return ranks << (share.bit_length() - 1)


def _listed(places: PathLike | Iterable[PathLike]) -> list[PathLike]:
    return [places] if isinstance(places, str | os.PathLike) else list(places)


def _read_per_batch(batch: int, recipe: Recipe) -> int:
    """How many images of a batch are read; the others are drawn."""
    return max(1, batch - round(recipe.drawn * batch))


@dataclass(frozen=True)
class Batches:
    """Two augmented views of every source image of every step.

    Attributes:
        pixels: The images.
        recipe: How views are made.
        overlays: Fonts and emoji.
        size: Side of a view.
        batch: Source images in the global batch.
        seed: The run's seed.
        rank: This process.
        ranks: Number of processes that share the global batch.
        device: Where views are made.
    """

    pixels: PixelSource
    recipe: Recipe
    overlays: Overlays
    size: int
    batch: int
    seed: int
    rank: int = 0
    ranks: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Refuse a batch that the images or the ranks cannot fill."""
        check_batch(self.batch, self.recipe, self._count, self.ranks)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass; the rest of a pass is left out."""
        return self._count // self._read

    @cached_property
    def _count(self) -> int:
        return len(self.pixels)

    @property
    def _read(self) -> int:
        return _read_per_batch(self.batch, self.recipe)

    def __call__(self, step: int) -> Batch:
        """This rank's share: both views of its images, first views first."""
        numbers = self.numbers(step)
        choices = draw_pairs(self.recipe, self.batch, generator(self.seed, step))
        share = self.batch // self.ranks
        images = np.arange(self.rank * share, (self.rank + 1) * share)
        own = np.concatenate([images, self.batch + images])  # view 0 of image i is row i
        mine = choices.take(own)
        pasted = mine.mix == PASTE
        # A partner may belong to another rank: its view is made here once more, identically.
        unpasted = np.union1d(own[~pasted], mine.partner[mine.mix != NO_MIX])
        partners = np.searchsorted(unpasted, mine.partner).clip(max=len(unpasted) - 1)
        views = np.concatenate([unpasted, own[pasted]])
        needed, image_of_view = np.unique(views % self.batch, return_inverse=True)
        decoded = self._decoded(numbers[needed], step)
        pixels = decoded.tensors(self.device)
        fillers = self._filler_views(step) if (choices.compose >= 0).any() else None

        def make(part: slice, insets: Tensor | None = None) -> Tensor:
            return augment(
                pixels,
                decoded.aspects,
                choices.take(views[part]),
                self.size,
                self.overlays,
                rows=image_of_view[part],
                insets=insets,
                fillers=fillers,
            )

        finished = make(slice(len(unpasted)))
        if pasted.any():
            insets = finished[torch.from_numpy(partners[pasted]).to(self.device)]
            finished = torch.cat([finished, make(slice(len(unpasted), None), insets)])
        rows = np.empty(len(own), dtype=np.int64)
        rows[~pasted] = np.searchsorted(unpasted, own[~pasted])
        rows[pasted] = np.arange(len(unpasted), len(views))
        return mix(finished, decoded.sources[image_of_view], mine, rows, partners)

    def ahead(self, steps: range) -> Iterator[tuple[int, Batch]]:
        """Batches in order; the next is made while this one is trained on, where that helps.

        Two thread pools on one CPU disturb each other, so images in memory are augmented in turn
        there.
        """
        if self.device == "cpu" and isinstance(self.pixels, MemoryPixels):
            yield from ((step, self(step)) for step in steps)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="augment") as pool:
            waiting = [pool.submit(self, step) for step in steps[:1]]
            for index, step in enumerate(steps):
                batch = waiting.pop().result()
                waiting += [pool.submit(self, later) for later in steps[index + 1 : index + 2]]
                yield step, batch

    def numbers(self, step: int) -> npt.NDArray[np.int64]:
        """The source images of the global batch at ``step``."""
        read = self._order(step, 0, self._read)
        first = DRAWN + step * (self.batch - self._read)
        drawn = np.arange(first, first + self.batch - self._read)
        places = np.linspace(0, self._read, len(drawn), endpoint=False).astype(np.int64)
        return np.insert(read, places, drawn)

    def _order(self, step: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """Images ``start`` to ``end``, counted from the first of the batch; wraps around."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = generator(self.seed, EPOCHS_KEY + epoch).permutation(self._count)
        return order.take(np.arange(start, end) + position * self._read, mode="wrap")

    def fillers(self, step: int) -> npt.NDArray[np.int64]:
        """Up to ``FILLERS`` images outside the global batch at ``step``."""
        return self._order(step, self._read, min(self._count, self._read + FILLERS))

    def _filler_views(self, step: int) -> Tensor | None:
        """The fillers (k, 3, size, size); None if the batch holds every image."""
        numbers = self.fillers(step)
        if not len(numbers):
            return None
        pixels = self.pixels.take(numbers).tensors(self.device)
        return as_squares(pixels, self.size, torch.float32)

    def _decoded(self, numbers: npt.NDArray[np.int64], step: int) -> Decoded:
        """Read the images below ``DRAWN``, draw the others."""
        is_drawn = numbers >= DRAWN
        read = self.pixels.take(numbers[~is_drawn])
        if not is_drawn.any():
            return read
        square = isinstance(read.pixels, np.ndarray)
        side = read.pixels[0].shape[0] if square else round(MOST_DETAIL * self.size)
        kinds = generator(self.seed, DRAWN_KEY + step).integers(0, len(KINDS), KINDS_AT_ONCE)
        waiting = iter(zip(read.pixels, read.aspects, read.sources, strict=True))

        def one(number: int) -> tuple[npt.NDArray[np.uint8], float, int]:
            if number < DRAWN:
                return next(waiting)
            kind = int(kinds[number % KINDS_AT_ONCE])
            return *draw_image(number, kind, side, self.overlays.complete_fonts), number

        pixels, aspects, sources = zip(*map(one, numbers.tolist()), strict=True)
        return Decoded(
            np.stack(pixels) if square else list(pixels),
            np.array(aspects, dtype=np.float32),
            np.array(sources, dtype=np.int64),
        )
