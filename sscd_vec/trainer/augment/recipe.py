"""Recipe: how likely and how strong each edit is. The paper's four sets are four recipes.

============== =============================================================================
simclr         random resized crop, flip, colour jitter, grayscale, Gaussian blur
strong_blur    the same with sigma in [1, 5]
advanced       + quarter turn, text, emoji, free rotation before the crop; JPEG after the blur
advanced+mixup + mixup and cutmix with another view of the batch
============== =============================================================================

The paper's sets leave ``untouched``, ``canvas``, ``scribble``, ``filter``, ``noise``, ``pixelize``,
``paste``, ``compose``, ``distort`` and ``drawn`` off, and crop every view.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sscd_vec.trainer.config import AugmentationSet

# Ranges of settings that are not fractions.
LIMITS = {
    "crop_area": (1e-4, 1.0),
    "crop_ratio": (1e-2, 1e2),
    "canvas_zoom": (1.0, 10.0),
    "brightness": (0.0, 10.0),
    "contrast": (0.0, 10.0),
    "saturation": (0.0, 10.0),
    "blur_sigma": (0.0, 100.0),
    "pixelize_cells": (1.0, 10_000.0),
    "jpeg_quality": (0.0, 100.0),
    "mix_alpha": (1e-3, 1e3),
    "most_edits": (0.0, 100.0),
}
INTEGERS = ("pixelize_cells", "jpeg_quality", "most_edits")


@dataclass(frozen=True)
class Recipe:
    """Probabilities and strengths, per view. Ranges are uniform.

    Attributes:
        untouched: Probability that the first view of an image is the image itself, as references
            are in a search; everything below then applies to the second view only.
        crop: Probability of a random resized crop; other views show the whole image.
        crop_area: Fraction of the image that a crop keeps.
        crop_ratio: Width / height of a crop, log-uniform.
        canvas: Probability of a plain background around the view and in the corners of a rotation.
        canvas_zoom: Width and height of the canvas relative to the view.
        flip: Probability of a horizontal flip.
        jitter: Probability of the colour jitter.
        exact_jitter: Fraction of views whose jitter is torchvision's own, clamped after each
            operation and with hue in HSV. The others get one colour matrix, which is faster.
        brightness: Factor in ``1 -+ brightness``; ``contrast`` and ``saturation`` likewise.
        contrast: See ``brightness``.
        saturation: See ``brightness``.
        hue: Shift in ``-+ hue`` turns of the colour circle.
        grayscale: Probability of grayscale.
        filter: Probability of one of ``colour.FILTERS``.
        blur: Probability of a Gaussian blur.
        blur_sigma: Its sigma in pixels at 224; it scales with the training size.
        quarter_turn: Probability of a rotation by 90, 180 or 270 degrees.
        rotation: Probability of a rotation by any angle.
        text: Probability of a text overlay.
        text_size: Its height as a fraction of the short side.
        text_opacity: Its opacity.
        emoji: Probability of an emoji overlay.
        emoji_size: Its height as a fraction of the short side.
        emoji_opacity: Its opacity.
        scribble: Probability of thick lines over the view.
        noise: Probability of noise: Gaussian, or as often salt and pepper.
        noise_sigma: Its standard deviation, where white is 1; salt and pepper hit half that
            fraction of the pixels.
        pixelize: Probability of turning the view into large squares of one colour each.
        pixelize_cells: Number of squares along a side.
        jpeg: Probability of JPEG compression.
        jpeg_quality: Its quality.
        mixup: Probability of mixup.
        cutmix: Probability of cutmix.
        paste: Probability of pasting another view, whole but smaller, into this one before colour,
            text and later edits. It teaches copies that fill a small part of an image.
        mix_alpha: gamma ~ Beta(alpha, alpha), the fraction kept of the view itself.
        compose: Probability that a view that is not mixed becomes part of something larger
            (``compose.py``): a collage, another image as background, a drawn interface.
        distort: Probability of each of two further edits (``distort.py``).
        drawn: Fraction of a batch that is drawn (``drawn.py``) instead of read.
        most_edits: Edits that a view keeps of those it drew, a flip not counted; a composed or
            mixed view counts as two. Nobody recognizes what had five; 0 keeps all.
    """

    untouched: float = 0.0
    crop: float = 1.0
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    canvas: float = 0.0
    canvas_zoom: tuple[float, float] = (1.0, 1.8)
    flip: float = 0.5
    jitter: float = 0.8
    exact_jitter: float = 0.0
    brightness: float = 0.8
    contrast: float = 0.8
    saturation: float = 0.8
    hue: float = 0.2
    grayscale: float = 0.2
    filter: float = 0.0
    blur: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    quarter_turn: float = 0.0
    rotation: float = 0.0
    text: float = 0.0
    text_size: tuple[float, float] = (0.1, 0.3)
    text_opacity: tuple[float, float] = (0.1, 1.0)
    emoji: float = 0.0
    emoji_size: tuple[float, float] = (0.1, 0.5)
    emoji_opacity: tuple[float, float] = (0.7, 1.0)
    scribble: float = 0.0
    noise: float = 0.0
    noise_sigma: tuple[float, float] = (0.05, 0.4)
    pixelize: float = 0.0
    pixelize_cells: tuple[int, int] = (12, 64)
    jpeg: float = 0.0
    jpeg_quality: tuple[int, int] = (0, 100)
    mixup: float = 0.0
    cutmix: float = 0.0
    paste: float = 0.0
    mix_alpha: float = 2.0
    compose: float = 0.0
    distort: float = 0.0
    drawn: float = 0.0
    most_edits: int = 0

    def __post_init__(self) -> None:
        """Refuse a probability or range that cannot be drawn from, by name."""
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            low, high = LIMITS.get(name, (0.0, 1.0))
            is_range = isinstance(setting.default, tuple)
            ends = value if is_range and isinstance(value, tuple) else (value,)
            kinds = int if name in INTEGERS else int | float
            numbers = all(isinstance(end, kinds) and low <= end <= high for end in ends)
            if not numbers or len(ends) != 1 + is_range or ends[0] > ends[-1]:
                what = "two numbers, the smaller first," if is_range else "a number"
                raise ValueError(
                    f"recipe.{name}={value!r}: expected {what} between {low:g} and {high:g}"
                )
        mixed = self.mixup + self.cutmix + self.paste
        if mixed > 1:
            raise ValueError(
                f"recipe: mixup + cutmix + paste = {mixed:g}, but a view is mixed once: expected "
                "at most 1"
            )

    def with_changes(self, changes: Mapping[str, Any]) -> "Recipe":
        """A copy with some fields changed; lists become tuples, unknown names are refused."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"unknown recipe field {unknown}: expected among {sorted(known)}")
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in changes.items()
        }
        return replace(self, **plain)


SIMCLR = Recipe()
STRONG_BLUR = replace(SIMCLR, blur_sigma=(1.0, 5.0))
ADVANCED = replace(STRONG_BLUR, quarter_turn=0.05, rotation=0.05, text=0.1, emoji=0.2, jpeg=0.2)
ADVANCED_MIXUP = replace(ADVANCED, mixup=0.025, cutmix=0.025)

NOTHING = Recipe(crop=0.0, flip=0.0, jitter=0.0, grayscale=0.0, blur=0.0)

RECIPES: dict[AugmentationSet, Recipe] = {
    "simclr": SIMCLR,
    "strong_blur": STRONG_BLUR,
    "advanced": ADVANCED,
    "advanced+mixup": ADVANCED_MIXUP,
}
