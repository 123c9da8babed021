"""``Encoder``: images in, descriptors out."""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sscd_vec import models
from sscd_vec.encoder import checkpoint, pipeline
from sscd_vec.encoder.backends import (
    Backend,
    BackendName,
    Precision,
    check_backend,
    open_backend,
)
from sscd_vec.encoder.config import EncoderConfig, SizeMode
from sscd_vec.encoder.images import ImageInput, Inputs, images_of, load_pixels
from sscd_vec.encoder.model import SSCDModel, fingerprint
from sscd_vec.encoder.pipeline import Decode, Encoded, OnError, Options
from sscd_vec.encoder.preprocess import prepare

if TYPE_CHECKING:
    from sscd_vec.encoder.backends.native import TorchBackend
    from sscd_vec.encoder.isolation import Decoders

_CHUNK = 1024


class Encoder:
    """A model that turns images into unit-length descriptors.

    Attributes:
        model: The plain network, from normalized NCHW float input to unit descriptors.
        device: Where it runs.
        backend: What runs it.
        precision: What it computes in.
    """

    def __init__(
        self,
        model: SSCDModel,
        *,
        device: str | torch.device | None = None,
        backend: BackendName = "torch",
        precision: Precision = "float32",
    ) -> None:
        """Wrap a model; see ``from_pretrained`` for one with weights.

        Args:
            model: Used as it is, whatever mode it is in; a copy of it runs. Weights may change
                later, by training or loading: the next ``encode`` sees them.
            device: ``cpu``, ``cuda``, …; by default a GPU where there is one (torch), else the CPU.
            backend: ``torch``, ``openvino`` or ``onnx``.
            precision: ``float32`` or, where it is safe, ``bfloat16``.

        Raises:
            ValueError: The combination of device, backend and precision does not exist.
            ImportError: The backend is not installed.
            Bfloat16Error: bfloat16 does not work on this machine.
        """
        self.model = model
        self.backend: BackendName = backend
        self.precision: Precision = precision
        self.device = torch.device(device) if device is not None else _default_device(backend)
        check_backend(backend, self.device, precision)
        self._opened: dict[tuple[BackendName, Precision], tuple[object, Backend]] = {}
        self._fingerprint: tuple[object, str] | None = None
        self._decoders: Decoders | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the opened network out: each copy opens its own, also in another process."""
        return {**self.__dict__, "_opened": {}, "_decoders": None}

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        base_url: str | None = None,
        size: int | None = None,
        size_mode: SizeMode | None = None,
        backend: BackendName = "torch",
        precision: Precision = "float32",
    ) -> "Encoder":
        """Load a model by name or from a file or folder.

        Args:
            name_or_path: A released or shipped name, a folder of ``save_pretrained``, or any file
                the released code writes. None takes the model shipped with the package.
            device: See ``Encoder``.
            cache_dir: Where downloads are kept.
            local_files_only: Never use the network.
            base_url: Where released files come from, if not from their authors.
            size: Side in pixels, instead of the model's own.
            size_mode: ``short``, ``square`` or ``long``, instead of the model's own.
            backend: See ``Encoder``.
            precision: See ``Encoder``.
        """
        path = models.resolve(
            name_or_path,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            base_url=base_url,
            validate=checkpoint.validate_release,
        )
        asked: dict[str, Any] = {"size": size, "size_mode": size_mode}
        changes = {name: value for name, value in asked.items() if value is not None}
        model = checkpoint.read_model(path, **changes)
        return cls(model, device=device, backend=backend, precision=precision)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``config.json`` and ``model.safetensors`` into ``folder``."""
        checkpoint.write_pretrained(folder, self.config, self.model.state_dict())

    def export_onnx(self, path: str | os.PathLike[str]) -> None:
        """Write the network as ONNX: normalized ``images`` ``(n, 3, h, w)`` to ``descriptors``.

        Batch, height and width are free (a ViT keeps its size). Needs the extra ``onnx``.
        """
        from sscd_vec.encoder.backends.exported import export_onnx

        export_onnx(self.model, path)

    @property
    def config(self) -> EncoderConfig:
        """What the model is and how its input is made."""
        return self.model.config

    @property
    def dim(self) -> int:
        """Size of a descriptor."""
        return self.model.dim

    @property
    def fingerprint(self) -> str:
        """Identifies the descriptors: changes with weights, preprocessing and precision only."""
        version = self._version()
        if self._fingerprint is None or self._fingerprint[0] != version:
            state = self.model.state_dict()
            self._fingerprint = version, fingerprint(self.config, state, self.precision)
        return self._fingerprint[1]

    @overload
    def encode(
        self, inputs: Inputs, *, batch_size: int = ..., num_workers: int | None = ...,
        show_progress: bool | None = ..., on_error: Literal["raise"] = ...,
        convert_to_tensor: Literal[False] = ..., decode: Decode = ..., isolate: bool = ...,
        scale: float = ...,
        device: str | torch.device | None = ...,
    ) -> NDArray[np.float32]: ...  # fmt: skip

    @overload
    def encode(
        self, inputs: Inputs, *, batch_size: int = ..., num_workers: int | None = ...,
        show_progress: bool | None = ..., on_error: Literal["raise"] = ...,
        convert_to_tensor: Literal[True], decode: Decode = ..., isolate: bool = ...,
        scale: float = ...,
        device: str | torch.device | None = ...,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def encode(
        self, inputs: Inputs, *, batch_size: int = ..., num_workers: int | None = ...,
        show_progress: bool | None = ..., on_error: Literal["skip"],
        convert_to_tensor: Literal[False] = ..., decode: Decode = ..., isolate: bool = ...,
        scale: float = ...,
        device: str | torch.device | None = ...,
    ) -> Encoded: ...  # fmt: skip

    def encode(
        self,
        inputs: Inputs,
        *,
        batch_size: int = 32,
        num_workers: int | None = None,
        show_progress: bool | None = None,
        on_error: OnError = "raise",
        convert_to_tensor: bool = False,
        decode: Decode = "fast",
        isolate: bool = False,
        scale: float = 1.0,
        device: str | torch.device | None = None,
    ) -> NDArray[np.float32] | Tensor | Encoded:
        """Describe images.

        Args:
            inputs: An image, an iterable of images, or a folder, tar or list of files, which stand
                for their images as ``sscd_vec.files.find_images`` finds them. An image is a path,
                an ``ImageFile``, encoded bytes, a binary file, a PIL image, an array
                ``(h, w[, 1 | 3 | 4])`` or a tensor ``([1 | 3 | 4,] h, w)``; see ``load_pixels``.
            batch_size: Images of one shape that go through the network together, at most.
            num_workers: Decoding threads; by default one per core, 0 for none.
            show_progress: Whether to draw a progress bar; by default on a terminal and in a
                notebook.
            on_error: ``raise`` stops at the first input that is not a usable image. ``skip`` goes
                on and returns an ``Encoded``: the rows, which inputs they belong to, and what was
                skipped.
            convert_to_tensor: Return a tensor on the encoder's device.
            decode: ``fast`` decodes large JPEG files at a fraction of their size, at least twice
                what the model needs; ``exact`` decodes every pixel.
            isolate: Decode files in child processes that are killed after 30 seconds or beyond 1
                GiB, for images that strangers send; see ``sscd_vec.encoder.isolation``.
            scale: Resize to this many times the model's own size. A query at 2 finds copies that
                fill only a part of it, at four times the cost; see ``sscd_vec.bank.views``.
            device: Where to run, this time.

        Returns:
            float32 ``(n, dim)`` of unit length, one row per input, in input order, even for a
            single image; with ``on_error="skip"`` an ``Encoded``.

        Raises:
            ImageError: An input is not a usable image, and ``on_error`` is ``raise``.
        """
        if convert_to_tensor and on_error == "skip":
            raise ValueError(
                "on_error='skip' returns arrays: use torch.from_numpy(result.descriptors)"
            )
        items, total = images_of(inputs)
        # Where the number is certain the rows fill one array; others are joined at the end.
        certain = isinstance(items, Sequence | np.ndarray | Tensor) and on_error == "raise"
        rows = np.empty((total or 0, self.dim), np.float32) if certain else None
        parts: list[Encoded] = []
        workers = 0 if total == 1 and num_workers is None else num_workers
        options = Options(
            batch_size, workers, min(_CHUNK, batch_size), on_error, decode, isolate, scale
        )
        stream = self._stream(items, options, device)
        if total != 1 and show_progress is not False:
            stream = pipeline.watched(stream, total, show_progress)
        for part in stream:
            if rows is None:
                parts.append(part)
            else:
                rows[part.positions] = part.descriptors
        if on_error == "skip":
            return pipeline.concatenate(parts, self.dim)
        descriptors = pipeline.concatenate(parts, self.dim).descriptors if rows is None else rows
        if convert_to_tensor:
            return torch.from_numpy(descriptors).to(device or self.device)
        return descriptors

    def encode_stream(
        self,
        inputs: Inputs,
        *,
        batch_size: int = 32,
        num_workers: int | None = None,
        on_error: OnError = "raise",
        decode: Decode = "fast",
        isolate: bool = False,
        scale: float = 1.0,
        device: str | torch.device | None = None,
        chunk_size: int = _CHUNK,
    ) -> Iterator[Encoded]:
        """Describe images in parts, in input order, in memory that does not grow with them.

        Args:
            inputs: See ``encode``; pulled as needed, a few batches ahead.
            batch_size: See ``encode``.
            num_workers: See ``encode``.
            on_error: See ``encode``.
            decode: See ``encode``.
            isolate: See ``encode``.
            scale: See ``encode``.
            device: See ``encode``.
            chunk_size: Inputs per part.

        Yields:
            The next ``chunk_size`` inputs' descriptors, with their positions and what was skipped.
        """
        options = Options(batch_size, num_workers, chunk_size, on_error, decode, isolate, scale)
        return self._stream(images_of(inputs)[0], options, device)

    def encode_query(self, inputs: Inputs, **options: Any) -> NDArray[np.float32]:  # noqa: ANN401
        """Describe images to search for; ``options`` are those of ``encode``.

        An image has one descriptor. What tells queries from references is the ``Normalizer``.
        """
        return cast(NDArray[np.float32], self.encode(inputs, **options))

    def encode_document(self, inputs: Inputs, **options: Any) -> NDArray[np.float32]:  # noqa: ANN401
        """Describe images to be found; ``options`` are those of ``encode``."""
        return cast(NDArray[np.float32], self.encode(inputs, **options))

    def __call__(self, inputs: Inputs) -> list[NDArray[np.float32]]:
        """Describe images as ``pymilvus.model`` has it: a list of vectors."""
        return list(self.encode(inputs))

    encode_queries = encode_documents = __call__

    def heatmap(self, image: ImageInput, other: ImageInput) -> NDArray[np.float32]:
        """Show which part of ``image`` matches ``other``.

        Args:
            image: The image to explain.
            other: The image it is compared with, as a whole.

        Returns:
            Cosine similarity of every place of ``image`` to the descriptor of ``other``: float32
            ``(height, width)``, one value per pixel of ``image`` as it stands upright.
        """
        from sscd_vec.encoder.heatmap import match_heatmap

        # Whatever runs the encoder: torch alone gives the map before pooling.
        backend = cast("TorchBackend", self._open("torch", "float32", self.device))
        return match_heatmap(backend.model, load_pixels(image), load_pixels(other), self.device)

    def _stream(
        self, items: Iterable[ImageInput], options: Options, device: str | torch.device | None
    ) -> Iterator[Encoded]:
        where = self.device if device is None else torch.device(device)
        config = self.config
        if options.scale != 1:
            config = config.replace(size=max(1, round(options.scale * config.size)))
        load = self._isolated().load_pixels if options.isolate else load_pixels
        return pipeline.describe(
            items,
            self._open(self.backend, self.precision, where),
            partial(prepare, config=config, exact=options.decode == "exact", load=load),
            self.dim,
            options,
        )

    def _open(self, name: BackendName, precision: Precision, device: torch.device) -> Backend:
        """What runs the network with the current weights; kept until they change."""
        version = (self._version(), device)
        kept = self._opened.get((name, precision))
        if kept is None or kept[0] != version:
            kept = version, open_backend(name, self.model, device, precision)
            self._opened[name, precision] = kept
        return kept[1]

    def _isolated(self) -> "Decoders":
        """The processes that decode for this encoder, one per core; they end with it."""
        from sscd_vec.encoder.isolation import Decoders

        if self._decoders is None:
            self._decoders = Decoders(pipeline.cores())
        return self._decoders

    def _version(self) -> tuple[tuple[int, int], ...]:
        """Tells whether weights were written to or replaced since the last time."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return tuple((tensor.data_ptr(), tensor._version) for tensor in tensors)


def _default_device(backend: BackendName) -> torch.device:
    return torch.device("cuda" if backend == "torch" and torch.cuda.is_available() else "cpu")
