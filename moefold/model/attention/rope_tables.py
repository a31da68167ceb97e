"""The angles of rotary positions, and how they stretch for contexts longer than those a model was trained on.

d frequencies for half the turning dims of a head, S positions. A frequency f turns once in 2 pi / f tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moefold.config.run import RopeConfig

FULL_TURN = 2 * math.pi
SMALLEST_RAMP = 1e-3  # dims between two equal limits of YaRN


def exact_range(*bounds: int) -> Tensor:
    """torch.arange in fp64, on the CPU."""
    dtype = torch.float64
    return torch.arange(*bounds, dtype=dtype, device="cpu")


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Tensor:
    """theta^(-2i/D) for i in 0..D/2, stretched as the configuration asks. fp64, on the CPU."""
    dims = exact_range(0, head_dim, 2)
    share = dims / head_dim
    plain = rope.theta**-share
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "llama3":
        keep = llama3_kept_share(plain, rope)
    else:
        keep = yarn_kept_share(head_dim, rope)
    stretch = 1 - keep
    stretched = stretch * plain / rope.factor
    return keep * plain + stretched


def llama3_kept_share(plain: Tensor, rope: RopeConfig) -> Tensor:
    """1 where a wave fits the original length often enough to stay as it is, 0 where it is stretched."""
    low = rope.low_frequency
    waves = rope.original_length * plain / FULL_TURN
    span = rope.high_frequency - low
    share = (waves - low) / span
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
    span = high - low
    ramp = (dims - low) / span
    return 1 - ramp.clamp(0, 1)


def dim_with_rotations(turns: float, head_dim: int, rope: RopeConfig) -> float:
    """The dim that turns so many times within the original length."""
    tokens_per_radian = rope.original_length / (turns * FULL_TURN)
    scaled = head_dim * math.log(tokens_per_radian)
    log_theta = math.log(rope.theta)
    return scaled / (2 * log_theta)


def rotary_tables(length: int, head_dim: int, rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """cos_Sd and sin_Sd in fp64. YaRN also sharpens attention: its factor goes into both, so into q k^T squared."""
    positions_S = exact_range(length)
    positions_S1 = positions_S[:, None]
    frequencies_d = rope_frequencies(head_dim, rope)
    angles = positions_S1 * frequencies_d
    sharpening = yarn_mscale(rope, rope.mscale)
    of_scores = yarn_mscale(rope, rope.mscale_all)
    mscale = sharpening / of_scores
    cos_Sd = angles.cos() * mscale
    sin_Sd = angles.sin() * mscale
    return cos_Sd, sin_Sd


def yarn_mscale(rope: RopeConfig, strength: float) -> float:
    if rope.scaling != "yarn":
        return 1.0
    log_factor = math.log(rope.factor)
    return 0.1 * strength * log_factor + 1


def softmax_scale(head_dim: int, rope: RopeConfig) -> float:
    """1 / sqrt(D), more where YaRN sharpens whole scores and not the turned dims alone."""
    mscale = yarn_mscale(rope, rope.mscale_all)
    return head_dim**-0.5 * mscale**2
