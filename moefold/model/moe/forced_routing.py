"""Recording of the expert ids that routers choose, for their replay (RL): ids of one model are imposed on another.

Only the selection is imposed; router weights and their gradients still come from the scores. T tokens, K choices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from moefold.model.moe.router import expert_loads
from moefold.model.token_layout import TokenShard


def keep_choices(kept: list[Tensor], ids_TK: Tensor, _: TokenShard) -> None:
    kept.append(ids_TK)


@contextmanager
def recorded_choices(model: nn.Module) -> Iterator[dict[int, list[Tensor]]]:
    """Expert ids that every router chooses inside the block, by layer number: one (T, K) tensor for each microbatch, of
    this rank's own tokens. On one rank, unflattened to (B, S, K), it is the model's `imposed` input of that layer."""
    chosen: dict[int, list[Tensor]] = {}
    loads = expert_loads(model)
    for load in loads:
        kept = chosen.setdefault(load.layer, [])
        load.record = partial(keep_choices, kept)
    try:
        yield chosen
    finally:
        for load in loads:
            load.record = None
