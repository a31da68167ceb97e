"""Grouped-query attention: project, rotate by position, attend, project back.

T tokens of this rank, C tokens of its cp rank (B sequences of S positions each); H query heads, D head width. Under
tensor parallelism each rank has its share of the heads and sees all C tokens; outside of attention and MLPs it has T.
With fewer key/value heads than tp ranks every rank projects all of them and takes the one that its queries share; the
gradient of their weights is the sum over ranks, each of which has the part of its own queries.
"""

from __future__ import annotations

from torch import Tensor

from moefold.config.run import ModelConfig
from moefold.model.attention.attention_base import AttentionBase, HeadVectors, Rotary
from moefold.model.norm import RMSNorm, RMSNormOverTp, RopeNorm, RopeNormOverTp
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import LinearGroup


class GroupedQueryAttention(AttentionBase):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        a = model.attention
        d = model.hidden
        width = a.head_dim
        bias = a.qkv_bias
        heads = a.heads
        kv_heads = a.kv_heads
        self.ranks_per_kv_head = max(1, self.tp.size // kv_heads)
        self.query = self.make_head_linear(d, heads, width, bias)
        make_kv_linear = self.make_whole_head_linear if self.shares_kv_heads else self.make_head_linear
        self.key = make_kv_linear(d, kv_heads, width, bias)
        self.value = make_kv_linear(d, kv_heads, width, bias)
        projections = (self.query, self.key, self.value)
        world = self.world
        self.projections = LinearGroup(world, *projections)
        all_heads = heads * width
        out_bias = a.out_bias
        self.out = self.make_out_linear(all_heads, d, out_bias)
        self.gather_region = Region("norm")
        self.qk_norm = a.qk_norm
        rope_dim = a.rope_dim or width
        self.rope_dim = rope_dim
        self.ropes_in_norm = self.rotates_all_that_is_normed(model)
        if a.qk_norm != "none":
            self.query_norm = self.make_head_norm(heads, model, parts)
            self.key_norm = self.make_head_norm(kv_heads, model, parts)
            if self.shares_kv_heads and a.qk_norm == "full":
                self.key_norm = RMSNorm(kv_heads * width, model.norm_eps, parts)
        kernels = parts.kernels
        seq_len = parts.seq_len
        self.rotary = Rotary(rope_dim, a.rope, seq_len, kernels)

    @property
    def shares_kv_heads(self) -> bool:
        """Whether several tp ranks share a key/value head."""
        return self.ranks_per_kv_head > 1

    def rotates_all_that_is_normed(self, model: ModelConfig) -> bool:
        """Whether norm and rope of queries and keys are one op: the rank has all that is normed together, and all dims
        of a head are rotated."""
        a = model.attention
        held_here = a.qk_norm == "head"
        if a.qk_norm == "full":
            held_here = self.tp.size == 1
        rotates_all = self.rope_dim == a.head_dim
        return held_here and rotates_all

    def make_head_norm(self, heads: int, model: ModelConfig, parts: ModelParts) -> RMSNorm:
        width = model.attention.head_dim
        eps = model.norm_eps
        if self.qk_norm == "head":
            norm = RopeNorm if self.ropes_in_norm else RMSNorm
            return norm(width, eps, parts)
        norm = RopeNormOverTp if self.ropes_in_norm else RMSNormOverTp
        all_heads = heads * width
        return norm(all_heads, eps, parts)

    def forward(self, h_TD: Tensor, shard: TokenShard) -> Tensor:
        by_head, held = self.head_projections.to_heads(h_TD, self.projections, self.gather_region, shard)
        heads = HeadVectors(*by_head)
        q, k, v = self.norm_and_rope(heads, held)
        if self.shares_kv_heads:
            k = self.head_of_rank(k)
            v = self.head_of_rank(v)
        past = shard.past
        if past is not None and past.has_prompt:
            made = (k[:, 0], v[:, 0])
            width = v.shape[-1]
            y_BHV = self.attend_to_past(q[:, 0], made, width, past)
            return self.project_out(y_BHV, held)
        self.keep_prompt(held, k, v)
        seen = HeadVectors(q, k, v)
        return self.attend(seen, held)

    def head_of_rank(self, x_BSGD: Tensor) -> Tensor:
        """The key or value head that this rank's queries share, of all heads. A copy: the others are freed."""
        head = self.tp.index // self.ranks_per_kv_head
        return x_BSGD.narrow(2, head, 1).contiguous()

    def clip_factors(self, ratio_H: Tensor) -> dict[str, Tensor]:
        """Both projections, or the query's alone where key heads are shared. Biases are rows of one column."""
        weight = self.query.weight
        heads, width, _ = weight.shape
        kv_heads = len(self.key.weight)
        is_shared = heads > kv_heads or self.shares_kv_heads
        factor_H = ratio_H
        if not is_shared:
            factor_H = ratio_H.sqrt()
        factor_H1 = factor_H[:, None]
        factor_HD = factor_H1.expand(heads, width)
        projections = {"query": self.query}
        if not is_shared:
            projections["key"] = self.key
        factors: dict[str, Tensor] = {}
        for name, layer in projections.items():
            for parameter, _ in layer.named_parameters():
                factors[f"{name}.{parameter}"] = factor_HD
        return factors

    def norm_and_rope(self, heads: HeadVectors, shard: TokenShard) -> HeadVectors:
        """Queries and keys normed, if the model norms them, and rotated by position; values as they are."""
        q, k, v = heads
        rotary = self.rotary
        if self.ropes_in_norm:
            angles = rotary.angles(shard)
            q = self.query_norm(q, angles)
            k = self.key_norm(k, angles)
            return HeadVectors(q, k, v)
        if self.qk_norm != "none":
            q = self.apply_rmsnorm(q, self.query_norm)
            k = self.apply_rmsnorm(k, self.key_norm)
        q = rotary.first(q, shard)
        k = rotary.first(k, shard)
        return HeadVectors(q, k, v)

    def apply_rmsnorm(self, x_BSHD: Tensor, norm: RMSNorm) -> Tensor:
        if self.qk_norm == "head":
            return norm(x_BSHD)
        x_BSN = x_BSHD.flatten(-2)
        normed_BSN = norm(x_BSN)
        return normed_BSN.view_as(x_BSHD)
