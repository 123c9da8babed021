"""Callables on batches of columns, for any engine: Ray Data, Spark, Daft, ``datasets``.

Each class takes a batch (a mapping of columns, or a pandas ``DataFrame``), adds columns and returns
a batch of the same kind. None imports an engine. Only settings are pickled: a model or a bank is
opened once per process, when the first batch comes.

    ray.data.read_parquet("images/").map_batches(
        EncodeBatch, fn_constructor_kwargs={"column": "image"}, concurrency=8, batch_size=256
    )
    frame.mapInPandas(lambda parts: map(EncodeBatch(column="image"), parts), schema)  # Spark
    dataset.map(EncodeBatch(column="image"), batched=True)  # datasets
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sscd_vec.files import ImageFile, PathLike
from sscd_vec.normalize import Normalizer

if TYPE_CHECKING:
    from sscd_vec.bank import Bank, BankMatch
    from sscd_vec.bank.describe import ImageEncoder

Float32 = NDArray[np.float32]
Batch = Any  # a mapping of columns, or a DataFrame; what comes in goes out
NO_IMAGE = "there is no image in this row"


class _Callable:
    """Pickles its settings only."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what the first batch opened."""
        opened = {
            name for name, value in vars(type(self)).items() if isinstance(value, cached_property)
        }
        return {name: value for name, value in self.__dict__.items() if name not in opened}


class EncodeBatch(_Callable):
    """Images in, ``descriptor`` ``(n, d)`` and ``error`` out; the other columns are kept.

    An image that cannot be read has a row of NaN and says why in ``error``, which is '' otherwise.

    Args:
        model: Name, folder or file of a model, or an ``Encoder``; the shipped one by default.
        column: Which column holds the images: encoded bytes, paths, arrays, PIL images, or
            ``{"bytes": ..., "path": ...}`` as ``datasets`` keeps them.
        device: Where the model runs.
        keep_images: Return the images, too; paths are always returned.
    """

    def __init__(
        self,
        model: "PathLike | ImageEncoder | None" = None,
        *,
        column: str = "image",
        device: str | None = None,
        keep_images: bool = False,
    ) -> None:
        """Load nothing yet."""
        self._model, self._column, self._device = model, column, device
        self._keep_images = keep_images

    @cached_property
    def encoder(self) -> "ImageEncoder":
        """The model, loaded once per process."""
        from sscd_vec.encoder import Encoder

        if self._model is None or isinstance(self._model, str | os.PathLike):
            return Encoder.from_pretrained(self._model, device=self._device)
        return self._model

    def __call__(self, batch: Batch) -> Batch:
        """Encode one batch."""
        cells = list(column_of(batch, self._column))
        images = [as_image(cell) for cell in cells]
        dropped = [] if self._keep_images or _are_paths(images) else [self._column]
        descriptors, errors = self.encode(images)
        return with_columns(batch, {"descriptor": descriptors, "error": errors}, dropped)

    def encode(self, images: Sequence[Any]) -> tuple[Float32, list[str]]:
        """Descriptors ``(n, d)``, NaN where there is none, and why there is none, else ''."""
        from sscd_vec.bank.describe import encode_whole

        descriptors = np.full((len(images), self.encoder.dim), np.nan, np.float32)
        errors = [NO_IMAGE if image is None else "" for image in images]
        there = [row for row, image in enumerate(images) if image is not None]
        values = encode_whole(self.encoder, [images[row] for row in there]) if there else []
        for row, value in zip(there, values, strict=True):
            if isinstance(value, str):
                errors[row] = value
            else:
                descriptors[row] = value[0]
        return descriptors, errors


class _Vectors(_Callable, ABC):
    """Descriptors in, vectors of an index out; rows without a descriptor stay NaN."""

    def __init__(
        self,
        normalizer: PathLike | Normalizer | None = None,
        *,
        column: str = "descriptor",
        to: str = "vector",
    ) -> None:
        """Take a normalizer, or the name or file of one."""
        self._normalizer, self._column, self._to = normalizer, column, to

    @cached_property
    def normalizer(self) -> Normalizer:
        """The normalizer, read once per process."""
        given = self._normalizer
        return given if isinstance(given, Normalizer) else Normalizer.from_pretrained(_text(given))

    @abstractmethod
    def _transform(self, descriptors: Float32) -> Float32:
        """Vectors of descriptors."""

    def __call__(self, batch: Batch) -> Batch:
        """Transform one batch."""
        descriptors = matrix_of(batch, self._column)
        known = ~np.isnan(descriptors).any(1)
        vectors = np.full((len(descriptors), self.normalizer.lifted_dim), np.nan, np.float32)
        if known.any():
            vectors[known] = self._transform(descriptors[known])
        return with_columns(batch, {self._to: vectors})


class ReferenceVectors(_Vectors):
    """Descriptors to the vectors an index stores (``Normalizer.references``).

    Args:
        normalizer: A ``Normalizer``, or its name or file; the shipped one by default.
        column: Where the descriptors are.
        to: Where the vectors go.
    """

    def _transform(self, descriptors: Float32) -> Float32:
        return self.normalizer.references(descriptors)


class QueryVectors(_Vectors):
    """Descriptors to the vectors an index is asked with (``Normalizer.queries``).

    Args:
        normalizer: A ``Normalizer``, or its name or file; the shipped one by default.
        column: Where the descriptors are.
        to: Where the vectors go.
    """

    def _transform(self, descriptors: Float32) -> Float32:
        return self.normalizer.queries(descriptors)


class SearchBank(_Callable):
    """Descriptors in, the best match of each in a bank out.

    Adds ``match`` (an id, '' if there is none), ``score`` (NaN if there is none) and ``is_copy``;
    with ``k`` above 1 also ``matches`` and ``scores``, lists of up to ``k``, best first.

    Args:
        bank: Location of a bank, or a ``Bank``.
        column: Where the descriptors are.
        k: At most this many matches each.
        options: Of ``Bank``, such as ``threshold``, ``normalizer`` or ``token``.
    """

    def __init__(
        self,
        bank: "PathLike | Bank",
        *,
        column: str = "descriptor",
        k: int = 1,
        **options: Any,  # noqa: ANN401 - those of Bank
    ) -> None:
        """Open nothing yet."""
        if k < 1:
            raise ValueError(f"k: expected at least 1, got {k}")
        self._bank, self._column, self._k, self._options = bank, column, k, options

    @cached_property
    def bank(self) -> "Bank":
        """The bank, opened once per process to be read."""
        from sscd_vec.bank import Bank

        if isinstance(self._bank, Bank):
            return self._bank
        return Bank(self._bank, create=False, read_only=True, **self._options)

    def __call__(self, batch: Batch) -> Batch:
        """Search for one batch."""
        descriptors = matrix_of(batch, self._column)
        known = np.flatnonzero(~np.isnan(descriptors).any(1)).tolist()
        found: list[list[BankMatch]] = [[] for _ in descriptors]
        answers = self.bank.search_descriptors([descriptors[row][None] for row in known], self._k)
        for row, matches in zip(known, answers, strict=True):
            found[row] = matches
        added: dict[str, Any] = {
            "match": [matches[0].id if matches else "" for matches in found],
            "score": np.array([m[0].score if m else np.nan for m in found], np.float32),
            "is_copy": [bool(matches and matches[0].is_copy) for matches in found],
            "verdict": [matches[0].verdict if matches else "no" for matches in found],
        }
        if self._k > 1:
            added["matches"] = [[match.id for match in matches] for matches in found]
            added["scores"] = [[match.score for match in matches] for matches in found]
        return with_columns(batch, added)


# ---------------------------------------------------------------------- columns


def column_of(batch: Batch, name: str) -> Any:  # noqa: ANN401 - as the engine has it
    """A column of a batch.

    Raises:
        ValueError: It is not there; names those that are.
    """
    names = list(batch.keys() if isinstance(batch, Mapping) else getattr(batch, "columns", []))
    if name not in names:
        raise ValueError(f"expected a column {name!r}, got {names}; name it with column=")
    return batch[name]


def matrix_of(batch: Batch, name: str) -> Float32:
    """A column of descriptors as ``(n, d)`` float32; NaN where there is none."""
    cells = list(column_of(batch, name))
    rows = [None if cell is None else np.asarray(cell, np.float32) for cell in cells]
    sizes = {row.shape for row in rows if row is not None and row.ndim}
    if len(sizes) > 1 or any(len(size) != 1 for size in sizes):
        raise ValueError(f"{name}: expected descriptors of one size, got shapes {sorted(sizes)}")
    dim = sizes.pop()[0] if sizes else 0
    matrix = np.full((len(rows), dim), np.nan, np.float32)
    for number, row in enumerate(rows):
        if row is not None and row.ndim:
            matrix[number] = row
    return matrix


def with_columns(batch: Batch, added: Mapping[str, Any], dropped: Sequence[str] = ()) -> Batch:
    """The batch with columns added and dropped, as a mapping or ``DataFrame`` like it was."""
    if not isinstance(batch, Mapping):
        kept = batch.drop(columns=list(dropped))
        return kept.assign(**{name: list(values) for name, values in added.items()})
    columns = {name: values for name, values in batch.items() if name not in dropped}
    return columns | {name: _array(values) for name, values in added.items()}


def _array(values: Any) -> NDArray[Any]:  # noqa: ANN401
    """A column that every engine takes: rows that are lists stay lists."""
    if isinstance(values, list) and values and isinstance(values[0], list):
        column = np.empty(len(values), object)
        column[:] = values
        return column
    return np.asarray(values, object) if _are_texts(values) else np.asarray(values)


def _are_texts(values: Any) -> bool:  # noqa: ANN401
    return isinstance(values, list) and bool(values) and isinstance(values[0], str)


def as_image(cell: Any) -> Any:  # noqa: ANN401 - whatever an engine keeps images as
    """What ``Encoder.encode`` takes for the cell of an image column; None if it is empty."""
    if isinstance(cell, Mapping):
        cell = cell.get("bytes") or cell.get("path")
    if isinstance(cell, float) and np.isnan(cell):  # pandas' way to say null
        return None
    return None if cell is None or (isinstance(cell, bytes | str) and not cell) else cell


def _are_paths(images: Sequence[Any]) -> bool:
    return all(isinstance(image, str | ImageFile | None) for image in images)


def _text(path: PathLike | None) -> str | None:
    return None if path is None else str(path)
