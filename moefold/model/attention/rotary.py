"""The angles that this rank's tokens are rotated by, kept in fp32 or better on the device that uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.run import RopeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.norm.rope import RopeAngles, rope
from moefold.model.attention.rope_tables import rotary_tables
from moefold.model.token_layout import TokenShard


class Rotary:
    """Rotates the first or the last `dims` of a head; the other dims stay as they are."""

    def __init__(self, dims: int, config: RopeConfig, seq_len: int, kernels: BoundKernels):
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        cos_Sd, sin_Sd = rotary_tables(seq_len, dims, config)
        self.tables = RopeAngles(cos_Sd.to(wide), sin_Sd.to(wide))
        self.dims = dims
        self.rope = kernels[rope]

    def angles(self, shard: TokenShard) -> RopeAngles:
        """The tables on the right device, at the positions this rank holds."""
        cos_Sd, sin_Sd = self.tables
        if cos_Sd.device != shard.device:
            cos_Sd, sin_Sd = cos_Sd.to(shard.device), sin_Sd.to(shard.device)
            self.tables = RopeAngles(cos_Sd, sin_Sd)
        held = slice(shard.length) if shard.cp.size == 1 else shard.local_positions
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
