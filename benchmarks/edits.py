"""The edit mix of a DISC-like set: which edits, how often, how many at a time, in which order.

A query is one photo after one to four edits, all drawn from a generator of its own. Two rules keep
it recognisable to a person: at most one edit of a kind (``Kind.family``), and a picture is composed
into something larger after it was cropped, never before. The mix is frozen: changing a weight or a
strength makes another test, under another ``MIX``.
"""

from dataclasses import dataclass

import numpy as np
from PIL import Image

import edits_composed
import edits_drawn
import edits_filters
import edits_pixels
from edits_pixels import Edit, Other, Strengths

MIX = "disc-like-1"
COUNT_WEIGHTS = {1: 0.15, 2: 0.3, 3: 0.3, 4: 0.25}

# When an edit may happen: on the source, composing, on the composed picture, at the very end.
BEFORE, COMPOSE, AFTER, LAST = range(4)


@dataclass(frozen=True)
class Kind:
    """One edit of the mix.

    Attributes:
        edit: The function.
        weight: How often it is drawn, relative to the others.
        family: At most one edit of a family is applied to a query.
        stages: When it may happen; one stage is drawn.
    """

    edit: Edit
    weight: float
    family: str
    stages: tuple[int, ...]


MIXTURE: dict[str, Kind] = {
    "crop": Kind(edits_pixels.crop, 1.6, "crop", (BEFORE,)),
    "aspect": Kind(edits_pixels.aspect, 0.8, "aspect", (BEFORE, AFTER)),
    "flip": Kind(edits_pixels.flip, 0.8, "flip", (BEFORE, AFTER)),
    "rotate": Kind(edits_pixels.rotate, 1.0, "turn", (BEFORE, AFTER)),
    "perspective": Kind(edits_pixels.perspective, 0.5, "turn", (BEFORE, AFTER)),
    "brightness": Kind(edits_pixels.brightness, 0.6, "light", (BEFORE, AFTER)),
    "contrast": Kind(edits_pixels.contrast, 0.6, "light", (BEFORE, AFTER)),
    "filter": Kind(edits_filters.colour_filter, 1.4, "filter", (BEFORE, AFTER)),
    "blur": Kind(edits_pixels.blur, 0.6, "detail", (BEFORE,)),
    "pixelize": Kind(edits_pixels.pixelize, 0.6, "detail", (BEFORE,)),
    "shrink": Kind(edits_pixels.shrink, 0.4, "detail", (AFTER,)),
    "noise": Kind(edits_pixels.noise, 0.8, "noise", (BEFORE, AFTER)),
    "text": Kind(edits_drawn.text, 1.0, "text", (BEFORE, AFTER)),
    "watermark": Kind(edits_drawn.watermark, 0.4, "text", (BEFORE, AFTER)),
    "stickers": Kind(edits_drawn.stickers, 1.0, "stickers", (BEFORE, AFTER)),
    "scribble": Kind(edits_drawn.scribble, 0.5, "scribble", (BEFORE, AFTER)),
    "border": Kind(edits_drawn.border, 0.8, "border", (BEFORE, AFTER)),
    "overlay_on": Kind(edits_composed.overlay_on, 1.4, "composed", (COMPOSE,)),
    "overlay_under": Kind(edits_composed.overlay_under, 0.8, "composed", (COMPOSE,)),
    "collage": Kind(edits_composed.collage, 0.7, "composed", (COMPOSE,)),
    "screenshot": Kind(edits_composed.screenshot, 0.9, "composed", (COMPOSE,)),
    "compress": Kind(edits_pixels.compress, 0.8, "compress", (LAST,)),
}


@dataclass(frozen=True)
class Applied:
    """An edit that was made, and how strongly."""

    name: str
    strengths: Strengths


def draw(rng: np.random.Generator) -> list[str]:
    """Draw one to four edits of the mix, at most one of a family, in the order they are made."""
    counts = list(COUNT_WEIGHTS)
    count = int(rng.choice(counts, p=np.array(list(COUNT_WEIGHTS.values()))))
    names = list(MIXTURE)
    weights = np.array([MIXTURE[name].weight for name in names])
    drawn: dict[str, int] = {}
    while len(drawn) < count:
        taken = {MIXTURE[name].family for name in drawn}
        free = np.array([MIXTURE[name].family not in taken for name in names])
        name = names[int(rng.choice(len(names), p=weights * free / (weights * free).sum()))]
        drawn[name] = int(rng.choice(MIXTURE[name].stages))
    return sorted(drawn, key=drawn.__getitem__)


def edit(
    image: Image.Image, rng: np.random.Generator, other: Other
) -> tuple[Image.Image, list[Applied]]:
    """Edit a picture.

    Args:
        image: The source, RGB.
        rng: Decides everything that is random.
        other: Gives another photo each time it is called, for overlays and collages.

    Returns:
        The edited picture, and what was done to it in order.
    """
    applied = []
    for name in draw(rng):
        image, strengths = MIXTURE[name].edit(image, rng, other)
        applied.append(Applied(name, strengths))
    return image, applied
