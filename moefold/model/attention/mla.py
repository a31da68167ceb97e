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

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.config.run import ModelConfig
from moefold.layout.placement import sharded_over_tp
from moefold.model.attention.attention_base import AttentionBase
from moefold.model.attention.context_parallel import AttendSpec
from moefold.model.attention.rotary import Rotary
from moefold.model.norm import AddNorm, RMSNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Linear, LinearGroup


class LatentAttention(AttentionBase):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts.world)
        world, kernels = parts.world, parts.kernels
        a, d, std, eps = model.attention, model.hidden, model.init_std, model.norm_eps
        value_dim, self.nope_dim = a.value_dim or a.head_dim, a.head_dim - a.rope_dim
        self.tp = world.axis("tp")
        self.norm = AddNorm(d, eps, kernels, world)
        if a.q_rank:
            self.query_down = Linear(world, d, a.q_rank, bias=a.qkv_bias, std=std)
            self.query_norm = RMSNorm(a.q_rank, eps, kernels, world)
        self.query = Linear(world, a.q_rank or d, a.heads, a.head_dim, std=std, placement=sharded_over_tp(0))
        self.latent = Linear(world, d, a.kv_rank, bias=a.qkv_bias, std=std)
        self.latent_norm = RMSNorm(a.kv_rank, eps, kernels, world)
        self.turning = Linear(world, d, a.rope_dim, bias=a.qkv_bias, std=std)
        self.key = Linear(world, a.kv_rank, a.heads, self.nope_dim, std=std, placement=sharded_over_tp(0))
        self.value = Linear(world, a.kv_rank, a.heads, value_dim, std=std, placement=sharded_over_tp(0))
        self.down = LinearGroup(world, *([self.query_down] if a.q_rank else []), self.latent, self.turning)
        self.up = LinearGroup(world, self.key, self.value)
        out_std = std / (2 * model.layers) ** 0.5
        self.out = Linear(world, a.heads * value_dim, d, bias=a.out_bias, std=out_std, placement=sharded_over_tp(1))
        self.core, self.up_region, self.out_region = Region("core"), Region("up"), Region("out")
        self.context = parts.context
        self.rotary = Rotary(a.rope_dim, a.rope, parts.seq_len, kernels)

    def forward(self, h_TD: torch.Tensor, shard: TokenShard) -> torch.Tensor:
        """Attention over normed tokens; the residual connection is the block's."""
        *query, latent, k_rope = self.down(h_TD)
        query_source = self.query_norm(*query) if query else h_TD
        latents = (query_source, self.latent_norm(latent), k_rope)
        widths = [x.shape[-1] for x in latents]
        joined = all_gather(torch.cat(latents, dim=-1), self.tp)  # one message; all tokens meet this rank's heads
        query_source_C, latent_C, k_rope_C = joined.split(widths, dim=-1)
        q, k, v = self.up_region(self.project_up, query_source_C, latent_C, k_rope_C, shard)
        spec = AttendSpec(self.scale, self.window, self.sinks)
        y_BSHV = self.core(self.context, q, k, v, shard, spec)
        summand_CD = self.out_region(self.out, y_BSHV.reshape(len(joined), -1))
        return reduce_scatter(summand_CD, self.tp)

    def project_up(
        self, query_source_C: torch.Tensor, latent_C: torch.Tensor, k_rope_C: torch.Tensor, shard: TokenShard
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of this rank's heads, from the latents."""
        q = shard.unflatten_sequences(self.query(query_source_C))
        q = self.rotary.last(q, shard)
        k_rope = shard.unflatten_sequences(k_rope_C[:, None])
        k_rope = self.rotary.last(k_rope, shard)
        k_nope, v = map(shard.unflatten_sequences, self.up(latent_C))
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return q, k, v
