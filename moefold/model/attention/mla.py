"""Multi-head latent attention: keys and values of all heads come from one narrow latent, and so may queries.

    x_TD --down--> latent --norm--> q_rank  --up--> H queries [still | turning]
    x_TD --down--> latent --norm--> kv_rank --up--> H keys [still], H values
                   turning, one for all heads ----> H keys [still | turning]

Latents are made of this rank's own tokens and only then gathered over tp: they are narrower than the stream.

T tokens of this rank, C tokens of its cp rank (B sequences of S positions each); H heads, D their width, of which the
last dims turn by position; V width of a value head.
"""

from __future__ import annotations

import torch

from moefold.comm.collectives import all_gather, reduce_scatter
from moefold.config.run import ModelConfig
from moefold.layout.placement import sharded_over_tp
from moefold.model.attention.attention_base import AttentionBase
from moefold.model.attention.rotary import Rotary
from moefold.model.norm import AddNorm, RMSNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Linear, LinearGroup


class LatentAttention(AttentionBase):
    def __init__(self, model: ModelConfig, layer: int, choices: ModelParts):
        super().__init__(model, layer, choices.world)
        world, kernels = choices.world, choices.kernels
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
        self.core, self.context = Region(), choices.context
        self.rotary = Rotary(a.rope_dim, a.rope, choices.seq_len, kernels)

    def forward(
        self, x_TD: torch.Tensor, given_TD: torch.Tensor | None, share: TokenShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with what the layer before gives, and what attention gives for it."""
        x_TD, h_TD, _ = self.norm(x_TD, given_TD)
        *query, latent, turning = self.down(h_TD)
        source = self.query_norm(*query) if query else h_TD
        latents = (source, self.latent_norm(latent), turning)
        joined = all_gather(torch.cat(latents, dim=-1), self.tp)  # one message; all tokens meet this rank's heads
        source_C, latent_C, turning_C = joined.split([x.shape[-1] for x in latents], dim=-1)
        q = self.rotary.last(share.unflatten_sequences(self.query(source_C)), share)
        turned = self.rotary.last(share.unflatten_sequences(turning_C[:, None]), share)
        still, v = map(share.unflatten_sequences, self.up(latent_C))
        k = torch.cat((still, turned.expand(*still.shape[:-1], -1)), dim=-1)
        y_BSHV = self.core(self.context, q, k, v, share, self.attend_spec())
        return x_TD, reduce_scatter(self.out(y_BSHV.reshape(len(joined), -1)), self.tp)
