"""The model a benchmark of the commands runs on, as the folder ``--model`` takes.

The shipped model by default. Where there is none, or for ``imagenet:TRUNK``, an ImageNet trunk
stands in; a model without a normalizer gets one, fitted and calibrated on the photos at hand.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from photos import Photo
from sscd_vec import Encoder, Normalizer, models
from sscd_vec.encoder import EncoderConfig
from sscd_vec.encoder.imagenet import imagenet_model
from sscd_vec.normalize import Kind

STAND_IN = "imagenet:efficientnet_lite0"
SIZE = 160  # of an ImageNet trunk, square
NORMALIZER = "normalizer.safetensors"
LEAST_PHOTOS = 300  # to fit a normalizer on two thirds of them and calibrate it on the rest
RATE = 1e-5  # false matches per comparison
KINDS: tuple[Kind, ...] = ("search", "symmetric")


def default_model() -> str:
    """The shipped model if there is one, the ImageNet stand-in otherwise."""
    return models.shipped()[0] if models.shipped() else STAND_IN


def label(name: str | None) -> str:
    """A model's name without the place it lies at."""
    name = name or default_model()
    return Path(name).name if Path(name).exists() else name


def open_encoder(name: str | None) -> Encoder:
    """The encoder of a name, folder or file, of ``imagenet:TRUNK``, or the default one."""
    name = name or default_model()
    if not name.startswith("imagenet:"):
        return Encoder.from_pretrained(name)
    trunk = name.removeprefix("imagenet:")
    config = EncoderConfig(trunk=trunk, features="trunk", size=SIZE, size_mode="square")
    return Encoder(imagenet_model(config))


def model_folder(name: str | None, photos: Sequence[Photo], folder: Path) -> Path:
    """A model folder with a calibrated normalizer.

    Args:
        name: As for ``open_encoder``.
        photos: Photos that the benchmark itself does not use; the normalizer is fitted on them
            where the model has none.
        folder: Where to put it then.
    """
    if not (name or default_model()).startswith("imagenet:"):
        place = models.resolve(name or default_model())
        if (place / NORMALIZER).is_file():
            return place
    encoder = open_encoder(name)
    encoder.save_pretrained(folder)
    fit_normalizer(encoder, photos).save(folder / NORMALIZER)
    return folder


def fit_normalizer(encoder: Encoder, photos: Sequence[Photo]) -> Normalizer:
    """Whitening, score normalization and thresholds from photos that are no copies.

    Raises:
        ValueError: There are too few photos.
    """
    if len(photos) < LEAST_PHOTOS:
        raise ValueError(
            f"expected at least {LEAST_PHOTOS} photos to fit a normalizer on, got {len(photos)}"
        )
    rows = describe(encoder, photos)
    background, held_out = np.split(rows, [2 * len(rows) // 3])
    trunk = encoder.config.features == "trunk"
    fitted = Normalizer.fit(background, eps="oas", l2_before=trunk, encoder=encoder)
    for kind in KINDS:
        fitted = fitted.calibrate(held_out, false_match_rate=RATE, per="comparison", kind=kind)
    return fitted


def describe(encoder: Encoder, photos: Sequence[Photo]) -> NDArray[np.float32]:
    """Descriptors of photos, a few decoded at a time."""
    parts = [
        encoder.encode([photo.image() for photo in photos[start : start + 64]], show_progress=False)
        for start in range(0, len(photos), 64)
    ]
    return np.concatenate(parts)
