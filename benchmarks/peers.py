"""What our descriptors are compared with: perceptual hashes, and trunks trained on ImageNet only.

A hash of ``b`` bits becomes the unit vector of its signs over ``sqrt(b)``: the inner product of two
is ``1 - 2·(Hamming distance) / b``, so hashes are searched and judged like every other descriptor.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from descriptor_cache import Descriptors
from sscd_vec.encoder.config import EncoderConfig
from sscd_vec.encoder.model import SSCDModel

HashName = Literal["pdq", "phash"]
BATCH = 32


class HashDescriber:
    """PDQ (256 bits, PyPI ``pdqhash``) or pHash (64 bits, PyPI ``imagehash``)."""

    def __init__(self, name: HashName) -> None:
        """Find the package.

        Raises:
            ImportError: Naming what to install.
        """
        self.fingerprint = f"hash {name}"
        try:
            self._bits = _pdq() if name == "pdq" else _phash()
        except ImportError as error:
            package = "pdqhash" if name == "pdq" else "imagehash scipy"
            raise ImportError(f"{name} needs another package: pip install {package}") from error

    def __call__(self, paths: Sequence[str]) -> Descriptors:
        """Signs of the bits, ``(n, bits)``, of unit length."""
        with ThreadPoolExecutor() as threads:
            bits = np.stack(list(threads.map(self._of_file, paths)))
        signs: Descriptors = np.where(bits, 1.0, -1.0).astype(np.float32)
        signs /= np.sqrt(np.float32(bits.shape[1]))
        return signs

    def _of_file(self, path: str) -> NDArray[np.bool_]:
        with Image.open(path) as image:
            return self._bits(image.convert("RGB"))


class EagerDescriber:
    """A network run the way the paper's code runs it: Pillow, torchvision transforms, eager torch.

    This is the reference that ``--throughput`` measures against, and needs nothing of our encoder
    but the network.
    """

    def __init__(self, model: SSCDModel) -> None:
        """Keep the model in evaluation mode."""
        self.model = model.eval()
        self.transform = reference_transform(model.config)

    def __call__(self, paths: Sequence[str]) -> Descriptors:
        """Descriptors of image files; images of one size go through the network together."""
        found: list[Tensor | None] = [None] * len(paths)
        with ThreadPoolExecutor() as threads, torch.inference_mode():
            for start in range(0, len(paths), BATCH):
                part = list(threads.map(self.decode, paths[start : start + BATCH]))
                for shape in sorted({tuple(image.shape) for image in part}):
                    rows = [row for row, image in enumerate(part) if tuple(image.shape) == shape]
                    output = self.model(torch.stack([part[row] for row in rows]))
                    for row, descriptor in zip(rows, output, strict=True):
                        found[start + row] = descriptor
        return torch.stack([row for row in found if row is not None]).numpy()

    def decode(self, path: str) -> Tensor:
        """One image file as the network's input ``(3, h, w)``."""
        with Image.open(path) as image:
            return self.transform(image.convert("RGB"))


def reference_transform(config: EncoderConfig) -> Callable[[Image.Image], Tensor]:
    """Pillow's resize, ``/255``, mean and deviation."""
    if config.size_mode == "long":
        resize = v2.Resize(config.size - 1, max_size=config.size)
    else:
        side = config.size
        resize = v2.Resize((side, side) if config.size_mode == "square" else side)
    steps = [resize, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    transform: Callable[[Image.Image], Tensor] = v2.Compose(
        [*steps, v2.Normalize(config.mean, config.std)]
    )
    return transform


def _pdq() -> Callable[[Image.Image], NDArray[np.bool_]]:
    import pdqhash

    return lambda image: np.asarray(pdqhash.compute(np.asarray(image))[0], bool)


def _phash() -> Callable[[Image.Image], NDArray[np.bool_]]:
    import imagehash

    return lambda image: np.asarray(imagehash.phash(image).hash, bool).reshape(-1)
