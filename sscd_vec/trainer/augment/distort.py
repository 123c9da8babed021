"""Further edits of one view, each with its own random strengths: what ``Recipe.distort`` draws.

Each takes a view, ``(3, s, s)`` in [0, 1], and a generator, and returns a new view. Do not add the
edit families that the benchmarks hold out (``benchmarks/accuracy/families.py``).
"""

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the field's name for it)

from sscd_vec.trainer.augment.colour import LUMA, random_colour, to_pil
from sscd_vec.trainer.augment.geometry import as_tensor, pixel_centres

Distortion = Callable[[Tensor, np.random.Generator], Tensor]


def distort(image: Tensor, seed: int) -> Tensor:
    """Apply the edit that follows from ``seed``."""
    random = np.random.default_rng(seed)
    return DISTORTIONS[int(random.integers(len(DISTORTIONS)))](image, random)


def perspective(image: Tensor, random: np.random.Generator) -> Tensor:
    """Move the corners inwards by up to a fifth, on a plain ground or cropped to the inside."""
    size = image.shape[-1]
    away = random.uniform(0, 0.4, (4, 2))
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=np.float64)
    inwards = corners * (1 - away)
    inside = random.random() < 0.5
    # Output to image: either the image's corners move inwards, or the view's do.
    homography = _homography(corners, inwards) if inside else _homography(inwards, corners)
    points = pixel_centres(size, image.device) @ as_tensor(homography, image).T
    grid = points[..., :2] / points[..., 2:].clamp(min=1e-3)
    seen = F.grid_sample(image[None], grid[None], padding_mode="border", align_corners=False)[0]
    outside = (grid.abs() > 1).any(dim=2)
    return torch.where(outside, _plain(random, image), seen)


def occlude(image: Tensor, random: np.random.Generator) -> Tensor:
    """Cover one to four boxes or discs with a colour, with noise, or with a heavy blur."""
    size = image.shape[-1]
    covered = image.clone()
    x, y = pixel_centres(size, image.device)[..., 0], pixel_centres(size, image.device)[..., 1]
    for _ in range(int(random.integers(1, 5))):
        wide, high = random.uniform(0.1, 0.5, 2)
        across, down = random.uniform(-1, 1, 2)
        u, v = ((x - across) / wide).abs(), ((y - down) / high).abs()
        inside = (u.square() + v.square() < 1) if random.random() < 0.4 else ((u < 1) & (v < 1))
        covered = torch.where(inside, _cover(image, random), covered)
    return covered


def stripes(image: Tensor, random: np.random.Generator) -> Tensor:
    """Draw straight bars at any angle, or a grid of them."""
    size = image.shape[-1]
    angle = float(random.choice([0, np.pi / 2, random.uniform(0, np.pi)]))
    points = pixel_centres(size, image.device)
    count = random.uniform(3, 25)
    thick = random.uniform(0.08, 0.45)
    on = torch.zeros(size, size, dtype=torch.bool, device=image.device)
    for turn in (angle, angle + np.pi / 2)[: 1 + int(random.random() < 0.3)]:
        along = points[..., 0] * float(np.cos(turn)) + points[..., 1] * float(np.sin(turn))
        on |= (along * count / 2 + float(random.random())).remainder(1) < thick
    opacity = random.uniform(0.3, 1)
    return torch.where(on, torch.lerp(image, _plain(random, image), opacity), image)


def mix_channels(image: Tensor, random: np.random.Generator) -> Tensor:
    """Reorder the channels and invert some."""
    mixed = image[torch.from_numpy(random.permutation(3))]
    inverted = torch.from_numpy(random.random(3) < 0.15)[:, None, None].to(image.device)
    return torch.where(inverted, 1 - mixed, mixed)


def colour_matrix(image: Tensor, random: np.random.Generator) -> Tensor:
    """Map colours linearly, as sepia and tint filters do."""
    matrix = np.eye(3) * random.uniform(0.2, 1) + random.normal(0, 0.25, (3, 3))
    gray = np.tile(LUMA, (3, 1)) * random.uniform(0, 1)
    mixed = torch.einsum("ij,jhw->ihw", as_tensor(matrix + gray, image), image)
    return (mixed + float(random.uniform(-0.1, 0.1))).clamp_(0, 1)


def wash(image: Tensor, random: np.random.Generator) -> Tensor:
    """Blend in one colour, like fog: evenly or more towards one side."""
    x, y = pixel_centres(image.shape[-1], image.device)[..., :2].unbind(2)
    turn = random.uniform(0, 2 * np.pi)
    ramp = (x * float(np.cos(turn)) + y * float(np.sin(turn))) * float(random.uniform(0, 0.7))
    share = (float(random.uniform(0.15, 0.7)) + ramp / 2).clamp(0, 0.9)
    return torch.lerp(image, _plain(random, image), share.expand_as(image))


def vignette(image: Tensor, random: np.random.Generator) -> Tensor:
    """Darken or brighten away from a point."""
    points = pixel_centres(image.shape[-1], image.device)[..., :2]
    centre = as_tensor(random.uniform(-0.4, 0.4, 2), image)
    far = (points - centre).square().sum(dim=2) * float(random.uniform(0.2, 0.8))
    return (image * (1 - far) if random.random() < 0.7 else image + far / 2).clamp_(0, 1)


def coarsen(image: Tensor, random: np.random.Generator) -> Tensor:
    """Shrink two to seven times and enlarge again."""
    size = image.shape[-1]
    small = max(8, round(size / random.uniform(2, 7)))
    tiny = F.interpolate(image[None], (small, small), mode="bilinear", antialias=True)
    smooth = "bicubic" if random.random() < 0.7 else "nearest"
    return F.interpolate(tiny, (size, size), mode=smooth)[0].clamp_(0, 1)


def ink(image: Tensor, random: np.random.Generator) -> Tensor:
    """Blend in a black-and-white version, as a scanner would see the image."""
    luma = torch.einsum("c,chw->hw", as_tensor(np.array(LUMA), image), image)
    steep = float(random.uniform(4, 20))
    black = ((luma - luma.median() - float(random.uniform(-0.1, 0.1))) * steep).sigmoid()
    return torch.lerp(image, black.expand_as(image), float(random.uniform(0.4, 1)))


def split_colours(image: Tensor, random: np.random.Generator) -> Tensor:
    """Move red and blue apart."""
    size = image.shape[-1]
    far = [int(v) for v in random.integers(-size // 16, size // 16 + 1, 4)]
    red = image[0].roll(far[:2], dims=(0, 1))
    blue = image[2].roll(far[2:], dims=(0, 1))
    return torch.stack([red, image[1], blue])


def speckle(image: Tensor, random: np.random.Generator) -> Tensor:
    """Add noise that grows with brightness, fine or in clumps."""
    size = image.shape[-1]
    grain = max(1, size // int(random.integers(1, 5)))
    channels = 1 if random.random() < 0.5 else 3
    noise = random.standard_normal((1, channels, grain, grain)).astype(np.float32)
    clumps = F.interpolate(torch.from_numpy(noise).to(image.device), (size, size), mode="bilinear")[
        0
    ]
    return (image * (1 + clumps * float(random.uniform(0.1, 0.7)))).clamp_(0, 1)


def overexpose(image: Tensor, random: np.random.Generator) -> Tensor:
    """Stretch the contrast until shadows or highlights are lost."""
    low, high = (float(end) for end in np.sort(random.uniform(-0.2, 1.2, 2)))
    high = max(high, low + 0.35)
    return ((image - low) / (high - low)).clamp_(0, 1)


def smooth_out(image: Tensor, random: np.random.Generator) -> Tensor:
    """Apply a median or box filter, as noise reduction does."""
    pil = to_pil(image)
    if random.random() < 0.5:
        changed = pil.filter(ImageFilter.MedianFilter(int(random.choice([3, 5]))))
    else:
        changed = pil.filter(ImageFilter.BoxBlur(float(random.uniform(1, 4))))
    return as_tensor(np.array(changed), image).permute(2, 0, 1).div(255)


def compress_hard(image: Tensor, random: np.random.Generator) -> Tensor:
    """Compress to JPEG or WebP at quality 2 to 15, sometimes at half the size."""
    pil = to_pil(image)
    full = pil.size
    if random.random() < 0.4:
        pil = pil.resize((full[0] // 2, full[1] // 2), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    kind = "JPEG" if random.random() < 0.75 else "WEBP"
    pil.save(file, kind, quality=int(random.integers(2, 16)))
    with Image.open(file) as again:
        seen = np.array(again.convert("RGB").resize(full, Image.Resampling.BILINEAR))
    return as_tensor(seen, image).permute(2, 0, 1).div(255)


def emboss(image: Tensor, random: np.random.Generator) -> Tensor:
    """Emboss, lit from a random side, in colour or gray."""
    far = int(random.integers(1, 3))
    shift = [int(v) for v in random.choice([-far, 0, far], 2)]
    shift = shift if any(shift) else [far, far]
    flat = image.mean(dim=0, keepdim=True).expand_as(image) if random.random() < 0.5 else image
    lit = (0.5 + float(random.uniform(1, 3)) * (flat - flat.roll(shift, dims=(1, 2)))).clamp(0, 1)
    return torch.lerp(image, lit, float(random.uniform(0.5, 1)))


DISTORTIONS: tuple[Distortion, ...] = (
    perspective,
    perspective,
    occlude,
    occlude,
    stripes,
    mix_channels,
    mix_channels,
    colour_matrix,
    colour_matrix,
    wash,
    vignette,
    coarsen,
    ink,
    split_colours,
    speckle,
    overexpose,
    smooth_out,
    compress_hard,
    compress_hard,
    emboss,
)


def _cover(image: Tensor, random: np.random.Generator) -> Tensor:
    kind = int(random.integers(4))
    if kind == 0:
        return as_tensor(random.random(tuple(image.shape)), image)
    if kind == 1:
        return F.interpolate(
            F.adaptive_avg_pool2d(image[None], 6), image.shape[1:], mode="bilinear"
        )[0]
    return _plain(random, image)


def _plain(random: np.random.Generator, image: Tensor) -> Tensor:
    """A view of one random colour."""
    return random_colour(random, image)[:, None, None].expand_as(image)


def _homography(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The (3, 3) map that takes four points to four others."""
    rows = []
    for (x, y), (u, v) in zip(source, target, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    solved = np.linalg.solve(np.array(rows), target.ravel())
    return np.append(solved, 1.0).reshape(3, 3)
