"""Any number of vectors like real descriptors, with copies planted as real edits make them.

A vector is a whitened descriptor of a real photo and noise. ``SPREAD`` is such that the nearest of
a million or ten million strangers scores what the calibration of the shipped normalizer expects of
that many real images. A copy lies where a real edited copy of that photo lies: as far away, and in
the same direction. At the size of the real set, lists of neighbours find fewer of these copies
than of the real ones (``compare_with_real``): what is measured on them is not flattering.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from accuracy.edits import mix
from photos import Photo
from sscd_vec import Encoder, Normalizer

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
DIM = 512
SPREAD = 1.5  # length of the noise: cosine 0.55 with the photo, 0.31 between two around one photo
BLOCK = 65_536
COPIES = 2  # of each edited photo


@dataclass(frozen=True)
class Real:
    """Whitened descriptors of photos, and of two edited copies of each of the first of them."""

    photos: Float32
    copies: Float32

    @classmethod
    def make(cls, photos: list[Photo], edited: int, cache: Path | None) -> "Real":
        """Encode photos and copies, or read what an earlier run kept."""
        if cache is not None and cache.exists():
            with np.load(cache) as kept:
                return cls(kept["photos"], kept["copies"])
        encoder, rules = Encoder.from_pretrained(device="cpu"), Normalizer.from_pretrained()
        rng = np.random.default_rng(0)

        def another() -> Image.Image:
            return photos[rng.integers(len(photos))].image()

        twice = (photo for photo in photos[:edited] for _ in range(COPIES))
        copies = encoder.encode(mix.edit(photo.image(), rng, another)[0] for photo in twice)
        originals = encoder.encode(photo.image() for photo in photos)
        made = cls(rules.whiten(originals), rules.whiten(copies))
        if cache is not None:
            np.savez(cache, photos=made.photos, copies=made.copies)
        return made

    @property
    def edited(self) -> int:
        """Photos that have copies: the first ones."""
        return len(self.copies) // COPIES

    def rows(self, begin: int, end: int) -> tuple[Float32, Int64]:
        """Vectors ``begin`` to ``end`` and the photos they lie around; always the same ones."""
        blocks = range(begin // BLOCK, -(-end // BLOCK))
        made = [self._block(number) for number in blocks]
        wanted = slice(begin - blocks.start * BLOCK, end - blocks.start * BLOCK)
        vectors = np.concatenate([vectors for vectors, _ in made])[wanted]
        return vectors, np.concatenate([around for _, around in made])[wanted]

    def _block(self, number: int) -> tuple[Float32, Int64]:
        rng = np.random.default_rng([number, BLOCK])
        around = rng.integers(len(self.photos), size=BLOCK)
        vectors = rng.standard_normal((BLOCK, DIM), np.float32)
        vectors *= SPREAD / DIM**0.5
        vectors += self.photos[around]
        return unit(vectors), around

    def copies_of(self, rows: Float32, around: Int64, which: int) -> Float32:
        """Of each row the copy that edit ``which`` of its photo makes; the photo must be edited."""
        original, copy = self.photos[around], self.copies[around * COPIES + which]
        cosine = (original * copy).sum(1, keepdims=True)
        away = copy - cosine * original
        away -= (away * rows).sum(1, keepdims=True) * rows
        made: Float32 = cosine * rows + np.sqrt(1 - cosine**2) * unit(away)
        return unit(made)

    def compare_with_real(self, lists: int = 128, share: float = 0.1) -> dict[str, Any]:
        """Copies that lie in the nearest lists, of real ones and of drawn ones of as many rows."""
        around = np.repeat(np.arange(self.edited), COPIES)
        drawn, theirs = self.rows(0, len(self.photos))
        has = np.flatnonzero(theirs < self.edited)
        planted = [self.copies_of(drawn[has], theirs[has], which) for which in range(COPIES)]
        return {
            "images": len(self.photos),
            "lists": lists,
            "lists_looked_into": round(lists * share),
            "real_copies_found": _listed(self.photos, self.copies, around, lists, share),
            "drawn_copies_found": _listed(
                drawn, np.concatenate(planted), np.tile(has, COPIES), lists, share
            ),
        }


def _listed(rows: Float32, queries: Float32, originals: Int64, lists: int, share: float) -> float:
    """Of the copies an exhaustive search ranks first, how many lie in the nearest lists."""
    first = (queries @ rows.T).argmax(1) == originals
    centroids = make_centroids(rows, lists)
    own = (rows[originals] @ centroids.T).argmax(1)
    similar = queries @ centroids.T
    rank = (similar > similar[np.arange(len(queries)), own, None]).sum(1)
    return round(float((rank[first] < lists * share).mean()), 3)


def make_centroids(rows: Float32, lists: int, rounds: int = 8) -> Float32:
    """Unit centroids by k-means."""
    centroids: Float32 = rows[np.random.default_rng(0).choice(len(rows), lists, replace=False)]
    for _ in range(rounds):
        nearest = (rows @ centroids.T).argmax(1)
        sums = np.zeros_like(centroids)
        np.add.at(sums, nearest, rows)
        centroids = unit(np.where(np.any(sums, 1, keepdims=True), sums, centroids))
    return centroids


def unit(rows: Float32) -> Float32:
    """Rows of length one, in place."""
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows
