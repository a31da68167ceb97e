"""Rotary positions: the pair (x_i, x_{i + D/2}) of a head turns by the angle of its position.

B sequences, S positions, H heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


class RopeAngles(NamedTuple):
    """By which half a head turns at each position, in fp32 or better. They are constants."""

    cos_Sd: torch.Tensor
    sin_Sd: torch.Tensor


@register_op
def rope(x_BSHD: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    cos, sin = angles.cos_Sd[:, None, :], angles.sin_Sd[:, None, :]
    a, b = x_BSHD.to(torch.promote_types(x_BSHD.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHD.dtype)


@rope.register_fast("triton")
def _(x_BSHD: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    return RopeFunction.apply(x_BSHD, angles)  # pyright: ignore[reportReturnType]


class RopeFunction(torch.autograd.Function):
    """The gradient turns back. Nothing but the angles is kept."""

    @staticmethod
    def forward(ctx, x_BSHD, angles):
        from moefold.kernels.norm import rope_triton

        ctx.angles = angles
        return rope_triton.rotate_heads(x_BSHD, None, angles)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.norm import rope_triton

        return rope_triton.rotate_heads(gradients[0], None, ctx.angles, back=True), None


@rope.register_cases
def _(device: str, dtype: torch.dtype):
    for b, s, h, d in [(1, 1, 1, 2), (2, 7, 3, 16), (2, 64, 4, 64)]:
        x, angles = seeded_randn(device, dtype, b, s, h, d), random_rope_angles(device, dtype, s, d)
        yield KernelCase(f"{b}x{s} {h} heads of {d}", (x, angles))


def random_rope_angles(device: str, dtype: torch.dtype, s: int, d: int) -> RopeAngles:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = seeded_randn(device, wide, s, d // 2, scale=3.0)
    return RopeAngles(angle.cos(), angle.sin())
