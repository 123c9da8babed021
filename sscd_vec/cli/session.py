"""The encoder and the normalizer a command works with."""

import importlib
from typing import TYPE_CHECKING

from sscd_vec import models
from sscd_vec.cli.console import Failure, say, warn

if TYPE_CHECKING:
    from sscd_vec.encoder import Encoder
    from sscd_vec.normalize import Kind, Normalizer
    from sscd_vec.photos.descriptor_cache import DescriptorCache


def open_encoder(model: str | None, device: str | None = None) -> "Encoder":
    """Load the model of that name, folder or file, or the shipped one.

    Raises:
        Failure: There is none; says what to do.
    """
    from sscd_vec.encoder import Encoder

    _read_heic()
    say(f"loading model {model or '(shipped)'} …")
    try:
        if model is None:
            return Encoder.from_pretrained(device=device)
        return Encoder.from_pretrained(model, device=device)
    except FileNotFoundError as error:
        raise Failure(
            f"no model to work with: {error}\nPass one with --model NAME|FOLDER|FILE."
        ) from error


def _read_heic() -> None:
    """Let Pillow read a phone's HEIC photos, where ``pillow-heif`` is installed."""
    try:
        plugin = importlib.import_module("pillow_heif")
    except ImportError:
        return
    plugin.register_heif_opener()


def model_name(model: str | None) -> str:
    """A name that finds the same model again: paths become absolute, the shipped one its name."""
    return models.stable_name(model)


def open_normalizer(path: str | None, model: str | None, encoder: "Encoder") -> "Normalizer":
    """Load the given normalizer, or the one that lies with the model, or none at all.

    Without any, descriptors are compared as they are: scores are cosines and no threshold is
    known.
    """
    from sscd_vec.normalize import Normalizer

    if path is None:
        place = models.resolve(model, local_files_only=True)
        beside = (place if place.is_dir() else place.parent) / models.NORMALIZER_FILE
        if beside.is_file():
            path = str(beside)
    if path is None:
        warn(
            "no normalizer with this model: scores are plain cosines and no threshold is "
            "calibrated. Fit one on your own images with `sscd-vec normalize fit`."
        )
        return Normalizer.identity(encoder.dim)
    normalizer = Normalizer.load(path)
    normalizer.check_encoder(encoder)
    return normalizer


def threshold_for(normalizer: "Normalizer", kind: "Kind", given: float | None) -> float | None:
    """The score of a copy: what was given, else what was calibrated, else None."""
    if given is not None:
        return given
    return normalizer.thresholds[kind].value if kind in normalizer.thresholds else None


def need_threshold(normalizer: "Normalizer", kind: "Kind", given: float | None) -> float:
    """Like ``threshold_for``, where a command cannot do without.

    Raises:
        Failure: There is none; says what to do.
    """
    value = threshold_for(normalizer, kind, given)
    if value is None:
        raise Failure(
            f"no threshold is calibrated for {kind} scores; pass --threshold SCORE, or calibrate "
            f"with `sscd-vec calibrate --kind {kind}`"
        )
    return value


def open_cache(encoder: "Encoder", tiles: int, wanted: bool) -> "DescriptorCache":
    """The descriptors already known of this encoder, or a passing store in memory."""
    from sscd_vec.photos.descriptor_cache import DescriptorCache

    if not wanted:
        return DescriptorCache(None)
    suffix = "" if tiles == 1 else f"-tiles{tiles}"
    return DescriptorCache(
        models.cache_folder() / "descriptors" / f"{encoder.fingerprint}{suffix}.sqlite"
    )
