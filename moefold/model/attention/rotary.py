"""The angles that this rank's tokens are rotated by, kept in fp32 or better on the device that uses them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moefold.config.run import RopeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.norm.rope import RopeAngles, rope
from moefold.model.attention.rope_tables import rotary_tables
from moefold.model.token_layout import TokenShard


@lru_cache(maxsize=16)
def rope_angles(length: int, dims: int, config: RopeConfig, dtype: torch.dtype, device: torch.device) -> RopeAngles:
    """The tables of all positions on a device. All layers of a model have the same ones, so they share them."""
    with torch.inference_mode(False):  # tables made while generating are used in training too
        cos_Sd, sin_Sd = rotary_tables(length, dims, config)
        cos_Sd = cos_Sd.to(device, dtype)
        sin_Sd = sin_Sd.to(device, dtype)
        return RopeAngles(cos_Sd, sin_Sd)


class Rotary:
    """Rotates the first or the last `dims` of a head; the other dims stay as they are."""

    def __init__(self, dims: int, config: RopeConfig, seq_len: int, kernels: BoundKernels):
        self.dims = dims
        self.config = config
        self.seq_len = seq_len
        parameters = torch.get_default_dtype()
        self.dtype = torch.promote_types(parameters, torch.float32)
        self.rope = kernels[rope]

    def angles(self, shard: TokenShard) -> RopeAngles:
        """The tables at the positions that this rank holds."""
        device = shard.device
        cos_Sd, sin_Sd = rope_angles(self.seq_len, self.dims, self.config, self.dtype, device)
        held = slice(shard.length)
        if shard.cp.size > 1:
            held = shard.local_positions
        return RopeAngles(cos_Sd[held], sin_Sd[held])

    def first(self, x_BSHD: Tensor, shard: TokenShard) -> Tensor:
        angles = self.angles(shard)
        if self.dims == x_BSHD.shape[-1]:
            return self.rope(x_BSHD, angles)
        rotating = x_BSHD[..., : self.dims]
        staying = x_BSHD[..., self.dims :]
        rotated = self.rope(rotating, angles)
        return torch.cat((rotated, staying), dim=-1)

    def last(self, x_BSHD: Tensor, shard: TokenShard) -> Tensor:
        staying = x_BSHD[..., : -self.dims]
        rotating = x_BSHD[..., -self.dims :]
        rotated = self.rope(rotating, self.angles(shard))
        return torch.cat((staying, rotated), dim=-1)
