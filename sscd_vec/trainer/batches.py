"""Batches: step number in, this rank's views out, the same for every number of ranks.

All randomness comes from ``(seed, step)`` or ``(seed, epoch)``: the data position of a checkpoint
is its step, and nothing else needs saving.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sscd_vec.trainer.augment import augment
from sscd_vec.trainer.mix import Batch, mix
from sscd_vec.trainer.overlay import Overlays
from sscd_vec.trainer.pixels import PixelSource
from sscd_vec.trainer.recipe import NO_MIX, PASTE, Recipe, draw_pairs, generator

EPOCHS_KEY = 1 << 63  # epochs' generators are keyed apart from steps'


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
        ranks: How many processes share the global batch.
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
        if len(self.pixels) < self.batch:
            raise ValueError(
                f"batch={self.batch} source images, but there are only {len(self.pixels)}: "
                f"use batch={len(self.pixels)} or less"
            )
        if self.batch % self.ranks:
            raise ValueError(f"batch={self.batch} does not divide among {self.ranks} processes")

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in one pass; the rest of a pass waits for another order."""
        return len(self.pixels) // self.batch

    def numbers(self, step: int) -> npt.NDArray[np.int64]:
        """The source images of the global batch at ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = generator(self.seed, EPOCHS_KEY + epoch).permutation(len(self.pixels))
        return order[position * self.batch : (position + 1) * self.batch]

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
        photos, photo_of_view = np.unique(views % self.batch, return_inverse=True)
        decoded = self.pixels.take(numbers[photos])
        pixels = torch.from_numpy(decoded.pixels).to(self.device)

        def made(part: slice, insets: Tensor | None = None) -> Tensor:
            return augment(
                pixels,
                decoded.aspects,
                choices.take(views[part]),
                self.size,
                self.overlays,
                rows=photo_of_view[part],
                insets=insets,
            )

        finished = made(slice(len(unpasted)))
        if pasted.any():
            insets = finished[torch.from_numpy(partners[pasted]).to(self.device)]
            finished = torch.cat([finished, made(slice(len(unpasted), None), insets)])
        rows = np.empty(len(own), dtype=np.int64)
        rows[~pasted] = np.searchsorted(unpasted, own[~pasted])
        rows[pasted] = np.arange(len(unpasted), len(views))
        return mix(finished, decoded.sources[photo_of_view], mine, rows, partners)
