"""The angles of rotary positions, and how they stretch for contexts longer than those a model was trained on.

d frequencies for half the turning dims of a head, S positions. A frequency f turns once in 2 pi / f tokens.
"""

from __future__ import annotations

import math

import torch

from moefold.config.run import RopeConfig


def rope_frequencies(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """theta^(-2i/D) for i in 0..D/2, stretched as the configuration asks. fp64, on the CPU."""
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    keep = llama3_kept_share(plain, rope) if rope.scaling == "llama3" else yarn_kept_share(head_dim, rope)
    return keep * plain + (1 - keep) * plain / rope.factor


def llama3_kept_share(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """1 where a wave fits the original length often enough to stay as it is, 0 where it is stretched."""
    waves = rope.original_length * plain / (2 * math.pi)
    return ((waves - rope.low_frequency) / (rope.high_frequency - rope.low_frequency)).clamp(0, 1)


def yarn_kept_share(head_dim: int, rope: RopeConfig) -> torch.Tensor:
    """The same between the dims that turn `beta_fast` and `beta_slow` times within the original length."""

    def dim_with_rotations(turns: float) -> float:
        return head_dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_with_rotations(rope.beta_fast), dim_with_rotations(rope.beta_slow)
    if rope.round_dims:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)
    return 1 - ramp.clamp(0, 1)


def rotary_tables(length: int, head_dim: int, rope: RopeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos_Sd and sin_Sd in fp64. YaRN also sharpens attention: its factor goes into both, so into q k^T squared."""
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * rope_frequencies(head_dim, rope)
    mscale = yarn_mscale(rope, rope.mscale) / yarn_mscale(rope, rope.mscale_all)
    return angles.cos() * mscale, angles.sin() * mscale


def yarn_mscale(rope: RopeConfig, strength: float) -> float:
    return 0.1 * strength * math.log(rope.factor) + 1 if rope.scaling == "yarn" else 1.0


def softmax_scale(head_dim: int, rope: RopeConfig) -> float:
    """1 / sqrt(D), more where YaRN sharpens whole scores and not the turned dims alone."""
    return head_dim**-0.5 * yarn_mscale(rope, rope.mscale_all) ** 2
