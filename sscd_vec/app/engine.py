"""What the server can do with a bank. Runs in the worker's thread, many requests at a time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sscd_vec.app.limits import Refused
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.uploads import Pixels
from sscd_vec.bank import Bank, BankMatch
from sscd_vec.bank.describe import describe_pixels
from sscd_vec.bank.heat_grid import IMAGE_SIDE, reduced
from sscd_vec.bank.quality import THUMBNAIL_SIDE, jpeg
from sscd_vec.encoder.images import ImageError, load_pixels


@dataclass(frozen=True)
class Search:
    """One image to look for, and how many matches are wanted."""

    pixels: Pixels
    k: int


@dataclass(frozen=True)
class HeatmapRequest:
    """One image and the picture of the bank to compare it with."""

    pixels: Pixels
    key: int


class Engine:
    """A bank at work.

    Attributes:
        bank: What is searched.
        tiles: Crops per side of each query; 1 for whole images.
    """

    def __init__(self, bank: Bank, metrics: Metrics, *, tiles: int = 1) -> None:
        """Load the bank's encoder."""
        self.bank, self.tiles, self.metrics = bank, tiles, metrics
        self.encoder = bank.encoder

    @property
    def threshold(self) -> float | None:
        """Least score of a copy, if one is given or calibrated."""
        return self.bank.threshold_of(self.bank.score_kind(self.tiles))

    def handlers(self) -> dict[str, Any]:
        """The kinds of work, for the worker."""
        return {
            "search": self.search,
            "add": self.add,
            "remove": self.remove,
            "heatmap": self.heatmap,
        }

    def search(self, requests: Sequence[Search]) -> list[list[BankMatch]]:
        """Encode all images in one pass and search them together."""
        vectors = describe_pixels(self.encoder, [r.pixels for r in requests], self.tiles)
        self.metrics.images.add(sum(map(len, vectors)))
        answers = self.bank.search_descriptors(vectors, max(r.k for r in requests))
        return [found[: request.k] for request, found in zip(requests, answers, strict=True)]

    def add(self, images: Sequence[Pixels]) -> list[str]:
        """Keep the images as clean JPEGs and put them into the bank; the same image has one id."""
        # Ids come from the pixels and never from the client.
        ids = [f"upload:{hashlib.sha256(image.tobytes()).hexdigest()[:32]}" for image in images]
        different = dict(zip(ids, images, strict=True))
        done = self.bank.add(different.values(), list(different), keep=True, show_progress=False)
        self.metrics.images.add(done.added)
        return ids

    def remove(self, batches: Sequence[Sequence[str]]) -> list[int]:
        """Take images out of the bank. Files of the user stay; kept uploads are deleted."""
        return [self.bank.remove(ids) for ids in batches]

    def heatmap(self, requests: Sequence[HeatmapRequest]) -> list[Any]:
        """Which part of each image matches the picture, and the other way round."""
        answers: list[Any] = []
        for request in requests:
            try:
                query = reduced(request.pixels)
                reference = reduced(self._pixels(request.key, IMAGE_SIDE))
                answers.append(
                    (
                        self.encoder.heatmap(query, reference),
                        self.encoder.heatmap(reference, query),
                    )
                )
            except Refused as refusal:
                answers.append(refusal)
        return answers

    def picture(self, key: int, side: int = THUMBNAIL_SIDE) -> bytes:
        """A small JPEG of an image of the bank. Safe in any thread."""
        return jpeg(self._pixels(key, side), side)

    def _pixels(self, key: int, side: int) -> Pixels:
        """Pixels of an image of the bank; large JPEGs are decoded at twice ``side`` or more."""
        image = self.bank.storage.records.by_key(key)
        if image is None or image.file is None:
            raise Refused(404, "the bank has no such image")
        if not self.bank.may_show(image.file.path):
            raise Refused(403, "its file lies outside the folders this bank may show")
        try:
            return load_pixels(image.file, name="the image", reduce_to=lambda h, w: (side, side))
        except ImageError as error:
            raise Refused(404, f"its file can no longer be read ({error.reason})") from error
