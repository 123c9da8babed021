"""Flip, turns, rotation and crop as one affine map, so that pixels are resampled once.

Coordinates are centred and in units of the image's height, so that an image of aspect ratio ``a``
spans ``a x 1`` however many pixels store it. An output point ``u`` in [-1, 1]^2 goes back through

    v = zoom * u + shift              canvas: the view is where v is in [-1, 1]^2
    x3 = centre + extent * v          crop, inside the rotated frame
    x2 = R(angle) x3                  free rotation; text and emoji are placed in this frame
    x1 = R(90 deg * quarters) x2      quarter turns
    x0 = flip x1                      horizontal flip: a point of the image
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.trainer.augment.choices import Choices
from sscd_vec.trainer.config import MOST_DETAIL

Matrices = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Views:
    """The affine maps of n views.

    Attributes:
        to_image: (n, 2, 3) from output to the image's own [-1, 1]^2: what ``affine_grid`` takes.
        to_frame: (n, 2, 3) from output to the frame that overlays are placed in, in heights.
        frame: (n, 2) width and height of that frame.
        to_crop: (n, 2, 3) from output to the crop's [-1, 1]^2; the canvas lies outside it.
    """

    to_image: Matrices
    to_frame: Matrices
    frame: Matrices
    to_crop: Matrices


def views_of(choices: Choices, aspects: npt.NDArray[np.float32]) -> Views:
    """Compose the chosen flip, turns, rotation and crop of each view."""
    count = len(choices)
    upright = np.stack([aspects.astype(np.float64), np.ones(count)], axis=1)
    turned = np.where((choices.quarters % 2 == 1)[:, None], upright[:, ::-1], upright)
    angle = choices.angle.astype(np.float64)
    zoom = choices.zoom.astype(np.float64)
    canvas = zoom > 0
    inner = np.where(canvas, smallest_around(turned, angle), largest_upright(turned, angle))
    centre, extent = crop_boxes(
        inner, choices.crop_area, choices.crop_ratio, choices.crop_place.astype(np.float64)
    )
    whole = (choices.whole == 1)[:, None]
    centre, extent = np.where(whole, 0.0, centre), np.where(whole, inner / 2, extent)
    zoom = np.where(canvas, zoom, 1.0)
    shift = (1 - 2 * choices.canvas_place.astype(np.float64)) * (zoom - 1)
    to_crop = scalings(zoom, shift)
    to_frame = rotations(angle) @ scalings(extent * zoom, centre + extent * shift)
    unturned = rotations(choices.quarters.astype(np.float64) * (np.pi / 2)) @ to_frame
    mirror = np.where(choices.flip == 1, -1.0, 1.0)
    scale = np.stack([mirror, np.ones(count)], axis=1) * 2 / upright
    return Views(scale[:, :, None] * unturned, to_frame, turned, to_crop)


def scalings(factor: Matrices, shift: Matrices) -> Matrices:
    """(n, 2, 3) maps ``factor * u + shift``."""
    maps = np.zeros((len(factor), 2, 3))
    maps[:, 0, 0], maps[:, 1, 1] = factor.T
    maps[:, :, 2] = shift
    return maps


def rotations(angle: Matrices) -> Matrices:
    """(n, 2, 2) rotation matrices."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cos, -sin], axis=1), np.stack([sin, cos], axis=1)], axis=1)


def largest_upright(frame: Matrices, angle: Matrices) -> Matrices:
    """Width and height of the largest upright rectangle inside a rotated frame.

    Cropping to it leaves no empty corners that would give the rotation away.

    Args:
        frame: (n, 2) width and height before the rotation.
        angle: (n,) radians.

    Returns:
        (n, 2) width and height.
    """
    width, height = frame.T
    sin, cos = np.abs(np.sin(angle)), np.abs(np.cos(angle))
    long, short = frame.max(axis=1), frame.min(axis=1)
    # Either two opposite corners touch the long sides, or all four corners touch one side each.
    two_corners = (short <= 2 * sin * cos * long) | (np.abs(sin - cos) < 1e-10)
    with np.errstate(all="ignore"):  # the case not chosen may divide by zero
        along, across = 0.5 * short / sin, 0.5 * short / cos
        wide = width >= height
        two = np.stack([np.where(wide, along, across), np.where(wide, across, along)], axis=1)
        cos_2a = cos**2 - sin**2
        four = np.stack(
            [(width * cos - height * sin) / cos_2a, (height * cos - width * sin) / cos_2a], axis=1
        )
    inner: Matrices = np.where(two_corners[:, None], two, four)
    return inner


def smallest_around(frame: Matrices, angle: Matrices) -> Matrices:
    """Width and height of the smallest upright rectangle around a rotated frame."""
    sin, cos = np.abs(np.sin(angle))[:, None], np.abs(np.cos(angle))[:, None]
    around: Matrices = frame * cos + frame[:, ::-1] * sin
    return around


def crop_boxes(
    frame: Matrices,
    areas: npt.NDArray[np.float32],
    ratios: npt.NDArray[np.float32],
    place: Matrices,
) -> tuple[Matrices, Matrices]:
    """Random resized crops: the first candidate that fits, else the largest central one.

    Args:
        frame: (n, 2) width and height to crop from, centred at the origin.
        areas: (n, tries) candidate parts of the frame's area.
        ratios: (n, tries) candidate width / height.
        place: (n, 2) position in the remaining space, 0 to 1.

    Returns:
        (n, 2) centres and (n, 2) half extents.
    """
    area = areas.astype(np.float64) * np.prod(frame, axis=1, keepdims=True)
    sizes = np.stack([np.sqrt(area * ratios), np.sqrt(area / ratios)], axis=2)  # (n, tries, 2)
    fits: npt.NDArray[np.bool_] = np.all(sizes <= frame[:, None, :], axis=2)
    first = fits.argmax(axis=1)
    size = sizes[np.arange(len(frame)), first]
    # Only very long frames fit no candidate: keep the ratio nearest to the frame's own.
    ratio = np.clip(frame[:, 0] / frame[:, 1], ratios.min(axis=1), ratios.max(axis=1))
    central = np.stack(
        [
            np.minimum(frame[:, 0], frame[:, 1] * ratio),
            np.minimum(frame[:, 1], frame[:, 0] / ratio),
        ],
        axis=1,
    )
    fitted = np.any(fits, axis=1, keepdims=True)
    size = np.where(fitted, size, central)
    centre = np.where(fitted, (place - 0.5) * (frame - size), 0.0)
    return centre, size / 2


def cut_box(gamma: float, place: npt.NDArray[np.float32], side: int) -> tuple[slice, slice, slice]:
    """The square of area ``1 - gamma`` of an image (c, side, side), ``place`` from 0 to 1."""
    cut = max(1, round(side * (1 - gamma) ** 0.5))
    top, left = (round(float(p) * (side - cut)) for p in place)
    return slice(None), slice(top, top + cut), slice(left, left + cut)


def resample(images: Tensor, matrices: Matrices, size: int) -> Tensor:
    """Look at float ``images`` (n, 3, h, w) through affine maps; the edge continues outside."""
    grid = pixel_centres(size, images.device).view(1, -1, 3) @ as_tensor(
        matrices, images
    ).transpose(1, 2)
    return F.grid_sample(
        images,
        grid.view(-1, size, size, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )


def resample_own(images: Sequence[Tensor], matrices: Matrices, size: int) -> Tensor:
    """Like ``resample``, for uint8 images (h, w, 3) that keep their own pixels, each its own shape.

    Cuts out what a view looks at. Where the cut has more than ``MOST_DETAIL`` pixels per pixel of
    the view, shrinks it with an antialiasing filter first, as torchvision's RandomResizedCrop does.
    """
    views = [
        _resample_cut(image, to_image, size)
        for image, to_image in zip(images, matrices, strict=True)
    ]
    return torch.cat(views)


def _resample_cut(image: Tensor, to_image: Matrices, size: int) -> Tensor:
    sides = np.array([image.shape[1], image.shape[0]])  # x, y
    reach = np.abs(to_image[:, :2]).sum(axis=1)
    low, high = ((to_image[:, 2] + side * reach + 1) / 2 * sides for side in (-1, 1))
    first = np.clip(np.floor(low) - 1, 0, sides - 1).astype(int)
    last = np.clip(np.ceil(high) + 1, first + 1, sides).astype(int)
    cut = image[first[1] : last[1], first[0] : last[0]].permute(2, 0, 1)[None].float().div_(255)
    span = last - first
    detail = np.linalg.norm(to_image[:, :2], axis=1) * sides / size
    kept = np.maximum(np.round(span * np.minimum(1, MOST_DETAIL / detail)), 1).astype(int)
    if (kept < span).any():
        shape = (int(kept[1]), int(kept[0]))
        cut = F.interpolate(cut, shape, mode="bilinear", antialias=True)
    to_cut = to_image * (sides / span)[:, None]
    to_cut[:, 2] += (sides - first - last) / span
    return resample(cut, to_cut[None], size)


@functools.lru_cache(maxsize=8)
def pixel_centres(size: int, device: torch.device) -> Tensor:
    """(size, size, 3): x, y, 1 of every pixel's centre, from -1 to 1."""
    places = (torch.arange(size, device=device) * 2 + 1) / size - 1
    y, x = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([x, y, torch.ones_like(x)], dim=2)


def as_tensor(array: npt.NDArray[np.number], like: Tensor) -> Tensor:
    """An array as a tensor of the device and type of ``like``."""
    return torch.from_numpy(array).to(like.device, like.dtype)
