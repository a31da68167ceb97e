"""The angles of rotary positions, and how they stretch for contexts longer than those a model was trained on.

d frequencies for half the turning dims of a head, S positions. A frequency f turns once in 2 pi / f tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moefold.config.run import RopeConfig

SMALLEST_RAMP = 1e-3  # dims between two equal limits of YaRN


def exact_range(*bounds: int) -> Tensor:
    """torch.arange in fp64, on the CPU."""
    return torch.arange(*bounds, dtype=torch.float64, device="cpu")


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """theta^(-2i/D) for i in 0..D/2, stretched as the configuration asks. fp64, on the CPU."""
    dims = exact_range(0, head_dim, 2)
    plain = rope.theta ** -(dims / head_dim)
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        keep = llama3_kept_share(plain, rope)
    else:
        keep = yarn_kept_share(head_dim, rope)
    stretched = (1 - keep) * plain / rope.factor
    return keep * plain + stretched


def llama3_kept_share(plain: Tensor, rope: RopeConfig) -> Tensor:
    """1 where a wave fits the original length often enough to stay as it is, 0 where it is stretched."""
    waves = rope.original_length * plain / (2 * math.pi)
    span = rope.high_frequency - rope.low_frequency
    share = (waves - rope.low_frequency) / span
    return share.clamp(0, 1)


def yarn_kept_share(head_dim: int, rope: RopeConfig) -> Tensor:
    """The same between the dims that turn `beta_fast` and `beta_slow` times within the original length. Where the first
    dim is the higher one, the ramp falls instead of rising, as in published code."""
    low = dim_with_rotations(rope.beta_fast, head_dim, rope)
    high = dim_with_rotations(rope.beta_slow, head_dim, rope)
    if rope.round_dims:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    if low == high:
        high += SMALLEST_RAMP
    dims = exact_range(head_dim // 2)
    ramp = (dims - low) / (high - low)
    return 1 - ramp.clamp(0, 1)


def dim_with_rotations(turns: float, head_dim: int, rope: RopeConfig) -> float:
    """The dim that turns so many times within the original length."""
    tokens_per_radian = rope.original_length / (turns * 2 * math.pi)
    scaled = head_dim * math.log(tokens_per_radian)
    return scaled / (2 * math.log(rope.theta))


def rotary_tables(length: int, head_dim: int, rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """cos_Sd and sin_Sd in fp64. YaRN also sharpens attention: its factor goes into both, so into q k^T squared."""
    positions_S = exact_range(length)
    angles = positions_S[:, None] * rope_frequencies(head_dim, rope)
    sharpening = yarn_mscale(rope, rope.mscale)
    mscale = sharpening / yarn_mscale(rope, rope.mscale_all)
    return angles.cos() * mscale, angles.sin() * mscale


def yarn_mscale(rope: RopeConfig, strength: float) -> float:
    if rope.scaling != "yarn":
        return 1.0
    return 0.1 * strength * math.log(rope.factor) + 1


def softmax_scale(head_dim: int, rope: RopeConfig) -> float:
    """1 / sqrt(D), more where YaRN sharpens whole scores and not the turned dims alone."""
    mscale = yarn_mscale(rope, rope.mscale_all)
    return head_dim**-0.5 * mscale**2
