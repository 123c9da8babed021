"""The paper's four augmentation sets, and the random choices one batch of views makes.

A ``Recipe`` says how likely and how strong each edit is. ``draw`` turns it into ``Choices``: plain
arrays, one row per view, from a generator keyed by ``(seed, step)``. Applying them
(``augment.py``) is deterministic, so a resumed run, another number of ranks or another chunk size
sees the same images.

========== ==================================================================================
simclr      random resized crop, flip, colour jitter, grayscale, Gaussian blur
strong_blur the same with sigma in [1, 5]
advanced    + quarter turn, text, emoji, free rotation before the crop; JPEG after the blur
+ mixup     + mixup and cutmix with another view of the batch
========== ==================================================================================

``crop`` below 1, ``untouched``, ``canvas``, ``scribble``, ``filter``, ``noise``, ``pixelize`` and
``paste`` are not in the paper's sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sscd_vec.trainer.config import AugmentationSet
from sscd_vec.trainer.filters import FILTERS

CROP_TRIES = 10
BLUR_SIZE = 224  # blur sigmas are pixels at this image size, and scale with the training size

WHOLE = ("pixelize_cells", "jpeg_quality")  # settings in whole numbers

NO_MIX, MIXUP, CUTMIX, PASTE = range(4)

# What is no part of 1.
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
}


@dataclass(frozen=True)
class Recipe:
    """Probabilities and strengths, per view. Ranges are uniform.

    Attributes:
        untouched: Probability that the first view of an image is the image itself, as references
            are in a search; all else below then concerns the second view only.
        crop: Probability of a random resized crop; other views show the whole image.
        crop_area: Part of the image a crop keeps.
        crop_ratio: Width / height of a crop, log-uniform.
        canvas: Probability of a plain ground around the view, and in the corners of a rotation.
        canvas_zoom: How much wider and higher the ground is than the view.
        flip: Probability of a horizontal flip.
        jitter: Probability of the colour jitter.
        brightness: Factor in ``1 -+ brightness``; ``contrast`` and ``saturation`` likewise.
        contrast: See ``brightness``.
        saturation: See ``brightness``.
        hue: Shift in ``-+ hue`` turns of the colour circle.
        grayscale: Probability of grayscale.
        filter: Probability of one of ``filters.py``.
        blur: Probability of a Gaussian blur.
        blur_sigma: Its sigma in pixels at 224, scaled with the training size.
        quarter_turn: Probability of a rotation by 90, 180 or 270 degrees.
        rotation: Probability of a rotation by any angle.
        text: Probability of a text overlay.
        text_size: Its height as a part of the short side.
        text_opacity: Its opacity.
        emoji: Probability of an emoji overlay.
        emoji_size: Its height as a part of the short side.
        emoji_opacity: Its opacity.
        scribble: Probability of thick lines over the view.
        noise: Probability of noise: Gaussian, or as often salt and pepper.
        noise_sigma: Its standard deviation, where white is 1; salt and pepper hit half that share
            of the pixels.
        pixelize: Probability of squares of one colour each.
        pixelize_cells: How many along a side.
        jpeg: Probability of JPEG compression.
        jpeg_quality: Its quality.
        mixup: Probability of mixup.
        cutmix: Probability of cutmix.
        paste: Probability that another view, whole but smaller, is pasted into this one before its
            colours, text and all that follows is edited; it teaches copies that are a small part
            of a picture.
        mix_alpha: gamma ~ Beta(alpha, alpha), the part kept of the view itself.
    """

    untouched: float = 0.0
    crop: float = 1.0
    crop_area: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    canvas: float = 0.0
    canvas_zoom: tuple[float, float] = (1.0, 1.8)
    flip: float = 0.5
    jitter: float = 0.8
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

    def __post_init__(self) -> None:
        """Refuse a probability or a range that cannot be drawn from, naming it."""
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            low, high = LIMITS.get(name, (0.0, 1.0))
            is_range = isinstance(setting.default, tuple)
            ends = value if is_range and isinstance(value, tuple) else (value,)
            kinds = int if name in WHOLE else int | float
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

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """What was drawn for n views: one row each; off is 0, or -1 where 0 means something.

    Attributes:
        flip: (n,) 0 or 1.
        quarters: (n,) quarter turns, 0 to 3.
        angle: (n,) radians, counter-clockwise.
        whole: (n,) 1 shows the whole image, whatever crop was drawn.
        crop_area: (n, tries) candidate areas.
        crop_ratio: (n, tries) candidate width / height.
        crop_place: (n, 2) where in the room left, 0 to 1.
        colour: (n, 4) brightness, contrast, saturation factors and hue turns; 1, 1, 1, 0 is off.
        colour_order: (n, 4) the order in which these four apply.
        grayscale: (n,) 0 or 1.
        blur_sigma: (n,) pixels at 224; 0 is off.
        text: (n,) seed of font, string and colour; -1 is off.
        emoji: (n,) seed of the picture; -1 is off.
        overlay: (n, 2, 4) for text and emoji: size, opacity, place x and y from 0 to 1.
        noise_sigma: (n,) 0 is off.
        noise: (n,) its seed.
        cells: (n,) squares of one colour along a side; 0 is off.
        jpeg: (n,) quality; -1 is off.
        mix: (n,) ``NO_MIX``, ``MIXUP``, ``CUTMIX`` or ``PASTE``.
        gamma: (n,) part kept of the view itself.
        partner: (n,) the other view, a row of these choices.
        cut_place: (n, 2) where cutmix and paste put the other view, 0 to 1.
        zoom: (n, 2) width and height of the canvas over those of the view; 0 is off.
        canvas_place: (n, 2) where on the canvas the view lies, 0 to 1.
        ground: (n, 3) colour of the canvas.
        filter: (n,) a row of ``FILTERS``; -1 is off.
        filter_strength: (n,) 0 to 1.
        scribble: (n,) seed of the lines; -1 is off.
    """

    flip: Ints
    quarters: Ints
    angle: Floats
    whole: Ints
    crop_area: Floats
    crop_ratio: Floats
    crop_place: Floats
    colour: Floats
    colour_order: Ints
    grayscale: Ints
    blur_sigma: Floats
    text: Ints
    emoji: Ints
    overlay: Floats
    noise_sigma: Floats
    noise: Ints
    cells: Ints
    jpeg: Ints
    mix: Ints
    gamma: Floats
    partner: Ints
    cut_place: Floats
    zoom: Floats
    canvas_place: Floats
    ground: Floats
    filter: Ints
    filter_strength: Floats
    scribble: Ints

    def __len__(self) -> int:
        """How many views."""
        return len(self.flip)

    def take(self, rows: Ints) -> "Choices":
        """The choices of some views."""
        return Choices(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def with_rows(self, rows: npt.NDArray[np.bool_], others: "Choices") -> "Choices":
        """The same choices, but some views' taken from ``others``."""

        def chosen(name: str) -> npt.NDArray[Any]:
            ours, theirs = getattr(self, name), getattr(others, name)
            picked: npt.NDArray[Any] = np.where(
                rows.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours
            )
            return picked

        return Choices(**{f.name: chosen(f.name) for f in fields(self)})


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step of one run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))


def draw_pairs(recipe: Recipe, count: int, random: np.random.Generator) -> Choices:
    """Choose the edits of two views of ``count`` images, first views first."""
    choices = draw(recipe, 2 * count, random)
    untouched = (random.random(2 * count) < recipe.untouched) & (np.arange(2 * count) < count)
    return choices.with_rows(untouched, draw(NOTHING, 2 * count, random))


def draw(recipe: Recipe, count: int, random: np.random.Generator) -> Choices:
    """Choose the edits of ``count`` views.

    Every number is drawn whether it is used or not, so that one probability can change without
    changing the other choices.
    """

    def happens(probability: float) -> npt.NDArray[np.bool_]:
        return random.random(count) < probability

    def between(low: float, high: float, *shape: int) -> Floats:
        return random.uniform(low, high, (count, *shape)).astype(np.float32)

    def factor(strength: float) -> Floats:
        return between(max(0.0, 1 - strength), 1 + strength)

    def seeds() -> Ints:
        return random.integers(0, 2**31, count)

    ratio_low, ratio_high = np.log(recipe.crop_ratio)
    jittered = happens(recipe.jitter)[:, None]
    colour = np.stack(
        [
            factor(recipe.brightness),
            factor(recipe.contrast),
            factor(recipe.saturation),
            between(-recipe.hue, recipe.hue),
        ],
        axis=1,
    )
    mixed = random.random(count)
    return Choices(
        flip=happens(recipe.flip).astype(np.int64),
        quarters=np.where(happens(recipe.quarter_turn), random.integers(1, 4, count), 0),
        angle=np.where(happens(recipe.rotation), between(0, 2 * np.pi), np.float32(0)),
        crop_area=between(*recipe.crop_area, CROP_TRIES),
        crop_ratio=np.exp(between(ratio_low, ratio_high, CROP_TRIES)),
        crop_place=between(0, 1, 2),
        colour=np.where(jittered, colour, np.array([1, 1, 1, 0], dtype=np.float32)),
        colour_order=np.argsort(random.random((count, 4)), axis=1),
        grayscale=happens(recipe.grayscale).astype(np.int64),
        blur_sigma=np.where(happens(recipe.blur), between(*recipe.blur_sigma), np.float32(0)),
        text=np.where(happens(recipe.text), seeds(), -1),
        emoji=np.where(happens(recipe.emoji), seeds(), -1),
        overlay=np.stack(
            [
                np.stack([between(*size), between(*opacity), between(0, 1), between(0, 1)], axis=1)
                for size, opacity in (
                    (recipe.text_size, recipe.text_opacity),
                    (recipe.emoji_size, recipe.emoji_opacity),
                )
            ],
            axis=1,
        ),
        jpeg=np.where(
            happens(recipe.jpeg),
            random.integers(recipe.jpeg_quality[0], recipe.jpeg_quality[1] + 1, count),
            -1,
        ),
        mix=np.select(
            [mixed < edge for edge in np.cumsum([recipe.mixup, recipe.cutmix, recipe.paste])],
            [MIXUP, CUTMIX, PASTE],
            NO_MIX,
        ),
        gamma=random.beta(recipe.mix_alpha, recipe.mix_alpha, count).astype(np.float32),
        partner=(np.arange(count) + random.integers(1, max(count, 2), count)) % count,
        cut_place=between(0, 1, 2),
        whole=(~happens(recipe.crop)).astype(np.int64),
        noise_sigma=np.where(happens(recipe.noise), between(*recipe.noise_sigma), np.float32(0)),
        noise=seeds(),
        cells=np.where(
            happens(recipe.pixelize),
            random.integers(recipe.pixelize_cells[0], recipe.pixelize_cells[1] + 1, count),
            0,
        ),
        zoom=np.where(happens(recipe.canvas)[:, None], _zooms(recipe, count, random), 0),
        canvas_place=between(0, 1, 2),
        ground=_grounds(count, random),
        filter=np.where(happens(recipe.filter), random.integers(0, len(FILTERS), count), -1),
        filter_strength=between(0, 1),
        scribble=np.where(happens(recipe.scribble), seeds(), -1),
    )


def _zooms(recipe: Recipe, count: int, random: np.random.Generator) -> Floats:
    """Frames on all sides, or bands: half of the canvases are larger in one direction only."""
    zoom = random.uniform(*recipe.canvas_zoom, (count, 2))
    band = random.integers(0, 4, count)  # 0 and 1 keep that side, the others none
    zoom[np.arange(2) == band[:, None]] = 1.0
    return zoom.astype(np.float32)


def _grounds(count: int, random: np.random.Generator) -> Floats:
    """Black, white or any colour, each a third of the time."""
    kind = random.integers(0, 3, (count, 1))
    colour = random.random((count, 3))
    return np.where(kind == 2, colour, kind).astype(np.float32)
