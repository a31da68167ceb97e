"""Multi-head latent attention: keys and values of all heads come from one narrow latent, and so may queries.

    h_TD --down--> latent --norm--> q_rank  --up--> H queries [nope | rope]
    h_TD --down--> latent --norm--> kv_rank --up--> H keys [nope], H values
                   k_rope, one for all heads -----> H keys [nope | rope]

Latents are computed from this rank's own tokens and then gathered over tp, by one all-gather of what three projections
read: they are narrower than the residual stream.

T tokens of this rank, C tokens of its cp rank (B sequences of S positions each); H heads, D their width, of which the
last dims are rotated by position (rope); V width of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, bind_collective
from moefold.config.run import ModelConfig
from moefold.kernels.linear.matmul import matmul
from moefold.kernels.linear.product import PLAIN
from moefold.layout.past_keys import PastKeys
from moefold.model.attention.attention_base import AttentionBase, HeadVectors, Rotary
from moefold.model.norm import RMSNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Linear, LinearGroup


def join_latents(latent_BS: Tensor, k_rope_BS1D: Tensor) -> Tensor:
    """(B, S, 1, latent + rope): one key for all heads, whose first columns are its value."""
    latent_BS1 = latent_BS.unsqueeze(2)
    return torch.cat((latent_BS1, k_rope_BS1D), dim=-1)


def matrix_of_heads(project: Linear) -> Tensor:
    """(H, outputs, inputs): the matrix of a projection to heads, its recipe and its adapter included."""
    weight = project.weight
    if project.recipe is PLAIN and project.lora is None:
        return weight
    inputs = weight.shape[-1]
    identity = torch.eye(inputs, dtype=weight.dtype, device=weight.device)
    return project(identity).permute(1, 2, 0)


def multiply_heads(x_BHD: Tensor, w_HDN: Tensor) -> Tensor:
    """(B, H, N): each head by its own matrix."""
    x_HBD = x_BHD.transpose(0, 1)
    y_HBN = matmul(x_HBD, w_HDN)
    return y_HBN.transpose(0, 1)


class LatentAttention(AttentionBase):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(model, layer, parts)
        a = model.attention
        self.gather_latents = bind_collective(all_gather, self.tp)
        self.make_down_projections(model, parts)
        # Up to the heads.
        latent = a.kv_rank
        heads = a.heads
        nope_dim = a.head_dim - a.rope_dim
        value_dim = a.value_dim or a.head_dim
        self.key = self.make_head_linear(latent, heads, nope_dim)
        self.value = self.make_head_linear(latent, heads, value_dim)
        projections = (self.key, self.value)
        world = self.world
        self.up = LinearGroup(world, *projections)
        self.up_region = Region("up")
        all_heads = heads * value_dim
        d = model.hidden
        out_bias = a.out_bias
        self.out = self.make_out_linear(all_heads, d, out_bias)
        kernels = parts.kernels
        rope_dim = a.rope_dim
        seq_len = parts.seq_len
        self.rotary = Rotary(rope_dim, a.rope, seq_len, kernels)

    def make_down_projections(self, model: ModelConfig, parts: ModelParts) -> None:
        """To the latents of queries, if there are any, and of keys and values, each with its norm; and the part of the
        keys that is rotated."""
        a = model.attention
        d = model.hidden
        bias = a.qkv_bias
        eps = model.norm_eps
        down = []
        # queries
        latent = a.q_rank
        self.has_query_latent = latent > 0
        if self.has_query_latent:
            self.query_down = self.make_linear(d, latent, bias)
            self.query_norm = RMSNorm(latent, eps, parts)
            down.append(self.query_down)
        query_width = latent or d
        heads = a.heads
        width = a.head_dim
        self.query = self.make_head_linear(query_width, heads, width)
        # keys and values
        latent = a.kv_rank
        self.latent = self.make_linear(d, latent, bias)
        self.latent_norm = RMSNorm(latent, eps, parts)
        rope_dim = a.rope_dim
        self.turning = self.make_linear(d, rope_dim, bias)
        down += [self.latent, self.turning]
        self.down = LinearGroup(self.world, *down)

    def forward(self, h_TD: Tensor, shard: TokenShard) -> Tensor:
        latents = self.down(h_TD)
        if not self.has_query_latent:
            latents = [h_TD, *latents]
        past = shard.past
        if past is not None and past.has_prompt:
            query_source_T, latent_T, k_rope_T = latents
            q, latent_BS, k_rope = self.queries_and_latents(query_source_T, latent_T, k_rope_T, shard)
            y_BHV = self.attend_to_latents(q, latent_BS, k_rope, past)
            return self.project_out(y_BHV, shard)
        project = self.norm_and_project_up
        projected = self.up_region(project, *latents, shard)
        heads = HeadVectors(*projected)
        return self.attend(heads, shard)

    def norm_and_project_up(
        self,
        query_source_T: Tensor,
        latent_T: Tensor,
        k_rope_T: Tensor,
        shard: TokenShard,
    ) -> HeadVectors:
        """Queries, keys and values of this rank's heads, from the latents of this rank's tokens."""
        q, latent_BS, k_rope = self.queries_and_latents(query_source_T, latent_T, k_rope_T, shard)
        self.keep_prompt(shard, join_latents(latent_BS, k_rope))
        k_nope, v = self.up(latent_BS)
        by_head = k_nope.shape[:-1]
        k_rope = k_rope.expand(*by_head, -1)  # the same for all heads
        parts = (k_nope, k_rope)
        k = torch.cat(parts, dim=-1)
        return HeadVectors(q, k, v)

    def queries_and_latents(
        self,
        query_source_T: Tensor,
        latent_T: Tensor,
        k_rope_T: Tensor,
        shard: TokenShard,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries of this rank's heads; the latents of all tokens of this cp rank, and their rotated keys."""
        if self.has_query_latent:
            query_source_T = self.query_norm(query_source_T)
        latent_T = self.latent_norm(latent_T)
        # the latents of all tokens of this cp rank, in one message
        latents = (query_source_T, latent_T, k_rope_T)
        joined_T = torch.cat(latents, dim=-1)
        joined_C = self.gather_latents(joined_T)
        by_sequence = (shard.sequences, -1)
        joined_BS = joined_C.unflatten(0, by_sequence)
        widths = [latent.shape[-1] for latent in latents]
        gathered = joined_BS.split(widths, dim=-1)
        query_source_BS, latent_BS, k_rope_BS = gathered
        rotary = self.rotary
        q = self.query(query_source_BS)
        q = rotary.last(q, shard)
        k_rope_BS1D = k_rope_BS.unsqueeze(2)
        k_rope = rotary.last(k_rope_BS1D, shard)
        return q, latent_BS, k_rope

    def attend_to_latents(self, q_BSHD: Tensor, latent_BS: Tensor, k_rope: Tensor, past: PastKeys) -> Tensor:
        """(B, H, V): attention of one new position, to latents as they are kept. The projections up to keys and values
        are applied to queries and to sums of latents, so that neither keys nor values are made.

            q . (W_key latent) = (W_key^T q) . latent        sum p (W_value latent) = W_value (sum p latent)
        """
        q_BHD = q_BSHD[:, 0]
        key_HDl = matrix_of_heads(self.key)
        _, nope_dim, latent = key_HDl.shape
        q_nope_BHD = q_BHD[..., :nope_dim]
        q_rope = q_BHD[..., nope_dim:]
        q_latent = multiply_heads(q_nope_BHD, key_HDl)
        q = torch.cat((q_latent, q_rope), dim=-1)
        made = join_latents(latent_BS, k_rope)[:, 0]
        y_BHl = self.attend_to_past(q, [made], latent, past)
        value_HVl = matrix_of_heads(self.value)
        return multiply_heads(y_BHl, value_HVl.mT)

    def clip_factors(self, ratio_H: Tensor) -> dict[str, Tensor]:
        """The rotated key serves all heads and stays: its share of the logits is scaled by the query's rows."""
        query = self.query.weight
        heads, width, _ = query.shape
        key = self.key.weight
        _, nope_dim, _ = key.shape
        rope_dim = width - nope_dim
        ratio_H1 = ratio_H[:, None]
        root_H1 = ratio_H1.sqrt()
        nope = root_H1.expand(heads, nope_dim)
        rope = ratio_H1.expand(heads, rope_dim)
        parts = (nope, rope)
        both = torch.cat(parts, dim=1)
        return {"query.weight": both, "key.weight": nope}
