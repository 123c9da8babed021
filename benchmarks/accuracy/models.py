"""How to build each model of the table: ours, released weights, ImageNet trunks, hashes.

A hash of ``b`` bits becomes the unit vector of its signs over ``sqrt(b)``: the inner product of two
is ``1 - 2·(Hamming distance) / b``, so hashes are searched and judged like every other descriptor.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from accuracy.dataset import Describer, Descriptors
from sscd_vec.encoder.backends import BackendName, Precision
from sscd_vec.encoder.config import EncoderConfig, SizeMode
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.imagenet import imagenet_model
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


@dataclass(frozen=True)
class HashRecipe:
    """A perceptual hash."""

    name: HashName
    trunk_features = False

    def build(self) -> Describer:
        """Find its package."""
        return HashDescriber(self.name)


@dataclass(frozen=True)
class TrunkRecipe:
    """An ImageNet trunk with average (``gem_p`` 1) or GeM pooling."""

    trunk: str
    gem_p: float
    size: int
    size_mode: SizeMode = "short"
    backend: BackendName = "torch"
    batch_size: int = 32
    trunk_features = True

    def build(self) -> "EncoderDescriber":
        """Load its weights."""
        config = EncoderConfig(
            trunk=self.trunk,
            features="trunk",
            gem_p=self.gem_p,
            size=self.size,
            size_mode=self.size_mode,
        )
        encoder = Encoder(imagenet_model(config), backend=self.backend)
        return EncoderDescriber(encoder, self.batch_size)


@dataclass(frozen=True)
class EncoderRecipe:
    """One of our encoders, or the paper's weights read by it.

    Attributes:
        name: A released name, a folder or a checkpoint file.
        size: Input size; None keeps the model's own.
        size_mode: How it is applied; None keeps the model's own.
        gem_p: Exponent of the pooling at inference; None keeps the model's own.
        backend: ``torch``, ``onnx`` or ``openvino``.
        precision: Of the network.
        batch_size: Images per forward pass.
    """

    name: str
    size: int | None = None
    size_mode: SizeMode | None = None
    gem_p: float | None = None
    backend: BackendName = "torch"
    precision: Precision = "float32"
    batch_size: int = 32
    trunk_features = False

    def build(self) -> Describer:
        """Load the encoder."""
        encoder = Encoder.from_pretrained(
            self.name,
            size=self.size,
            size_mode=self.size_mode,
            backend=self.backend,
            precision=self.precision,
        )
        if self.gem_p is not None:
            old = encoder.model
            model = SSCDModel(old.trunk, old.head, replace(old.config, gem_p=self.gem_p))
            encoder = Encoder(model, backend=self.backend, precision=self.precision)
        return EncoderDescriber(encoder, self.batch_size)


class EncoderDescriber:
    """An ``Encoder`` as a describer of files."""

    def __init__(self, encoder: Encoder, batch_size: int) -> None:
        """Keep the encoder."""
        self.encoder = encoder
        self.fingerprint: str = encoder.fingerprint
        self.batch_size = batch_size

    def __call__(self, paths: Sequence[str]) -> Descriptors:
        """Descriptors of image files."""
        return self.encoder.encode(list(paths), batch_size=self.batch_size, show_progress=False)


Model = HashRecipe | TrunkRecipe | EncoderRecipe


def recipe_of(
    name: str,
    *,
    size: int | None = None,
    size_mode: SizeMode | None = None,
    gem_p: float | None = None,
    backend: BackendName = "torch",
    precision: Precision = "float32",
    batch_size: int = 32,
) -> Model:
    """The model a name stands for.

    ``pdq`` and ``phash`` are hashes; ``imagenet:TRUNK`` is a trunk with its ImageNet weights,
    GeM pooled with ``gem_p`` (1 is the mean); everything else is read by ``Encoder``. A name may
    end in settings of its own: ``imagenet:resnet50@gem_p=1,size=224,size_mode=square``.

    Raises:
        ValueError: If such a setting is unknown.
    """
    name, own = _own_settings(name)
    size = int(own["size"]) if "size" in own else size
    size_mode = cast(SizeMode, own["size_mode"]) if "size_mode" in own else size_mode
    gem_p = float(own["gem_p"]) if "gem_p" in own else gem_p
    if name in get_args(HashName):
        return HashRecipe(cast(HashName, name))
    if name.startswith("imagenet:"):
        return TrunkRecipe(
            name.removeprefix("imagenet:"),
            3.0 if gem_p is None else gem_p,
            size or 288,
            size_mode or "short",
            backend,
            batch_size,
        )
    return EncoderRecipe(name, size, size_mode, gem_p, backend, precision, batch_size)


def _own_settings(name: str) -> tuple[str, dict[str, str]]:
    """``a@size=224`` as ``a`` and its settings; an ``@`` without a ``=`` after it is the name's."""
    stem, at, settings = name.rpartition("@")
    if not at or "=" not in settings:
        return name, {}
    own = dict(part.partition("=")[::2] for part in settings.split(","))
    unknown = sorted(set(own) - {"size", "size_mode", "gem_p"})
    if unknown:
        raise ValueError(f"{name}: unknown setting {unknown}; expected size, size_mode or gem_p")
    return stem, own
