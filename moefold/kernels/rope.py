"""Rotary positions: the pair (x_i, x_{i + D/2}) of a head turns by the angle of its position.

B sequences, S positions, H heads, D head width.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random


@op
def rope(x_BSHD: torch.Tensor, cos_Sd: torch.Tensor, sin_Sd: torch.Tensor) -> torch.Tensor:
    """`cos_Sd` and `sin_Sd` hold the angles of half a head, in fp32 or better."""
    cos, sin = cos_Sd[:, None, :], sin_Sd[:, None, :]
    a, b = x_BSHD.to(torch.promote_types(x_BSHD.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BSHD.dtype)


@rope.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for b, s, h, d in [(1, 1, 1, 2), (2, 7, 3, 16), (2, 64, 4, 64)]:
        angle = random(device, wide, s, d // 2, scale=3.0)
        yield Case(f"{b}x{s} {h} heads of {d}", (random(device, dtype, b, s, h, d), angle.cos(), angle.sin()))
