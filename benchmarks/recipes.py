"""How to build each model of the table: ours, released weights, ImageNet trunks, hashes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

from descriptor_cache import Describer, Descriptors
from peers import HashDescriber, HashName
from sscd_vec.encoder.backends import BackendName
from sscd_vec.encoder.config import EncoderConfig, SizeMode
from sscd_vec.encoder.encoder import Encoder
from sscd_vec.encoder.imagenet import imagenet_model
from sscd_vec.encoder.model import SSCDModel
from sscd_vec.encoder.precision import Precision


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
