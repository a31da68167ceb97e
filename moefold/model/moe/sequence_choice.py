"""Choices that a token does not make for itself: expert choice, Sinkhorn (tokens and experts matched by optimal
transport), and round robin for benchmarks.

The first two use later tokens to choose for earlier ones, which a causal model must accept explicitly
(`moe.router.looks_ahead`). The choice is made over one sequence at a time, so that a batch may be split in any way.

B sequences of S tokens, T tokens of this rank, E experts, K choices of a token (for expert choice, on average).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moefold.config.run import MoeConfig

SINKHORN_ROUNDS = 16  # a fixed number, so that the host never reads a residual; near-even logits need fewer


def expert_choice(logits_BSE: Tensor, moe: MoeConfig) -> Tensor:
    """Each expert takes the tokens of largest score, up to its capacity; of equals, the earlier. The result is
    (B, S, E): the expert's own id where it took the token, -1 elsewhere."""
    _, tokens, experts = logits_BSE.shape
    factor = moe.capacity.factor or 1.0
    even_share = factor * tokens * moe.top_k / experts
    capacity = math.ceil(even_share)
    scores_BSE = logits_BSE.softmax(-1)
    order_BSE = from_largest(scores_BSE, dim=1)
    best_BCE = order_BSE[:, :capacity]
    taken_BSE = torch.zeros_like(logits_BSE, dtype=torch.bool)
    taken_BSE.scatter_(1, best_BCE, True)
    device = logits_BSE.device
    every_expert = torch.arange(experts, device=device)
    return torch.where(taken_BSE, every_expert, -1)


def sinkhorn_choice(logits_BSE: Tensor, moe: MoeConfig) -> Tensor:
    """Each token's K best experts by a transport plan whose rows (tokens) and columns (experts) have even sums:
    (B, S, K)."""
    plan_BSE = sinkhorn_log_plan(logits_BSE)
    order_BSE = from_largest(plan_BSE, dim=-1)
    return order_BSE[..., : moe.top_k]


def from_largest(x: Tensor, dim: int) -> Tensor:
    """Indices along a dim from the largest value to the smallest; of equals, the first comes first."""
    return x.argsort(dim=dim, descending=True, stable=True)


def sinkhorn_log_plan(logits_BSE: Tensor) -> Tensor:
    """Logarithm of the transport plan: logits plus one potential for each token and each expert, so that every token
    sums to 1 and every expert to S / E."""
    _, tokens, experts = logits_BSE.shape
    log_share = math.log(tokens / experts)
    plan_BSE = logits_BSE
    for _ in range(SINKHORN_ROUNDS):
        log_sum_B1E = plan_BSE.logsumexp(1, keepdim=True)
        plan_BSE = plan_BSE - log_sum_B1E + log_share
        log_sum_BS1 = plan_BSE.logsumexp(2, keepdim=True)
        plan_BSE = plan_BSE - log_sum_BS1
    return plan_BSE


def round_robin_experts(number_T: Tensor, moe: MoeConfig) -> Tensor:
    """Token t gets experts t x K up to t x K + K - 1, modulo E: an even load on any layout."""
    k = moe.top_k
    device = number_T.device
    choice_K = torch.arange(k, device=device)
    number_T1 = number_T[:, None]
    first_T1 = number_T1 * k
    return (first_T1 + choice_K) % moe.experts
