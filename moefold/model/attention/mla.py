"""Multi-head latent attention: keys and values of all heads come from one narrow latent, and so may queries.

    h_TD --down--> latent --norm--> q_rank  --up--> H queries [nope | rope]
    h_TD --down--> latent --norm--> kv_rank --up--> H keys [nope], H values
                   k_rope, one for all heads -----> H keys [nope | rope]

Latents are computed from this rank's own tokens and then gathered over tp: they are narrower than the residual stream.

T tokens of this rank, C tokens of its cp rank (B sequences of S positions each); H heads, D their width, of which the
last dims are rotated by position (rope); V width of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.config.run import ModelConfig
from moefold.model.attention.attention_base import AttentionBase
from moefold.model.attention.rotary import Rotary
from moefold.model.norm import RMSNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import LinearGroup


class LatentAttention(AttentionBase):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        a = model.attention
        value_dim = a.value_dim or a.head_dim
        self.make_down_projections(model, parts)
        # Up to the heads.
        nope_dim = a.head_dim - a.rope_dim
        latent = a.kv_rank
        self.key = self.make_head_linear(latent, a.heads, nope_dim)
        self.value = self.make_head_linear(latent, a.heads, value_dim)
        self.up = LinearGroup(self.world, self.key, self.value)
        self.up_region = Region("up")
        width = a.heads * value_dim
        self.out = self.make_out_linear(width, model.hidden, a.out_bias)
        kernels = parts.kernels
        self.rotary = Rotary(a.rope_dim, a.rope, parts.seq_len, kernels)

    def make_down_projections(self, model: ModelConfig, parts: ModelParts) -> None:
        """To the latents of queries, if there are any, and of keys and values, each with its norm; and the part of the
        keys that is rotated."""
        a = model.attention
        d = model.hidden
        bias = a.qkv_bias
        eps = model.norm_eps
        kernels = parts.kernels
        world = parts.world
        down = []
        self.has_query_latent = a.q_rank > 0
        if self.has_query_latent:
            self.query_down = self.make_linear(d, a.q_rank, bias)
            self.query_norm = RMSNorm(a.q_rank, eps, kernels, world)
            down.append(self.query_down)
        query_width = a.q_rank or d
        self.query = self.make_head_linear(query_width, a.heads, a.head_dim)
        self.latent = self.make_linear(d, a.kv_rank, bias)
        self.latent_norm = RMSNorm(a.kv_rank, eps, kernels, world)
        self.turning = self.make_linear(d, a.rope_dim, bias)
        down += [self.latent, self.turning]
        self.down = LinearGroup(world, *down)

    def forward(self, h_TD: Tensor, shard: TokenShard) -> Tensor:
        *query, latent, k_rope = self.down(h_TD)
        query_source = query[0] if query else h_TD
        q, k, v = self.up_region(self.norm_and_project_up, query_source, latent, k_rope, shard)
        y_CN = self.attend(q, k, v, shard)
        summand_CD = self.out_region(self.out, y_CN)
        return self.scatter_sums(summand_CD)

    def norm_and_project_up(
        self, query_source_T: Tensor, latent_T: Tensor, k_rope_T: Tensor, shard: TokenShard
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, from the latents of this rank's tokens."""
        if self.has_query_latent:
            query_source_T = self.query_norm(query_source_T)
        latents = (query_source_T, self.latent_norm(latent_T), k_rope_T)
        widths = [x.shape[-1] for x in latents]
        joined = torch.cat(latents, dim=-1)
        joined_C = self.gather_tokens(joined)  # one message
        by_sequence = (shard.sequences, -1)
        joined_BS = joined_C.unflatten(0, by_sequence)
        query_source_BS, latent_BS, k_rope_BS = joined_BS.split(widths, dim=-1)
        return self.project_up(query_source_BS, latent_BS, k_rope_BS, shard)

    def project_up(
        self, query_source_BS: Tensor, latent_BS: Tensor, k_rope_BS: Tensor, shard: TokenShard
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = self.query(query_source_BS)
        q = self.rotary.last(q, shard)
        k_rope_BS1D = k_rope_BS.unsqueeze(2)
        k_rope = self.rotary.last(k_rope_BS1D, shard)
        k_nope, v = self.up(latent_BS)
        by_head = k_nope.shape[:-1]
        k_rope = k_rope.expand(*by_head, -1)  # the same for all heads
        parts = (k_nope, k_rope)
        k = torch.cat(parts, dim=-1)
        return q, k, v
