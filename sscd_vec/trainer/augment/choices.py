"""Choices: the edits drawn for the views of one batch, one row per view.

``draw`` turns a ``Recipe`` into plain arrays with a generator keyed by ``(seed, step)``. Applying
them is deterministic, so a resumed run, another number of ranks and another chunk size see the same
views.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sscd_vec.trainer.augment.colour import FILTERS
from sscd_vec.trainer.augment.recipe import NOTHING, Recipe

CROP_TRIES = 10
SEEDS = 2**31
DISTORTIONS_AT_ONCE = 2
WHOLE_WHEN_COMPOSED = 0.6

NO_MIX, MIXUP, CUTMIX, PASTE = range(4)
NO_JITTER = np.array([1, 1, 1, 0], dtype=np.float32)
# What ``Recipe.most_edits`` counts, and the value that leaves each out.
COUNTED: dict[str, object] = {
    "quarters": 0,
    "angle": 0.0,
    "whole": 1,
    "colour": NO_JITTER,
    "grayscale": 0,
    "blur_sigma": 0.0,
    "text": -1,
    "emoji": -1,
    "noise_sigma": 0.0,
    "cells": 0,
    "jpeg": -1,
    "zoom": 0.0,
    "filter": -1,
    "scribble": -1,
    "distort": -1,
}
COMBINED = 2  # a view that is composed or mixed has so many edits already

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Choices:
    """The edits of n views. 0 means off, or -1 where 0 is a value.

    Attributes:
        flip: (n,) 0 or 1.
        quarters: (n,) quarter turns, 0 to 3.
        angle: (n,) radians, counter-clockwise.
        whole: (n,) 1 shows the whole image and ignores the crop.
        crop_area: (n, tries) candidate areas.
        crop_ratio: (n, tries) candidate width / height.
        crop_place: (n, 2) position in the remaining space, 0 to 1.
        colour: (n, 4) brightness, contrast, saturation factors and hue turns; 1, 1, 1, 0 is off.
        colour_order: (n, 4) the order in which these four apply.
        exact_jitter: (n,) 1 applies them as torchvision does.
        grayscale: (n,) 0 or 1.
        blur_sigma: (n,) pixels at 224; 0 is off.
        text: (n,) seed of font, string and colour; -1 is off.
        emoji: (n,) seed of the emoji; -1 is off.
        overlay: (n, 2, 4) size, opacity and position (x, y from 0 to 1) of text and emoji.
        noise_sigma: (n,) 0 is off.
        noise: (n,) its seed.
        cells: (n,) squares of one colour along a side; 0 is off.
        jpeg: (n,) quality; -1 is off.
        mix: (n,) ``NO_MIX``, ``MIXUP``, ``CUTMIX`` or ``PASTE``.
        gamma: (n,) fraction kept of the view itself.
        partner: (n,) the other view, a row of these choices.
        cut_place: (n, 2) position of the other view in cutmix and paste, 0 to 1.
        zoom: (n, 2) width and height of the canvas relative to the view; 0 is off.
        canvas_place: (n, 2) position of the view on the canvas, 0 to 1.
        ground: (n, 3) colour of the canvas.
        filter: (n,) a row of ``FILTERS``; -1 is off.
        filter_strength: (n,) 0 to 1.
        scribble: (n,) seed of the lines; -1 is off.
        compose: (n,) seed of the composition; -1 is off.
        distort: (n, 2) seeds of further edits; -1 is off.
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
    exact_jitter: Ints
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
    compose: Ints
    distort: Ints

    def __len__(self) -> int:
        """Number of views."""
        return len(self.flip)

    def take(self, rows: Ints) -> "Choices":
        """The choices of some views."""
        return Choices(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def with_rows(self, rows: npt.NDArray[np.bool_], others: "Choices") -> "Choices":
        """A copy in which some rows come from ``others``."""

        def chosen(name: str) -> npt.NDArray[Any]:
            ours, theirs = getattr(self, name), getattr(others, name)
            picked: npt.NDArray[Any] = np.where(
                rows.reshape(-1, *[1] * (ours.ndim - 1)), theirs, ours
            )
            return picked

        return Choices(**{f.name: chosen(f.name) for f in fields(self)})


def generator(seed: int, step: int) -> np.random.Generator:
    """The random generator of one step of one run."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))


def draw_pairs(recipe: Recipe, count: int, random: np.random.Generator) -> Choices:
    """Choose the edits of two views of ``count`` images, first views first."""
    choices = draw(recipe, 2 * count, random)
    untouched = (random.random(2 * count) < recipe.untouched) & (np.arange(2 * count) < count)
    return choices.with_rows(untouched, draw(NOTHING, 2 * count, random))


def draw(recipe: Recipe, count: int, random: np.random.Generator) -> Choices:
    """Choose the edits of ``count`` views.

    Every number is drawn, used or not, so that changing one probability leaves the other choices
    alone.
    """

    def happens(probability: float) -> npt.NDArray[np.bool_]:
        return random.random(count) < probability

    def between(low: float, high: float, *shape: int) -> Floats:
        return random.uniform(low, high, (count, *shape)).astype(np.float32)

    def factor(strength: float) -> Floats:
        return between(max(0.0, 1 - strength), 1 + strength)

    def seeds() -> Ints:
        return random.integers(0, SEEDS, count)

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
    choices = Choices(
        flip=happens(recipe.flip).astype(np.int64),
        quarters=np.where(happens(recipe.quarter_turn), random.integers(1, 4, count), 0),
        angle=np.where(happens(recipe.rotation), between(0, 2 * np.pi), np.float32(0)),
        crop_area=between(*recipe.crop_area, CROP_TRIES),
        crop_ratio=np.exp(between(ratio_low, ratio_high, CROP_TRIES)),
        crop_place=between(0, 1, 2),
        colour=np.where(jittered, colour, NO_JITTER),
        colour_order=np.argsort(random.random((count, 4)), axis=1),
        exact_jitter=np.zeros(count, dtype=np.int64),
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
        compose=np.where(happens(recipe.compose), seeds(), -1),
        distort=np.where(
            random.random((count, DISTORTIONS_AT_ONCE)) < recipe.distort,
            random.integers(0, SEEDS, (count, DISTORTIONS_AT_ONCE)),
            -1,
        ),
    )
    choices = _with_compositions(choices, random)
    if recipe.most_edits:
        choices = _with_at_most(choices, recipe.most_edits, random)
    # The noise's seed decides, for it is always drawn: one draw more would change all that follow.
    exact = choices.noise < recipe.exact_jitter * SEEDS
    return replace(choices, exact_jitter=exact.astype(np.int64))


def _with_compositions(choices: Choices, random: np.random.Generator) -> Choices:
    """Compose only what is not mixed, and show most composed images whole.

    Nobody could recognize a small crop in a small cell.
    """
    compose = np.where(choices.mix == NO_MIX, choices.compose, -1)
    whole = (compose >= 0) & (random.random(len(choices)) < WHOLE_WHEN_COMPOSED)
    return replace(choices, compose=compose, whole=np.maximum(choices.whole, whole))


def _with_at_most(choices: Choices, most: int, random: np.random.Generator) -> Choices:
    """Leave out edits at random where a view drew more than ``most``."""
    drawn = np.stack([_is_drawn(choices, name) for name in COUNTED], axis=1)
    order = random.random(drawn.shape)
    order[~drawn] = np.inf
    place = order.argsort(axis=1).argsort(axis=1)  # among the edits that the view drew
    combined = (choices.mix != NO_MIX) | (choices.compose >= 0)
    dropped = drawn & (place >= (most - COMBINED * combined)[:, None])
    changed = {
        name: _left_out(getattr(choices, name), dropped[:, column], off)
        for column, (name, off) in enumerate(COUNTED.items())
    }
    return replace(choices, **changed)


def _is_drawn(choices: Choices, name: str) -> npt.NDArray[np.bool_]:
    values = getattr(choices, name)
    differs: npt.NDArray[np.bool_] = (values != COUNTED[name]).reshape(len(values), -1).any(axis=1)
    return differs


def _left_out(
    values: npt.NDArray[Any], rows: npt.NDArray[np.bool_], off: object
) -> npt.NDArray[Any]:
    changed = values.copy()
    changed[rows] = off
    return changed


def _zooms(recipe: Recipe, count: int, random: np.random.Generator) -> Floats:
    """Canvas sizes: half of them frame the view, half extend it in one direction only."""
    zoom = random.uniform(*recipe.canvas_zoom, (count, 2))
    band = random.integers(0, 4, count)  # 0 or 1: that side stays; 2 or 3: neither does
    zoom[np.arange(2) == band[:, None]] = 1.0
    return zoom.astype(np.float32)


def _grounds(count: int, random: np.random.Generator) -> Floats:
    """Black, white or any colour, each a third of the time."""
    kind = random.integers(0, 3, (count, 1))
    colour = random.random((count, 3))
    return np.where(kind == 2, colour, kind).astype(np.float32)
