"""What the server can do with a bank. Runs in the worker's thread, many requests at a time."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sscd_vec.app.limits import Refused
from sscd_vec.app.metrics import Metrics
from sscd_vec.app.uploads import Pixels, encode_jpeg
from sscd_vec.encoder.images import ImageError, load_pixels
from sscd_vec.photos.bank import UPLOADS, Bank, Hit
from sscd_vec.photos.heat_grid import IMAGE_SIDE, reduced
from sscd_vec.photos.pictures_table import file_state
from sscd_vec.photos.quality import THUMBNAIL_SIDE, thumbnail
from sscd_vec.photos.tiles import crops

Float32 = NDArray[np.float32]


class ImageEncoder(Protocol):
    """An ``Encoder``, as far as the server is concerned."""

    @property
    def fingerprint(self) -> str:
        """What distinguishes its descriptors."""
        ...

    def encode(self, inputs: Any, *, show_progress: bool | None = None) -> Any:  # noqa: ANN401
        """Descriptors of images."""
        ...

    def heatmap(self, a: Any, b: Any) -> Any:  # noqa: ANN401
        """Which part of ``a`` matches ``b``."""
        ...


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
    """A bank and its encoder.

    Attributes:
        bank: What is searched.
        encoder: What it was built with.
        tiles: Crops per side of each query; 1 for whole images.
    """

    def __init__(
        self, bank: Bank, encoder: ImageEncoder, metrics: Metrics, *, tiles: int = 1
    ) -> None:
        """Check that the encoder is the bank's."""
        bank.normalizer.check_encoder(encoder)
        self.bank = bank
        self.encoder = encoder
        self.tiles = tiles
        self.metrics = metrics

    @property
    def threshold(self) -> float | None:
        """The calibrated score of a copy, if there is one."""
        tiled = self.tiles > 1 or self.bank.settings.tiles > 1
        found = self.bank.normalizer.thresholds.get("tiled" if tiled else "search")
        return None if found is None else found.value

    def handlers(self) -> dict[str, Any]:
        """The kinds of work, for the worker."""
        return {
            "search": self.search,
            "add": self.add,
            "remove": self.remove,
            "heatmap": self.heatmap,
        }

    def search(self, requests: Sequence[Search]) -> list[list[Hit]]:
        """Encode all images in one pass and search them together."""
        views = [crops(request.pixels, self.tiles) for request in requests]
        k = max(request.k for request in requests)
        answers = self.bank.search(self._encode(views), k)
        return [hits[: request.k] for request, hits in zip(requests, answers, strict=True)]

    def add(self, images: Sequence[Pixels]) -> list[str]:
        """Keep the images as clean JPEGs and put them into the bank; the same image has one id."""
        folder = self.bank.folder / UPLOADS
        folder.mkdir(exist_ok=True)
        names, files = [], []
        for pixels in images:
            content = encode_jpeg(pixels)
            # The name comes from the pixels and never from the client.
            digest = hashlib.sha256(pixels.tobytes()).hexdigest()[:32]
            path = folder / f"{digest}.jpg"
            _write(path, content)
            names.append(f"upload:{digest}")
            files.append(file_state(path))
        vectors = self._encode([crops(pixels, self.bank.settings.tiles) for pixels in images])
        self.bank.add(files, vectors, names)
        self.bank.commit()
        return names

    def remove(self, batches: Sequence[Sequence[str]]) -> list[int]:
        """Take pictures out of the bank. Files of the user stay; uploads are deleted."""
        counts = []
        for ids in batches:
            uploads = [
                picture.path
                for picture in map(self.bank.pictures.by_id, ids)
                if picture is not None and picture.id.startswith("upload:")
            ]
            counts.append(self.bank.remove(ids))
            for path in uploads:
                path.unlink(missing_ok=True)
        return counts

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
        """A small JPEG of a picture of the bank. Safe in any thread."""
        from PIL import Image

        return thumbnail(Image.fromarray(self._pixels(key, side)), side)

    def _pixels(self, key: int, side: int) -> Pixels:
        """Pixels of a picture of the bank; large JPEGs are decoded at twice ``side`` or more."""
        picture = self.bank.pictures.by_key(key)
        if picture is None:
            raise Refused(404, "the bank has no such picture")
        try:
            return load_pixels(
                picture.path, name="the picture", reduce_to=lambda h, w: (side, side)
            )
        except ImageError as error:
            raise Refused(404, f"its file can no longer be read ({error.reason})") from error

    def _encode(self, views: Sequence[Sequence[Pixels]]) -> list[Float32]:
        flat = [crop for image in views for crop in image]
        self.metrics.images.add(len(flat))
        vectors = np.asarray(self.encoder.encode(flat, show_progress=False), np.float32)
        ends = np.cumsum([len(image) for image in views])[:-1]
        return np.split(vectors, ends)


def _write(path: Path, content: bytes) -> None:
    if path.exists():
        return
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    with open(handle, "wb") as file:
        file.write(content)
    os.replace(partial, path)
