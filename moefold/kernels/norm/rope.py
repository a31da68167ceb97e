"""Rotary positions: the pair (x_i, x_{i + D/2}) of a head is rotated by the angle of its position.

B sequences, S positions, H heads, D head width, d = D / 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn


class RopeAngles(NamedTuple):
    """Cosines and sines of the rotation at each position, in fp32 or better. They are constants."""

    cos_Sd: torch.Tensor
    sin_Sd: torch.Tensor


@register_op
def rope(x_BSHD: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
    cos, sin = angles.cos_Sd[:, None, :], angles.sin_Sd[:, None, :]
    wide = torch.promote_types(x_BSHD.dtype, cos.dtype)
    a, b = x_BSHD.to(wide).chunk(2, dim=-1)
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return rotated.to(x_BSHD.dtype)


@rope.register_fast("triton")
def rope_triton(x_BSHD: torch.Tensor, angles: RopeAngles) -> torch.Tensor:
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

        return rotate_heads(gradients[0], None, ctx.angles, back=True), None


@rope.register_cases
def rope_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for b, s, h, d in [(1, 1, 1, 2), (2, 7, 3, 16), (2, 64, 4, 64)]:
        x = seeded_randn(device, dtype, b, s, h, d)
        angles = random_rope_angles(device, dtype, s, d)
        yield KernelCase(f"{b}x{s} {h} heads of {d}", (x, angles))


def random_rope_angles(device: str, dtype: torch.dtype, s: int, d: int) -> RopeAngles:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = seeded_randn(device, wide, s, d // 2, scale=3.0)
    return RopeAngles(angle.cos(), angle.sin())
