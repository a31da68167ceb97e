"""A stand-in for the package deep_ep with the interface it documents, over plain collectives on the CPU.

Kept to what its documentation promises: a token travels once to each distinct rank of its experts; arriving choices are
numbered from zero on their rank, -1 for those of other ranks, with their weights zero; `combine` sums a token's copies
and its weights; with a `handle`, `dispatch` sends hidden states alone along the same way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer:
    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int):
        assert num_nvl_bytes > 0
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int):
        held = num_experts // self.ranks
        goes = torch.zeros(len(topk_idx), self.ranks + 1, dtype=torch.bool)
        goes.scatter_(1, torch.where(topk_idx >= 0, topk_idx // held, self.ranks), True)
        goes = goes[:, :-1]
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return goes.sum(0), None, per_expert, goes, None

    def send(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        goes, sent, got = handle
        rows = torch.cat([x[goes[:, r]] for r in range(self.ranks)])
        out = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), got, sent, group=self.group)
        return out

    def back(self, x: torch.Tensor, handle: Any) -> torch.Tensor:
        goes, sent, got = handle
        rows = x.new_empty(sum(sent), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), sent, got, group=self.group)
        total = torch.zeros(len(goes), *x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32))
        for r, part in enumerate(rows.split(sent)):
            total[goes[:, r]] += part
        return total.to(x.dtype)

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
    ):
        if handle is not None:
            return self.send(x, handle), None, None, None, None, None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert num_tokens_per_rank is not None
        assert num_tokens_per_expert is not None
        got = torch.empty_like(num_tokens_per_rank)
        dist.all_to_all_single(got, num_tokens_per_rank, group=self.group)
        handle = (is_token_in_rank, num_tokens_per_rank.tolist(), got.tolist())
        held = len(num_tokens_per_expert) // self.ranks
        ids = self.send(topk_idx, handle) - self.rank * held
        here = (ids >= 0) & (ids < held)
        weights = self.send(topk_weights, handle) * here
        of_each = torch.bincount(ids[here], minlength=held).tolist()
        return self.send(x, handle), torch.where(here, ids, -1), weights, of_each, handle, None

    def combine(self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None):
        weights = self.back(topk_weights, handle) if topk_weights is not None else None
        return self.back(x, handle), weights, None
