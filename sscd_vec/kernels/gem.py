"""Generalized-mean pooling in one pass: ``y = (mean_s max(x_s, eps)^p)^(1/p)`` over the pixels s.

Memory is all it costs. Forward reads x once and writes y: ``(S + 1) b`` bytes per channel of S
pixels of b bytes, the least possible (half precisions also keep y in float32 for the backward, 4
bytes more). Backward reads x, y and dy once and writes dx once: ``2 S b + b + 4`` bytes, where
autograd's chain of clamp, pow, mean and pow moves about nine times x.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sscd_vec.kernels.derivative import Context, only_first
from sscd_vec.kernels.launch import FUSED, jit

TILE = 1024  # elements of x a program holds at a time


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
    top = tl.full((BLOCK_C,), -3.0e38, tl.float32)
    scaled = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, pixels, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        counted = (s < pixels)[None, :]
        mask = inside[:, None] & counted
        at = s.to(tl.int64) * stride_s
        x = tl.load(x_ptr + base[:, None] + at[None, :], mask=mask, other=1.0).to(tl.float32)
        x = tl.maximum(x, eps)
        if POWER == 1:
            total += tl.where(counted, x, 0.0)
        elif POWER == 3:
            total += tl.where(counted, x * x * x, 0.0)
        else:
            power = tl.where(counted, p * tl.log2(x), float("-inf"))
            higher = tl.maximum(top, tl.max(power, axis=1))
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
    for start in range(0, pixels, BLOCK_S):
        s = start + tl.arange(0, BLOCK_S)
        mask = inside[:, None] & (s < pixels)[None, :]
        at = s.to(tl.int64) * stride_s
        x = tl.load(x_ptr + base[:, None] + at[None, :], mask=mask, other=1.0).to(tl.float32)
        ratio = tl.maximum(x, eps) / y
        if POWER == 1:
            dx = share + tl.zeros_like(x)
        elif POWER == 3:
            dx = share * ratio * ratio
        else:
            dx = share * tl.exp2((p - 1.0) * tl.log2(ratio))
        dx = tl.where(x >= eps, dx, 0.0)
        at = s.to(tl.int64) * dx_stride_s
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + dx_base[:, None] + at[None, :], dx, mask=mask)


def gem_pool_triton(x: Tensor, p: float = 3.0, eps: float = 1e-6) -> Tensor:
    """``gem_pool`` by the fused kernels; float32, float16 or bfloat16, summed in float32.

    Args:
        x: (n, c, h, w) feature map of any strides.
        p: Exponent, > 0.
        eps: Floor of the activations, > 0.

    Returns:
        (n, c) pooled features of ``x``'s dtype.
    """
    pooled: Tensor = _GeM.apply(x, float(p), float(eps))
    return pooled


def blocks(x: Tensor) -> tuple[int, int]:
    """(channels, pixels) of a tile of x (n, c, pixels), longer along the contiguous axis."""
    pixels = x.shape[2]
    if x.stride(1) == 1 and pixels > 1:
        block_c = min(128, triton.next_power_of_2(x.shape[1]))
        return block_c, min(TILE // block_c, triton.next_power_of_2(pixels))
    block_s = min(256, triton.next_power_of_2(pixels))
    return min(TILE // block_s, triton.next_power_of_2(x.shape[1])), block_s


class _GeM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, p: float, eps: float) -> Tensor:
        ctx.size = x.shape[2:]
        x = x.flatten(2)  # a view if the rows of pixels follow each other, else a copy
        n, channels, pixels = x.shape
        y = x.new_empty(n, channels)
        wide = y if x.dtype == torch.float32 else y.new_empty(y.shape, dtype=torch.float32)
        block_c, block_s = blocks(x)
        if y.numel():
            gem_forward_kernel[(n * triton.cdiv(channels, block_c),)](
                *(x, y, wide, channels, pixels, *x.stride(), p, eps),
                POWER=_power(p),
                KEEP=wide is not y,
                BLOCK_C=block_c,
                BLOCK_S=block_s,
                **FUSED,
            )
        ctx.save_for_backward(x, wide)
        ctx.p, ctx.eps = p, eps
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor, None, None]:
        x, wide = ctx.saved_tensors
        n, channels, pixels = x.shape
        dx = torch.empty_like(x.detach())
        block_c, block_s = blocks(x)
        if dx.numel():
            gem_backward_kernel[(n * triton.cdiv(channels, block_c),)](
                *(x, wide, dy.contiguous(), dx, channels, pixels),
                *(*x.stride(), *dx.stride(), ctx.p, ctx.eps),
                POWER=_power(ctx.p),
                BLOCK_C=block_c,
                BLOCK_S=block_s,
                **FUSED,
            )
        return only_first("gem_pool", dx.view(n, channels, *ctx.size), x, dy), None, None


def _power(p: float) -> int:
    return int(p) if p in (1.0, 3.0) else 0
