"""Rotary positions: the pair (x_i, x_{i + D/2}) of a head turns by the angle of its position.

B sequences, S positions, H heads, D head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from moefold.kernels.registry import Case, op, random


class Angles(NamedTuple):
    """By which half a head turns at each position, in fp32 or better. They are constants."""

    cos_Sd: torch.Tensor
    sin_Sd: torch.Tensor


@op
def rope(x_BSHD: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = angles.cos_Sd[:, None, :], angles.sin_Sd[:, None, :]
    a, b = x_BSHD.to(torch.promote_types(x_BSHD.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHD.dtype)


@rope.fast("triton")
def _(x_BSHD: torch.Tensor, angles: Angles) -> torch.Tensor:
    return Turn.apply(x_BSHD, angles)  # pyright: ignore[reportReturnType]


class Turn(torch.autograd.Function):
    """The gradient turns back. Nothing but the angles is kept."""

    @staticmethod
    def forward(ctx, x_BSHD, angles):
        from moefold.kernels import rope_kernels

        ctx.angles = angles
        return rope_kernels.turn(x_BSHD, None, angles)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels import rope_kernels

        return rope_kernels.turn(gradients[0], None, ctx.angles, back=True), None


@rope.cases
def _(device: str, dtype: torch.dtype):
    for b, s, h, d in [(1, 1, 1, 2), (2, 7, 3, 16), (2, 64, 4, 64)]:
        x, angles = random(device, dtype, b, s, h, d), some_angles(device, dtype, s, d)
        yield Case(f"{b}x{s} {h} heads of {d}", (x, angles))


def some_angles(device: str, dtype: torch.dtype, s: int, d: int) -> Angles:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angle = random(device, wide, s, d // 2, scale=3.0)
    return Angles(angle.cos(), angle.sin())
