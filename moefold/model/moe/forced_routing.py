"""Choices that nobody makes: for benchmarks, and to repeat what another engine chose (replay, in RL).

The selection is imposed; weights and their gradients still come from the scores. T tokens, K choices, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from moefold.config.run import MoeConfig
from moefold.model.moe.balance import ExpertLoad


def round_robin_experts(number_T: torch.Tensor, moe: MoeConfig) -> torch.Tensor:
    """Tokens go round the experts in their order, K at a time: as even as can be, on any layout."""
    return (number_T[:, None] * moe.top_k + torch.arange(moe.top_k, device=number_T.device)) % moe.experts


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[dict[int, list[torch.Tensor]]]:
    """What every router chooses inside the block, by number of layer: one (T, K) for each microbatch, of this rank's
    own tokens. On one rank, unflattened to (B, S, K), it is what the model's `imposed` takes for that layer."""
    chosen: dict[int, list[torch.Tensor]] = {}
    loads = [module for module in model.modules() if isinstance(module, ExpertLoad)]
    for load in loads:
        load.record = chosen.setdefault(load.layer, []).append
    try:
        yield chosen
    finally:
        for load in loads:
            load.record = None
