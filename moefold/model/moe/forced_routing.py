"""Routing set from outside: round robin for benchmarks, recording and replay of expert ids (for RL).

The selection is imposed; router weights and their gradients still come from the scores. T tokens, K choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from moefold.config.run import MoeConfig
from moefold.model.moe.balance import ExpertLoad
from moefold.model.token_layout import TokenShard


def round_robin_experts(number_T: Tensor, moe: MoeConfig) -> Tensor:
    """Token t gets experts t x K up to t x K + K - 1, modulo E: an even load on any layout."""
    choice_K = torch.arange(moe.top_k, device=number_T.device)
    first_T1 = number_T[:, None] * moe.top_k
    return (first_T1 + choice_K) % moe.experts


def keep_choices(kept: list[Tensor], ids_TK: Tensor, _: TokenShard) -> None:
    kept.append(ids_TK)


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Expert ids that every router chooses inside the block, by layer number: one (T, K) tensor for each microbatch, of
    this rank's own tokens. On one rank, unflattened to (B, S, K), it is the model's `imposed` input of that layer."""
    chosen: dict[int, list[Tensor]] = {}
    loads = [module for module in model.modules() if isinstance(module, ExpertLoad)]
    for load in loads:
        kept = chosen.setdefault(load.layer, [])
        load.record = partial(keep_choices, kept)
    try:
        yield chosen
    finally:
        for load in loads:
            load.record = None
