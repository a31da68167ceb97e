"""Grouped-query attention: project, turn by position, attend, project back.

T tokens of this rank, C tokens of its cp rank (B sequences of S positions each); H query heads, D head width. Under
tensor parallelism each rank has its share of the heads and sees all C tokens; outside of attention and MLPs it has T.
"""

from __future__ import annotations

import torch
from torch import nn

from moefold.comm.collectives import gather, scatter_sum
from moefold.config.run import ModelConfig
from moefold.layout.placement import over_tp
from moefold.model.attention.positions import rotary_tables
from moefold.model.choices import Choices
from moefold.model.norm import RMSNorm, RMSNormOverTp
from moefold.model.share import Share
from moefold.model.steps import Region
from moefold.precision.linear import Linear


class GroupedQueryAttention(nn.Module):
    def __init__(self, model: ModelConfig, choices: Choices):
        super().__init__()
        world, kernels = choices.world, choices.kernels
        a, d, std = model.attention, model.hidden, model.init_std
        self.qk_norm, self.tp = a.qk_norm, world.axis("tp")
        self.norm = RMSNorm(d, model.norm_eps, kernels, world)
        heads, kv_heads = (a.heads, a.head_dim), (a.kv_heads, a.head_dim)
        self.query = Linear(world, d, *heads, bias=a.qkv_bias, std=std, placement=over_tp(0))
        self.key = Linear(world, d, *kv_heads, bias=a.qkv_bias, std=std, placement=over_tp(0))
        self.value = Linear(world, d, *kv_heads, bias=a.qkv_bias, std=std, placement=over_tp(0))
        out_std = std / (2 * model.layers) ** 0.5
        self.out = Linear(world, a.heads * a.head_dim, d, bias=a.out_bias, std=out_std, placement=over_tp(1))
        if a.qk_norm == "head":
            self.query_norm = RMSNorm(a.head_dim, model.norm_eps, kernels, world)
            self.key_norm = RMSNorm(a.head_dim, model.norm_eps, kernels, world)
        elif a.qk_norm == "full":
            self.query_norm = RMSNormOverTp(a.heads * a.head_dim, model.norm_eps, world)
            self.key_norm = RMSNormOverTp(a.kv_heads * a.head_dim, model.norm_eps, world)
        self.kernels = kernels
        self.core, self.context = Region(), choices.context
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.tables = tuple(t.to(wide) for t in rotary_tables(choices.seq_len, a.head_dim, a.rope))

    def forward(self, x_TD: torch.Tensor, share: Share) -> torch.Tensor:
        """What attention adds to the residual stream."""
        h_CD = gather(self.norm(x_TD), self.tp)  # all tokens of this cp rank meet this rank's heads
        q, k, v = (self.split(project(h_CD), share) for project in (self.query, self.key, self.value))
        if self.qk_norm != "none":
            q, k = self.normed(q, self.query_norm), self.normed(k, self.key_norm)
        cos, sin = self.angles(share)
        q, k = self.kernels.rope(q, cos, sin), self.kernels.rope(k, cos, sin)
        y_BSHD = self.core(self.context, q, k, v, share)
        summand_CD = self.out(y_BSHD.reshape(h_CD.shape[0], -1))
        return scatter_sum(summand_CD, self.tp)  # add up all heads; each rank keeps its own tokens

    def split(self, x_CHD: torch.Tensor, share: Share) -> torch.Tensor:
        return x_CHD.unflatten(0, (share.sequences, -1))

    def normed(self, x_BSHD: torch.Tensor, norm: RMSNorm | RMSNormOverTp) -> torch.Tensor:
        if self.qk_norm == "head":
            return norm(x_BSHD)
        return norm(x_BSHD.flatten(-2)).view_as(x_BSHD)

    def angles(self, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables on the right device, at the positions this rank holds."""
        if self.tables[0].device != share.device:
            self.tables = tuple(t.to(share.device) for t in self.tables)
        cos, sin = self.tables
        if share.cp.size == 1:
            return cos[: share.length], sin[: share.length]
        return cos[share.positions], sin[share.positions]
