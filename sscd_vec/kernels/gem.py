"""Generalized-mean pooling in one pass: ``y = (mean_s max(x_s, eps)^p)^(1/p)`` over the pixels s.

Memory is all it costs. Forward reads x once and writes y: ``(S + 1) b`` bytes per channel of S
pixels of b bytes, the least possible (half precisions also keep y in float32 for the backward, 4
bytes more). Backward reads x, y and dy once and writes dx once: ``2 S b + b + 4`` bytes, where
autograd's chain of clamp, pow, mean and pow moves about nine times x.

A program takes a tile of channels and pixels, whatever the strides. Maps of 7 x 7 or 9 x 9 pixels
in NCHW would leave lanes of such a tile idle and start every row at an odd address; there a program
takes a flat piece of memory, whole rows of it, in loads of 16 bytes, and adds up the rows by a
segmented scan.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op

from sscd_vec.kernels.launch import jit, start
from sscd_vec.kernels.objective import Context, refuse_second_derivative

TILE = 1024  # elements of x a program holds at a time
FLAT_TILE = 2048  # elements of a flat piece
FLAT_PIXELS = 256  # rows of at most as many pixels are taken flat
FLAT_ROWS = 8  # rows of a flat piece are a multiple of this, so that it starts at 16 bytes


@jit
def floored(x: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """``max(x, eps)``; NaN stays NaN, as in torch, so that training notices it."""
    return tl.maximum(x, eps, propagate_nan=tl.PropagateNan.ALL)


@jit
def gem_forward_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    channels: tl.tensor,
    pixels: tl.tensor,
    stride_n: tl.tensor,
    stride_c: tl.tensor,
    stride_s: tl.tensor,
    p: tl.tensor,
    eps: tl.tensor,
    POWER: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """``y_c = (1/S sum_s max(x_cs, eps)^p)^(1/p)``.

    POWER is p if that is 1 or 3, and 0 for any other, whose powers are summed as
    ``log2 sum 2^(p log2 x)`` under a running maximum: nothing overflows, whatever p.
    """
    blocks = tl.cdiv(channels, BLOCK_C)
    n = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    # int64: a batch of feature maps passes 2^31 elements.
    base = n.to(tl.int64) * stride_n + c.to(tl.int64) * stride_c  # (BLOCK_C,)
    total = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
    top = tl.full((BLOCK_C,), -1.0e38, tl.float32)
    scaled = tl.zeros((BLOCK_C,), tl.float32)
    for first in range(0, pixels, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        counted = (s < pixels)[None, :]
        mask = inside[:, None] & counted
        at = s.to(tl.int64) * stride_s
        x = tl.load(x_ptr + base[:, None] + at[None, :], mask=mask, other=1.0).to(tl.float32)
        x = floored(x, eps)
        if POWER == 1:
            total += tl.where(counted, x, 0.0)
        elif POWER == 3:
            total += tl.where(counted, x * x * x, 0.0)
        else:
            power = tl.where(counted, p * tl.log2(x), float("-inf"))
            # Kept finite: an infinite x then ends as an infinite y, not as inf - inf.
            higher = tl.minimum(tl.maximum(top, tl.max(power, axis=1)), 1.0e38)
            scaled = scaled * tl.exp2(top - higher)
            scaled += tl.sum(tl.exp2(power - higher[:, None]), axis=1)
            top = higher
    if POWER == 1:
        y = tl.sum(total, axis=1) / pixels
    elif POWER == 3:
        y = tl.exp2(tl.log2(tl.sum(total, axis=1) / pixels) / 3.0)
    else:
        y = tl.exp2((top + tl.log2(scaled / pixels)) / p)
    out = n.to(tl.int64) * channels + c
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=inside)
    if KEEP:
        tl.store(wide_ptr + out, y, mask=inside)


@jit
def slope(
    x: tl.tensor,
    y: tl.tensor,
    share: tl.tensor,
    p: tl.tensor,
    eps: tl.tensor,
    POWER: tl.constexpr,
) -> tl.tensor:
    """``share (x / y)^(p-1)`` where ``x >= eps``, else 0."""
    ratio = floored(x, eps) / y
    if POWER == 1:
        dx = share + tl.zeros_like(x)
    elif POWER == 3:
        dx = share * ratio * ratio
    else:
        dx = share * tl.exp2((p - 1.0) * tl.log2(ratio))
    return tl.where(x >= eps, dx, 0.0)


@jit
def gem_backward_kernel(
    x_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    channels: tl.tensor,
    pixels: tl.tensor,
    stride_n: tl.tensor,
    stride_c: tl.tensor,
    stride_s: tl.tensor,
    dx_stride_n: tl.tensor,
    dx_stride_c: tl.tensor,
    dx_stride_s: tl.tensor,
    p: tl.tensor,
    eps: tl.tensor,
    POWER: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """``dx_cs = dy_c / S (x_cs / y_c)^(p-1)`` where ``x_cs >= eps``, else 0."""
    blocks = tl.cdiv(channels, BLOCK_C)
    n = tl.program_id(0) // blocks
    c = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    base = n.to(tl.int64) * stride_n + c.to(tl.int64) * stride_c
    dx_base = n.to(tl.int64) * dx_stride_n + c.to(tl.int64) * dx_stride_c
    row = n.to(tl.int64) * channels + c
    y = tl.load(wide_ptr + row, mask=inside, other=1.0)[:, None]
    share = tl.load(dy_ptr + row, mask=inside, other=0.0).to(tl.float32)[:, None] / pixels
    for first in range(0, pixels, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        mask = inside[:, None] & (s < pixels)[None, :]
        at = s.to(tl.int64) * stride_s
        x = tl.load(x_ptr + base[:, None] + at[None, :], mask=mask, other=1.0).to(tl.float32)
        dx = slope(x, y, share, p, eps, POWER)
        at = s.to(tl.int64) * dx_stride_s
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + dx_base[:, None] + at[None, :], dx, mask=mask)


@jit
def add_segment(
    left: tl.tensor, left_first: tl.tensor, right: tl.tensor, right_first: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Sums that start anew where a segment does; associative."""
    return tl.where(right_first != 0, right, left + right), left_first | right_first


@jit
def flat_forward_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    POWER: tl.constexpr,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``y_r = (1/S sum_s max(x_rs, eps)^p)^(1/p)`` of ROWS consecutive rows; p is 1 or 3."""
    first = tl.program_id(0) * ROWS
    at = tl.arange(0, BLOCK)
    mask = at < tl.minimum(rows - first, ROWS) * PIXELS
    begin = tl.program_id(0).to(tl.int64) * (ROWS * PIXELS)
    x = floored(tl.load(x_ptr + begin + at, mask=mask, other=0.0).to(tl.float32), eps)
    if POWER == 3:
        x = x * x * x
    starts = (at % PIXELS == 0).to(tl.int32)
    total, _ = tl.associative_scan((x, starts), 0, add_segment)
    # The sums meet in memory: as many roots as rows, not as pixels.
    ends = mask & (at % PIXELS == PIXELS - 1)
    tl.store(wide_ptr + first + at // PIXELS, total, mask=ends)
    tl.debug_barrier()
    r = tl.arange(0, BLOCK_R)
    inside = (r < ROWS) & (first + r < rows)
    y = tl.load(wide_ptr + first + r, mask=inside, other=1.0) / PIXELS
    if POWER == 3:
        y = tl.exp2(tl.log2(y) / 3.0)
    tl.store(wide_ptr + first + r, y, mask=inside)
    tl.store(y_ptr + first + r, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit
def flat_backward_kernel(
    x_ptr: tl.tensor,
    wide_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    rows: tl.tensor,
    p: tl.tensor,
    eps: tl.tensor,
    POWER: tl.constexpr,
    PIXELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``dx_rs = dy_r / S (x_rs / y_r)^(p-1)`` where ``x_rs >= eps``, else 0, of ROWS rows."""
    at = tl.arange(0, BLOCK)
    first = tl.program_id(0) * ROWS
    row = first + at // PIXELS
    mask = at < tl.minimum(rows - first, ROWS) * PIXELS
    begin = tl.program_id(0).to(tl.int64) * (ROWS * PIXELS)
    x = tl.load(x_ptr + begin + at, mask=mask, other=1.0).to(tl.float32)
    y = tl.load(wide_ptr + row, mask=mask, other=1.0)
    share = tl.load(dy_ptr + row, mask=mask, other=0.0).to(tl.float32) / PIXELS
    dx = slope(x, y, share, p, eps, POWER)
    tl.store(dx_ptr + begin + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def gem_pool_triton(x: Tensor, p: float = 3.0, eps: float = 1e-6) -> Tensor:
    """``gem_pool`` by the fused kernels; float32, float16 or bfloat16, summed in float32.

    Args:
        x: (n, c, h, w) feature map of any strides.
        p: Exponent, > 0.
        eps: Floor of the activations, > 0.

    Returns:
        (n, c) pooled features of ``x``'s dtype.
    """
    pooled: Tensor = _gem(x, float(p), float(eps))[0]
    return pooled


def blocks(x: Tensor) -> tuple[int, int]:
    """(channels, pixels) of a tile of x (n, c, pixels), longer along the contiguous axis."""
    pixels = x.shape[2]
    if x.stride(1) == 1 and pixels > 1:
        block_c = min(128, triton.next_power_of_2(x.shape[1]))
        return block_c, min(TILE // block_c, triton.next_power_of_2(pixels))
    block_s = min(256, triton.next_power_of_2(pixels))
    return min(TILE // block_s, triton.next_power_of_2(x.shape[1])), block_s


def flat_rows(x: Tensor) -> int:
    """Rows (channels) of a flat piece of x (n, c, pixels); 0 if x is better taken in tiles."""
    pixels = x.shape[2]
    if not x.is_contiguous() or pixels % FLAT_ROWS == 0 or pixels > FLAT_PIXELS:
        return 0
    return FLAT_TILE // pixels // FLAT_ROWS * FLAT_ROWS


@custom_op("sscd_vec::gem_pool", mutates_args=())
def _gem(x: Tensor, p: float, eps: float) -> tuple[Tensor, Tensor]:
    """(n, c) pooled features, and the same in float32 for the backward (empty if they are)."""
    x = x.flatten(2)  # a view if the rows of pixels follow each other, else a copy
    n, channels, pixels = x.shape
    y = x.new_empty(n, channels)
    keep = x.dtype != torch.float32
    wide = y.new_empty(y.shape if keep else 0, dtype=torch.float32)
    rows, power = flat_rows(x), _power(p)
    if rows and power and y.numel():
        start(
            flat_forward_kernel,
            (triton.cdiv(y.numel(), rows),),
            x,
            *(y, wide if keep else y, y.numel(), eps),
            POWER=power,
            PIXELS=pixels,
            ROWS=rows,
            BLOCK_R=triton.next_power_of_2(rows),
            BLOCK=FLAT_TILE,
        )
    elif y.numel():
        block_c, block_s = blocks(x)
        start(
            gem_forward_kernel,
            (n * triton.cdiv(channels, block_c),),
            x,
            *(y, wide, channels, pixels, *x.stride(), p, eps),
            POWER=power,
            KEEP=keep,
            BLOCK_C=block_c,
            BLOCK_S=block_s,
        )
    return y, wide


@_gem.register_fake
def _(x: Tensor, p: float, eps: float) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape[:2])
    return y, y.new_empty(0 if x.dtype == torch.float32 else y.shape, dtype=torch.float32)


@custom_op("sscd_vec::gem_pool_backward", mutates_args=())
def _gem_backward(dy: Tensor, x: Tensor, y: Tensor, p: float, eps: float) -> Tensor:
    """``dx`` of x's shape and strides; y in float32."""
    size, x = x.shape, x.flatten(2)
    n, channels, pixels = x.shape
    dx = torch.empty_like(x)
    rows = flat_rows(x)
    if rows and dx.numel():
        start(
            flat_backward_kernel,
            (triton.cdiv(n * channels, rows),),
            x,
            *(y, dy.contiguous(), dx, n * channels, p, eps),
            POWER=_power(p),
            PIXELS=pixels,
            ROWS=rows,
            BLOCK=FLAT_TILE,
        )
    elif dx.numel():
        block_c, block_s = blocks(x)
        start(
            gem_backward_kernel,
            (n * triton.cdiv(channels, block_c),),
            x,
            *(y, dy.contiguous(), dx, channels, pixels, *x.stride(), *dx.stride(), p, eps),
            POWER=_power(p),
            BLOCK_C=block_c,
            BLOCK_S=block_s,
        )
    return dx.view(size)


@_gem_backward.register_fake
def _(dy: Tensor, x: Tensor, y: Tensor, p: float, eps: float) -> Tensor:
    return torch.empty_like(x.flatten(2)).view(x.shape)


def _keep(ctx: Context, inputs: tuple[Tensor, float, float], output: tuple[Tensor, Tensor]) -> None:
    (x, *ctx.settings), (y, wide) = inputs, output
    ctx.mark_non_differentiable(wide)
    ctx.save_for_backward(x, y if x.dtype == torch.float32 else wide)


def _backward(ctx: Context, dy: Tensor, unused: Tensor) -> tuple[Tensor, None, None]:
    return _gem_backward(dy, *ctx.saved_tensors, *ctx.settings), None, None


_gem.register_autograd(_backward, setup_context=_keep)
refuse_second_derivative(_gem_backward, "gem_pool")


def _power(p: float) -> int:
    return int(p) if p in (1.0, 3.0) else 0
