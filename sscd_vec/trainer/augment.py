"""Apply chosen edits to a batch of photos, as tensor operations over the whole batch.

Flip, turns, rotation and crop are one bilinear resample (``geometry.py``); colour jitter and
grayscale one 3 x 4 matrix per view; blur two matrix products. Canvas, text, emoji, scribbles,
filters, noise, pixels and JPEG touch the few views that drew them. Nothing here is random: see
``recipe.py``.
"""

import functools
import io
import math

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.trainer.filters import FILTERS
from sscd_vec.trainer.geometry import Views, cut_box, views_of
from sscd_vec.trainer.overlay import Overlays, Sprite, rendered_size, scribble
from sscd_vec.trainer.recipe import BLUR_SIZE, Choices

GROUP = 64  # views at once: enough to fill the vector units, few enough to stay in cache
LUMA = (0.299, 0.587, 0.114)
# YIQ: hue is a rotation of the (I, Q) plane, so all of the jitter is linear in RGB.
RGB_TO_YIQ = torch.tensor([LUMA, (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)])
YIQ_TO_RGB = torch.linalg.inv(RGB_TO_YIQ.double()).float()


def augment(
    pixels: Tensor,
    aspects: npt.NDArray[np.float32],
    choices: Choices,
    size: int,
    overlays: Overlays,
    rows: npt.NDArray[np.int64] | None = None,
    insets: Tensor | None = None,
) -> Tensor:
    """Edit photos into training views.

    Args:
        pixels: uint8 ``(m, side, side, 3)``, on the device to work on.
        aspects: (m,) width / height of each photo before it was made square.
        choices: The edits of n views.
        size: Side of the views.
        overlays: Fonts and emoji.
        rows: (n,) the photo of each view; None if m = n, one view each.
        insets: (n, 3, size, size) finished views, pasted into these where ``cut_box`` says before
            colours, text and all that follows is laid over both.

    Returns:
        float32 ``(n, 3, size, size)`` in [0, 1].
    """
    rows = np.arange(len(choices)) if rows is None else rows
    views = torch.empty((len(choices), 3, size, size), device=pixels.device)
    for start in range(0, len(choices), GROUP):
        here = np.arange(start, min(start + GROUP, len(choices)))
        photos = torch.from_numpy(rows[here]).to(pixels.device)
        views[start : start + GROUP] = _augment_group(
            pixels[photos],
            aspects[rows[here]],
            choices.take(here),
            size,
            overlays,
            None if insets is None else insets[start : start + GROUP],
        )
    return views


def _augment_group(
    pixels: Tensor,
    aspects: npt.NDArray[np.float32],
    choices: Choices,
    size: int,
    overlays: Overlays,
    insets: Tensor | None,
) -> Tensor:
    looks = views_of(choices, aspects)
    images = resample(pixels.permute(0, 3, 1, 2).float().div_(255), looks.to_photo, size)
    _lay_on_canvas(images, looks, choices)
    if insets is not None:
        _paste_insets(images, insets, choices)
    _paste_all(images, looks, choices, overlays)
    for row in np.flatnonzero(choices.scribble >= 0):
        layer = _as_tensor(scribble(int(choices.scribble[row]), size), images).permute(2, 0, 1)
        images[row].mul_(1 - layer[3]).add_(layer[:3])
    images = recolour(images, choices)
    for row in np.flatnonzero(choices.filter >= 0):
        images[row] = FILTERS[choices.filter[row]](images[row], float(choices.filter_strength[row]))
    _blur_some(images, choices.blur_sigma * (size / BLUR_SIZE))
    for row in np.flatnonzero(choices.noise_sigma > 0):
        images[row] = noisy(images[row], float(choices.noise_sigma[row]), int(choices.noise[row]))
    for row in np.flatnonzero(choices.cells > 0):
        images[row] = pixelize(images[row], int(choices.cells[row]))
    for row in np.flatnonzero(choices.jpeg >= 0):
        images[row] = compress(images[row], int(choices.jpeg[row]))
    return images


def resample(images: Tensor, matrices: npt.NDArray[np.float64], size: int) -> Tensor:
    """Look at ``images`` through affine ``matrices``; beyond the edge the edge continues."""
    grid = _points(size, images.device).view(1, -1, 3) @ _as_tensor(matrices, images).transpose(
        1, 2
    )
    return F.grid_sample(
        images,
        grid.view(-1, size, size, 2),
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )


def recolour(images: Tensor, choices: Choices) -> Tensor:
    """Colour jitter in each view's own order, then grayscale: ``clamp(A x + b)``.

    Brightness ``f x``; contrast ``f x + (1 - f) mean(luma)``; saturation
    ``f x + (1 - f) luma``; hue a rotation of the IQ plane. All are linear, so they are composed
    into one matrix per view and clamped once at the end.
    """
    device = images.device
    factors = torch.from_numpy(choices.colour).to(device)
    order = torch.from_numpy(choices.colour_order).to(device)
    luma = torch.tensor(LUMA, device=device)
    count = len(images)
    means = images.mean(dim=(2, 3))  # (n, 3)
    matrix = torch.eye(3, device=device).repeat(count, 1, 1)
    shift = torch.zeros(count, 3, device=device)

    brightness, contrast, saturation, hue = factors.unbind(1)
    identity = torch.eye(3, device=device)
    gray = luma.expand(3, 3)
    turn = hue * (2 * math.pi)
    rotation = torch.zeros(count, 3, 3, device=device)
    rotation[:, 0, 0] = 1
    rotation[:, 1, 1] = rotation[:, 2, 2] = turn.cos()
    rotation[:, 1, 2], rotation[:, 2, 1] = -turn.sin(), turn.sin()
    linear = torch.stack(
        [
            brightness[:, None, None] * identity,
            contrast[:, None, None] * identity,
            saturation[:, None, None] * identity + (1 - saturation)[:, None, None] * gray,
            YIQ_TO_RGB.to(device) @ rotation @ RGB_TO_YIQ.to(device),
        ],
        dim=1,
    )  # (n, 4, 3, 3)
    rows = torch.arange(count, device=device)
    for kind in order.unbind(1):
        now = linear[rows, kind]
        mean_luma = ((matrix @ means[:, :, None]).squeeze(2) + shift) @ luma
        offset = torch.where(kind == 1, (1 - contrast) * mean_luma, 0.0)
        matrix = now @ matrix
        shift = (now @ shift[:, :, None]).squeeze(2) + offset[:, None]
    turned_gray = torch.from_numpy(choices.grayscale).to(device).bool()[:, None, None]
    last = torch.where(turned_gray, gray, identity)
    matrix, shift = last @ matrix, last @ shift[:, :, None]
    flat = torch.baddbmm(shift, matrix, images.flatten(2))
    return flat.clamp_(0, 1).view_as(images)


def blur(images: Tensor, sigmas: Tensor) -> Tensor:
    """Gaussian blur with each view's own sigma and mirrored edges: ``K X K^T``.

    ``K[i, j] = g(i - j) + g(i + j) + g(2 (s - 1) - i - j)`` for a side s: the Gaussian g of a
    pixel and of its mirror images, rows scaled to sum 1; mirroring does not repeat the edge, so the
    edge pixels have no mirror image of their own. On the small squares of training two matrix
    products beat a convolution with as many kernels as channels.
    """
    side = images.shape[-1]
    last = side - 1
    distance = torch.arange(2 * side - 1, device=images.device, dtype=images.dtype)
    gauss = torch.exp(-0.5 * (distance / sigmas[:, None]).square())  # (n, 2 side - 1)
    # Toeplitz and Hankel matrices are strided views of one row.
    both_ways = torch.cat([gauss[:, 1:side].flip(1), gauss[:, :side]], dim=1)
    kernel = both_ways.unfold(1, side, 1).flip(1).clone()  # g(i - j)
    mirrored = gauss.unfold(1, side, 1)  # g(i + j)
    kernel[:, :, 1:] += mirrored[:, :, 1:]
    kernel[:, :, :last] += mirrored.flip(1, 2)[:, :, :last]
    kernel = (kernel / kernel.sum(dim=2, keepdim=True))[:, None]  # (n, 1, side, side)
    return kernel @ images @ kernel.transpose(2, 3)


def noisy(image: Tensor, sigma: float, seed: int) -> Tensor:
    """Add the noise that follows from ``seed``.

    It is Gaussian for even seeds; for odd ones ``sigma / 2`` of the pixels become black or white.
    """
    random = torch.Generator().manual_seed(seed)
    if seed % 2:
        draw = torch.rand(image.shape[1:], generator=random, dtype=image.dtype).to(image.device)
        return torch.where(draw < sigma / 2, (draw < sigma / 4).to(image.dtype), image)
    noise = torch.randn(image.shape, generator=random, dtype=image.dtype)
    return noise.to(image.device).mul_(sigma).add_(image).clamp_(0, 1)


def pixelize(image: Tensor, cells: int) -> Tensor:
    """Replace ``cells x cells`` squares by their mean colours."""
    size = image.shape[-1]
    means = F.interpolate(image[None], size=(min(cells, size),) * 2, mode="area")
    return F.interpolate(means, size=(size, size), mode="nearest")[0]


def compress(image: Tensor, quality: int) -> Tensor:
    """JPEG at ``quality`` 0 to 100 (0 and 1 are the same to libjpeg), and back."""
    levels = image.mul(255).round_().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "JPEG", quality=max(quality, 1))
    decoded = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)
    return decoded.to(image.device, image.dtype).div_(255)


def paste(
    image: Tensor, sprite: Sprite, to_sprite: npt.NDArray[np.float64], opacity: float
) -> None:
    """Lay a sprite over ``image`` in place: ``x (1 - o a) + o c``, only where the sprite is.

    Args:
        image: (3, s, s).
        sprite: (h, w, 4), colours multiplied by alpha.
        to_sprite: (2, 3) from the image's [-1, 1]^2 to the sprite's.
        opacity: o.
    """
    size = image.shape[-1]
    top, bottom, left, right = _covered(to_sprite, size)
    if top >= bottom or left >= right:
        return
    points = _points(size, image.device)[top:bottom, left:right]
    grid = points @ _as_tensor(to_sprite, image).T
    layer = torch.from_numpy(sprite).to(image.device).permute(2, 0, 1)[None]
    layer = F.grid_sample(
        layer, grid[None], mode="bilinear", padding_mode="zeros", align_corners=False
    )[0].mul_(opacity)
    image[:, top:bottom, left:right].mul_(1 - layer[3]).add_(layer[:3])


@functools.lru_cache(maxsize=8)
def _points(size: int, device: torch.device) -> Tensor:
    """(size, size, 3): x, y, 1 of every pixel's centre, from -1 to 1."""
    places = (torch.arange(size, device=device) * 2 + 1) / size - 1
    y, x = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([x, y, torch.ones_like(x)], dim=2)


def _as_tensor(matrices: npt.NDArray[np.floating], like: Tensor) -> Tensor:
    return torch.from_numpy(matrices).to(like.device, like.dtype)


def _covered(to_sprite: npt.NDArray[np.float64], size: int) -> tuple[int, int, int, int]:
    """Rows and columns of an image that a sprite touches: top, bottom, left, right."""
    corners = np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])
    back = np.linalg.solve(to_sprite[:, :2], (corners - to_sprite[:, 2]).T)  # (2, 4) in [-1, 1]
    pixels = (back + 1) * size / 2
    low = np.clip(np.floor(pixels.min(axis=1)) - 1, 0, size).astype(int)
    high = np.clip(np.ceil(pixels.max(axis=1)) + 1, 0, size).astype(int)
    return low[1], high[1], low[0], high[0]


def _blur_some(images: Tensor, sigmas: npt.NDArray[np.float32]) -> None:
    rows = torch.from_numpy(np.flatnonzero(sigmas > 0)).to(images.device)
    if len(rows):
        images[rows] = blur(images[rows], torch.from_numpy(sigmas).to(images.device)[rows])


def _lay_on_canvas(images: Tensor, looks: Views, choices: Choices) -> None:
    """Replace what lies beyond the crop or the photo by the ground."""
    size = images.shape[-1]
    for row in np.flatnonzero(choices.zoom[:, 0] > 0):
        maps = _as_tensor(np.concatenate([looks.to_crop[row], looks.to_photo[row]]), images)
        outside = ((_points(size, images.device) @ maps.T).abs() > 1).any(dim=2)
        images[row] = torch.where(
            outside, _as_tensor(choices.ground[row], images)[:, None, None], images[row]
        )


def _paste_insets(images: Tensor, insets: Tensor, choices: Choices) -> None:
    """Shrink each inset into its view's square."""
    for image, inset, gamma, place in zip(
        images, insets, choices.gamma.tolist(), choices.cut_place, strict=True
    ):
        part = image[cut_box(gamma, place, image.shape[-1])]
        part[:] = F.interpolate(inset[None], part.shape[1:], mode="bilinear", antialias=True)[0]


def _paste_all(images: Tensor, looks: Views, choices: Choices, overlays: Overlays) -> None:
    """Text, then emoji, placed in the frame before the free rotation."""
    size = images.shape[-1]
    for layer, seeds in enumerate((choices.text, choices.emoji)):
        make = (overlays.text, overlays.emoji)[layer]
        for row in np.flatnonzero(seeds >= 0):
            part, opacity, *place = choices.overlay[row, layer].tolist()
            frame = looks.frame[row]
            height = part * frame.min()
            # Output pixels per unit of the frame, so that the sprite is made at its final size.
            scale = size / 2 / np.linalg.norm(looks.to_frame[row, :, 1])
            pixels = rendered_size(height * scale)
            sprite = make(int(seeds[row]), pixels)
            half = np.array([sprite.shape[1], sprite.shape[0]]) * (height / pixels / 2)
            room = np.maximum(frame - 2 * half, 0)
            centre = (np.array(place) - 0.5) * room
            to_sprite = looks.to_frame[row].copy()
            to_sprite[:, 2] -= centre
            paste(images[row], sprite, to_sprite / half[:, None], opacity)
