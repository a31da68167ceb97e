"""Queries and keys that are normed before they turn: over each head, or over all heads of a token together.

B sequences, S positions, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moefold.kernels.norm.rmsnorm import rmsnorm
from moefold.kernels.norm.rope import RopeAngles, random_rope_angles, rope
from moefold.kernels.registry import KernelCase, register_op, seeded_randn

HeadNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
RotateHeads = Callable[[torch.Tensor, RopeAngles], torch.Tensor]


@register_op
def norm_rope(
    x_BSHD: torch.Tensor,
    w: torch.Tensor,
    angles: RopeAngles,
    eps: float,
    norm: HeadNorm = rmsnorm,
    rotate: RotateHeads = rope,
) -> torch.Tensor:
    """A weight (D,) is for each head, one (H x D,) for all of them. The reference composes the given norm and rope."""
    each_head = w.numel() == x_BSHD.shape[-1]
    rows = x_BSHD if each_head else x_BSHD.flatten(-2)
    normed = norm(rows, w, eps)
    return rotate(normed.view(x_BSHD.shape), angles)


@norm_rope.register_fast("triton")
def norm_rope_triton(
    x_BSHD: torch.Tensor,
    w: torch.Tensor,
    angles: RopeAngles,
    eps: float,
    norm: HeadNorm = rmsnorm,
    rotate: RotateHeads = rope,
) -> torch.Tensor:
    return NormRopeFunction.apply(x_BSHD, w, angles, eps)  # pyright: ignore[reportReturnType]


class NormRopeFunction(torch.autograd.Function):
    """Keeps its input alone: what lies between norm and turn is made again."""

    @staticmethod
    def forward(ctx, x_BSHD, w, angles, eps):
        from moefold.kernels.norm import rope_triton

        ctx.save_for_backward(x_BSHD)
        ctx.weight, ctx.angles, ctx.eps = w, angles, eps  # the weight itself: it knows where its gradient goes
        return rope_triton.rotate_heads(x_BSHD, w, angles, eps)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.norm import rope_triton

        (x_BSHD,) = ctx.saved_tensors
        return *rope_triton.rotate_heads_backward(gradients[0], x_BSHD, ctx.weight, ctx.angles, ctx.eps), None, None


@norm_rope.register_cases
def _(device: str, dtype: torch.dtype):
    for b, s, h, d in [(1, 1, 2, 4), (2, 7, 3, 16), (2, 40, 4, 64)]:
        x, angles = seeded_randn(device, dtype, b, s, h, d), random_rope_angles(device, dtype, s, d)
        for over, size in {"each head": d, "all heads": h * d}.items():
            w = seeded_randn(device, dtype, size, seed=1)
            yield KernelCase(f"{b}x{s} {h} heads of {d}, over {over}", (x, w, angles, 1e-6))
