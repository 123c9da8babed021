"""Where an alignment lies in both images.

In unit coordinates: (0, 0) is the upper left corner of an image, (1, 1) the lower right one.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sscd_vec.verify.geometry import Matrix, transform

Polygon = tuple[tuple[float, float], ...]
"""Corners ``(x, y)`` in order, each between 0 and 1; empty if there is no region."""


class Region(NamedTuple):
    """What was copied.

    Attributes:
        query: Outline in the query.
        reference: Outline in the reference.
    """

    query: Polygon
    reference: Polygon


FRAME = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def to_unit(
    matrix: Matrix, query: tuple[int, int], reference: tuple[int, int], mirrored: bool
) -> Matrix:
    """A map between working pixels as one between unit coordinates, of the query as it is seen.

    Args:
        matrix: From the (mirrored) query to the reference, in working pixels.
        query: Working size of the query.
        reference: Working size of the reference.
        mirrored: Whether ``matrix`` starts from the mirrored query.
    """
    start = _from_unit(query)
    if mirrored:
        start = start @ np.array([[-1.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    unit = np.linalg.inv(_from_unit(reference)) @ matrix @ start
    return np.asarray(unit / unit[2, 2])


def overlap(unit: Matrix) -> Region:
    """The part of the query that lies on the reference, and the part of the reference under it."""
    inverse = np.linalg.inv(unit)
    in_query = clip(transform(inverse, FRAME))
    if not len(in_query):
        return Region((), ())
    return Region(_polygon(in_query), _polygon(np.clip(transform(unit, in_query), 0, 1)))


def area(polygon: Polygon) -> float:
    """Share of the image that a region covers."""
    if len(polygon) < 3:
        return 0.0
    x, y = np.array(polygon).T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


def clip(corners: NDArray[np.float64]) -> NDArray[np.float64]:
    """A convex polygon cut at the frame, side by side (Sutherland and Hodgman)."""
    for axis in (0, 1):
        for limit, sign in ((0.0, 1.0), (1.0, -1.0)):
            corners = _cut(corners, sign * (corners[:, axis] - limit)) if len(corners) else corners
    return corners


def _cut(corners: NDArray[np.float64], inside: NDArray[np.float64]) -> NDArray[np.float64]:
    """What is left of a polygon where ``inside`` is not negative at its corners."""
    kept = []
    for here in range(len(corners)):
        there = (here + 1) % len(corners)
        if inside[here] >= 0:
            kept.append(corners[here])
        if (inside[here] >= 0) != (inside[there] >= 0):
            part = inside[here] / (inside[here] - inside[there])
            kept.append(corners[here] + part * (corners[there] - corners[here]))
    return np.array(kept).reshape(-1, 2)


def _from_unit(size: tuple[int, int]) -> Matrix:
    """From unit coordinates to working pixels, whose centres are whole numbers."""
    return np.array([[size[0], 0, -0.5], [0, size[1], -0.5], [0, 0, 1.0]])


def _polygon(corners: NDArray[np.float64]) -> Polygon:
    return tuple((float(x), float(y)) for x, y in corners)
