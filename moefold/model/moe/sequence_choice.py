"""Choices made for all tokens of a sequence together: experts choose tokens, or both are matched by optimal transport.

Both look at later tokens to choose for earlier ones, which a causal model must be told to accept
(`moe.router.looks_ahead`). The set that is chosen over is one sequence, so that a batch may be split in any way.

B sequences of S tokens, E experts, K choices of a token on average (exactly, for Sinkhorn).
"""

from __future__ import annotations

import math

import torch

from moefold.config.run import MoeConfig

SINKHORN_ROUNDS = 16  # of Sinkhorn: for near-even logits fewer do, and a fixed number needs no look at the result


def expert_choice(logits_BSE: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """Each expert takes its capacity of tokens, those that like it best: (B, S, E) with the expert's own number where
    it took the token and -1 elsewhere. Of equals it takes the earlier."""
    _, tokens, experts = logits_BSE.shape
    most = min(tokens, math.ceil((moe.capacity.factor or 1.0) * tokens * moe.top_k / experts))
    best = logits_BSE.softmax(-1).sort(dim=1, descending=True, stable=True).indices[:, :most]
    taken = torch.zeros_like(logits_BSE, dtype=torch.bool).scatter_(1, best, True)
    return torch.where(taken, torch.arange(experts, device=taken.device), -1)


def sinkhorn_choice(logits_BSE: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """Each token's K best experts by a plan whose rows (tokens) and columns (experts) have even sums: (B, S, K)."""
    plan = sinkhorn_log_plan(logits_BSE)
    return plan.sort(dim=-1, descending=True, stable=True).indices[..., : moe.top_k]


def sinkhorn_log_plan(logits_BSE: torch.Tensor) -> torch.Tensor:
    """log of the plan: logits plus something for each token and each expert, so that all tokens sum to 1 and all
    experts to S / E."""
    _, tokens, experts = logits_BSE.shape
    plan = logits_BSE
    for _ in range(SINKHORN_ROUNDS):
        plan = plan - plan.logsumexp(1, keepdim=True) + math.log(tokens / experts)
        plan = plan - plan.logsumexp(2, keepdim=True)
    return plan
