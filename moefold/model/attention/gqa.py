"""Grouped-query attention: project, rotate by position, attend, project back.

T tokens of this rank, C tokens of its cp rank (B sequences of S positions each); H query heads, D head width. Under
tensor parallelism each rank has its share of the heads and sees all C tokens; outside of attention and MLPs it has T.
"""

from __future__ import annotations

from torch import Tensor

from moefold.config.run import ModelConfig
from moefold.model.attention.attention_base import AttentionBase
from moefold.model.attention.rotary import Rotary
from moefold.model.norm import RMSNorm, RMSNormOverTp, RopeNorm, RopeNormOverTp
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import LinearGroup

HeadNorm = RMSNorm | RMSNormOverTp


class GroupedQueryAttention(AttentionBase):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        a = model.attention
        d = model.hidden
        head = a.head_dim
        bias = a.qkv_bias
        self.query = self.make_head_linear(d, a.heads, head, bias)
        self.key = self.make_head_linear(d, a.kv_heads, head, bias)
        self.value = self.make_head_linear(d, a.kv_heads, head, bias)
        projections = (self.query, self.key, self.value)
        self.projections = LinearGroup(self.world, *projections)
        width = a.heads * head
        self.out = self.make_out_linear(width, d, a.out_bias)
        self.gather_region = Region("norm")
        self.qk_norm = a.qk_norm
        self.rope_dim = a.rope_dim or head
        self.ropes_in_norm = self.rotates_all_that_is_normed(model)
        if a.qk_norm != "none":
            self.query_norm = self.make_head_norm(a.heads, model, parts)
            self.key_norm = self.make_head_norm(a.kv_heads, model, parts)
        kernels = parts.kernels
        self.rotary = Rotary(self.rope_dim, a.rope, parts.seq_len, kernels)

    def rotates_all_that_is_normed(self, model: ModelConfig) -> bool:
        """Whether norm and rope of queries and keys are one op: the rank has all that is normed together, and all dims
        of a head are rotated."""
        a = model.attention
        if a.qk_norm == "full":
            held_here = self.tp.size == 1
        else:
            held_here = a.qk_norm == "head"
        return held_here and self.rope_dim == a.head_dim

    def make_head_norm(self, heads: int, model: ModelConfig, parts: ModelParts) -> HeadNorm:
        width = model.attention.head_dim
        eps = model.norm_eps
        kernels = parts.kernels
        world = parts.world
        if self.qk_norm == "head":
            head_norm = RopeNorm if self.ropes_in_norm else RMSNorm
            return head_norm(width, eps, kernels, world)
        if self.ropes_in_norm:
            return RopeNormOverTp(heads * width, eps, kernels, world)
        return RMSNormOverTp(heads * width, eps, world)

    def forward(self, h_TD: Tensor, shard: TokenShard) -> Tensor:
        h_CD = self.gather_region(self.gather_tokens, h_TD)
        by_sequence = (shard.sequences, -1)
        h_BSD = h_CD.unflatten(0, by_sequence)
        q, k, v = self.projections(h_BSD)
        q, k = self.norm_and_rope(q, k, shard)
        y_CN = self.attend(q, k, v, shard)
        summand_CD = self.out_region(self.out, y_CN)
        return self.scatter_sums(summand_CD)

    def norm_and_rope(self, q: Tensor, k: Tensor, shard: TokenShard) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed if the model norms them, and rotated by position."""
        if self.ropes_in_norm:
            angles = self.rotary.angles(shard)
            q = self.query_norm(q, angles)
            k = self.key_norm(k, angles)
            return q, k
        if self.qk_norm != "none":
            q = self.apply_rmsnorm(q, self.query_norm)
            k = self.apply_rmsnorm(k, self.key_norm)
        q = self.rotary.first(q, shard)
        k = self.rotary.first(k, shard)
        return q, k

    def apply_rmsnorm(self, x_BSHD: Tensor, norm: HeadNorm) -> Tensor:
        if self.qk_norm == "head":
            return norm(x_BSHD)
        all_heads = x_BSHD.flatten(-2)
        return norm(all_heads).view_as(x_BSHD)
