"""Rotary positions: the pair (x_i, x_{i + D/2}) of a head is rotated by the angle of its position; by itself, or fused
with the RMSNorm of queries or keys before it, which is over each head or over all heads of a token.

B sequences, S positions, H heads, D head width, d = D / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.norm.rmsnorm import rmsnorm
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op


class RopeAngles(NamedTuple):
    """Cosines and sines of the rotation at each position, in fp32 or better. They are constants. Where positions differ
    from sequence to sequence, they are (B, S, d)."""

    cos_Sd: Tensor
    sin_Sd: Tensor


@register_op
def rope(x_BSHD: Tensor, angles: RopeAngles) -> Tensor:
    cos = angles.cos_Sd.unsqueeze(-2)
    sin = angles.sin_Sd.unsqueeze(-2)
    dtype = torch.promote_types(x_BSHD.dtype, cos.dtype)
    wide = x_BSHD.to(dtype)
    a, b = wide.chunk(2, dim=-1)
    first = a * cos - b * sin
    second = b * cos + a * sin
    both = (first, second)
    rotated = torch.cat(both, dim=-1)
    return rotated.to(x_BSHD.dtype)


@rope.register_fast("triton")
def rope_triton(x_BSHD: Tensor, angles: RopeAngles) -> Tensor:
    return RopeFunction.apply(x_BSHD, angles)  # pyright: ignore[reportReturnType]


class RopeFunction(torch.autograd.Function):
    """The gradient is rotated back. Only the angles are saved."""

    @staticmethod
    def forward(ctx, x_BSHD, angles):
        from moefold.kernels.norm.rope_triton import rotate_heads

        ctx.angles = angles
        return rotate_heads(x_BSHD, None, angles)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.norm.rope_triton import rotate_heads

        dy_BSHD = gradients[0]
        dx_BSHD = rotate_heads(dy_BSHD, None, ctx.angles, back=True)
        return dx_BSHD, None


@rope.register_fast("rotate_back")
def rope_rotate_back(x_BSHD: Tensor, angles: RopeAngles) -> Tensor:
    return RotateFunction.apply(x_BSHD, angles)  # pyright: ignore[reportReturnType]


class RotateFunction(torch.autograd.Function):
    """The gradient is rotated back, by the opposite angles. Only the angles are saved."""

    @staticmethod
    def forward(ctx, x_BSHD, angles):
        ctx.save_for_backward(*angles)
        return rotate_in_place_of_halves(x_BSHD, angles, 1)

    @staticmethod
    def backward(ctx, *gradients):
        angles = RopeAngles(*ctx.saved_tensors)
        dx_BSHD = rotate_in_place_of_halves(gradients[0], angles, -1)
        return dx_BSHD, None


def rotate_in_place_of_halves(x_BSHD: Tensor, angles: RopeAngles, sign: int) -> Tensor:
    """Both halves are written where they belong, in two passes each."""
    heads = x_BSHD.shape[-2]
    cos = angles_of_heads(angles.cos_Sd, heads)
    sin = angles_of_heads(angles.sin_Sd, heads)
    dtype = torch.promote_types(x_BSHD.dtype, cos.dtype)
    wide = x_BSHD.to(dtype)
    rotated = torch.empty_like(wide, memory_format=torch.contiguous_format)
    a, b = wide.chunk(2, dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    torch.mul(a, cos, out=first)
    first.addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=second)
    second.addcmul_(a, sin, value=sign)
    return rotated.to(x_BSHD.dtype)


def angles_of_heads(angles_Sd: Tensor, heads: int) -> Tensor:
    """Angles for each head. On a CPU an angle that all heads share is read in a loop of d steps for every head; a copy
    for each of them is small beside a batch, and is read in one."""
    shape = (*angles_Sd.shape[:-1], heads, angles_Sd.shape[-1])
    angles_SHd = angles_Sd.unsqueeze(-2).expand(shape)
    return angles_SHd.contiguous() if angles_Sd.device.type == "cpu" else angles_SHd


ROPE_CASE_SIZES = [  # B, S, H, D
    (1, 1, 1, 2),
    (2, 7, 3, 16),
    (2, 64, 4, 64),
]


@rope.register_cases
def rope_cases(draw: CaseInputs) -> Cases:
    for b, s, h, d in ROPE_CASE_SIZES:
        x = draw.normal(b, s, h, d)
        angles = random_rope_angles(draw, s, d)
        name = f"{b}x{s} {h} heads of {d}"
        yield KernelCase(name, (x, angles))
        by_sequence = random_rope_angles(draw, b, s, d)
        yield KernelCase(f"{name}, positions by sequence", (x, by_sequence))


def random_rope_angles(draw: CaseInputs, *sizes: int) -> RopeAngles:
    """Of sizes (S, D), or (B, S, D) where positions differ from sequence to sequence."""
    *rows, d = sizes
    half = d // 2
    angle = draw.wide(*rows, half, scale=3.0)
    return RopeAngles(angle.cos(), angle.sin())


HeadNorm = Callable[[Tensor, Tensor, float], Tensor]
RotateHeads = Callable[[Tensor, RopeAngles], Tensor]


@register_op
def norm_rope(
    x_BSHD: Tensor,
    w: Tensor,
    angles: RopeAngles,
    eps: float,
    norm: HeadNorm = rmsnorm,
    rotate: RotateHeads = rope,
) -> Tensor:
    """A weight (D,) is for each head, one (H x D,) for all of them. The reference composes the given norm and rope."""
    each_head = w.numel() == x_BSHD.shape[-1]
    rows = x_BSHD if each_head else x_BSHD.flatten(-2)
    normed = norm(rows, w, eps)
    normed_BSHD = normed.view(x_BSHD.shape)
    return rotate(normed_BSHD, angles)


@norm_rope.register_fast("triton")
def norm_rope_triton(
    x_BSHD: Tensor,
    w: Tensor,
    angles: RopeAngles,
    eps: float,
    norm: HeadNorm = rmsnorm,
    rotate: RotateHeads = rope,
) -> Tensor:
    return NormRopeFunction.apply(x_BSHD, w, angles, eps)  # pyright: ignore[reportReturnType]


class NormRopeFunction(torch.autograd.Function):
    """Saves its input alone: backward computes the norm again."""

    @staticmethod
    def forward(ctx, x_BSHD, w, angles, eps):
        from moefold.kernels.norm import rope_triton

        ctx.save_for_backward(x_BSHD)
        ctx.weight = w  # the Parameter object, not a saved tensor: its gradient sink is an attribute
        ctx.angles = angles
        ctx.eps = eps
        return rope_triton.rotate_heads(x_BSHD, w, angles, eps)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.norm import rope_triton

        (x_BSHD,) = ctx.saved_tensors
        dy_BSHD = gradients[0]
        fixed = (ctx.weight, ctx.angles, ctx.eps)
        dx_BSHD, dw = rope_triton.rotate_heads_backward(dy_BSHD, x_BSHD, *fixed)
        return dx_BSHD, dw, None, None


NORM_ROPE_CASE_SIZES = [  # B, S, H, D
    (1, 1, 2, 4),
    (2, 7, 3, 16),
    (2, 40, 4, 64),
]


@norm_rope.register_cases
def norm_rope_cases(draw: CaseInputs) -> Cases:
    for b, s, h, d in NORM_ROPE_CASE_SIZES:
        x = draw.normal(b, s, h, d)
        angles = random_rope_angles(draw, s, d)
        about = f"{b}x{s} {h} heads of {d}, over"
        w = draw.normal(d, seed=1)
        yield KernelCase(f"{about} each head", (x, w, angles, 1e-6))
        w = draw.normal(h * d, seed=1)
        yield KernelCase(f"{about} all heads", (x, w, angles, 1e-6))
