"""The angles that this rank's tokens turn by, kept in fp32 or better on the device that uses them."""

from __future__ import annotations

import torch

from moefold.config.run import RopeConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.norm.rope import RopeAngles, rope
from moefold.model.attention.rope_tables import rotary_tables
from moefold.model.token_layout import TokenShard


class Rotary:
    """Turns the first or the last `dims` of a head; the rest pass by."""

    def __init__(self, dims: int, config: RopeConfig, seq_len: int, kernels: BoundKernels):
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.tables = RopeAngles(*(t.to(wide) for t in rotary_tables(seq_len, dims, config)))
        self.dims, self.rope = dims, kernels[rope]

    def angles(self, share: TokenShard) -> RopeAngles:
        """The tables on the right device, at the positions this rank holds."""
        if self.tables.cos_Sd.device != share.device:
            self.tables = RopeAngles(*(t.to(share.device) for t in self.tables))
        held = slice(share.length) if share.cp.size == 1 else share.local_positions
        return RopeAngles(*(t[held] for t in self.tables))

    def first(self, x_BSHD: torch.Tensor, share: TokenShard) -> torch.Tensor:
        if self.dims == x_BSHD.shape[-1]:
            return self.rope(x_BSHD, self.angles(share))
        turning, passing = x_BSHD[..., : self.dims], x_BSHD[..., self.dims :]
        return torch.cat((self.rope(turning, self.angles(share)), passing), dim=-1)

    def last(self, x_BSHD: torch.Tensor, share: TokenShard) -> torch.Tensor:
        passing, turning = x_BSHD[..., : -self.dims], x_BSHD[..., -self.dims :]
        return torch.cat((passing, self.rope(turning, self.angles(share))), dim=-1)
