"""Grouped-query attention: project, turn by position, attend, project back.

T tokens of B sequences of S positions; H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from moefold.config.run import ModelConfig
from moefold.kernels.bind import Kernels
from moefold.model.attention.positions import rotary_tables
from moefold.model.norm import RMSNorm
from moefold.model.steps import Region
from moefold.precision.linear import Linear


class GroupedQueryAttention(nn.Module):
    def __init__(self, model: ModelConfig, seq_len: int, kernels: Kernels):
        super().__init__()
        a, d, std = model.attention, model.hidden, model.init_std
        self.qk_norm = a.qk_norm
        self.norm = RMSNorm(d, model.norm_eps, kernels)
        self.query = Linear(d, a.heads, a.head_dim, bias=a.qkv_bias, std=std)
        self.key = Linear(d, a.kv_heads, a.head_dim, bias=a.qkv_bias, std=std)
        self.value = Linear(d, a.kv_heads, a.head_dim, bias=a.qkv_bias, std=std)
        self.out = Linear(a.heads * a.head_dim, d, bias=a.out_bias, std=std / (2 * model.layers) ** 0.5)
        if a.qk_norm != "none":
            per_head = a.qk_norm == "head"
            self.query_norm = RMSNorm(a.head_dim * (1 if per_head else a.heads), model.norm_eps, kernels)
            self.key_norm = RMSNorm(a.head_dim * (1 if per_head else a.kv_heads), model.norm_eps, kernels)
        self.kernels = kernels
        self.core = Region()
        self.tables = rotary_tables(seq_len, a.head_dim, a.rope)

    def forward(self, x_TD: torch.Tensor, sequences: int) -> torch.Tensor:
        """What attention adds to the residual stream."""
        h_TD = self.norm(x_TD)
        q, k, v = (self.split(project(h_TD), sequences) for project in (self.query, self.key, self.value))
        if self.qk_norm != "none":
            q, k = self.normed(q, self.query_norm), self.normed(k, self.key_norm)
        cos, sin = self.angles(q)
        q, k = self.kernels.rope(q, cos, sin), self.kernels.rope(k, cos, sin)
        y_BSHD = self.core(self.kernels.attention, q, k, v)
        return self.out(y_BSHD.reshape(x_TD.shape[0], -1))

    def split(self, x_THD: torch.Tensor, sequences: int) -> torch.Tensor:
        return x_THD.unflatten(0, (sequences, -1))

    def normed(self, x_BSHD: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        if self.qk_norm == "head":
            return norm(x_BSHD)
        return norm(x_BSHD.flatten(-2)).view_as(x_BSHD)

    def angles(self, q_BSHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The tables on the right device, cut to the length of these sequences."""
        if self.tables[0].device != q_BSHD.device:
            self.tables = tuple(t.to(q_BSHD.device) for t in self.tables)
        length = q_BSHD.shape[1]
        return self.tables[0][:length], self.tables[1][:length]
