"""Experts in chunks: rows beyond a bound are computed chunk by chunk, so that a layer whose experts got many rows needs
the memory of one chunk.

Of a chunk its inputs are kept, and backward computes it again: at no time do two chunks have their rows, pre-activation
and activation in memory. Rows of a product do not depend on each other; gradients of weights and of tokens are summed
over chunks, in another order than without. Inside a region that is recomputed as a whole (`experts`, `moe`, `layer`),
chunks bound the memory of forward alone: its rerun in backward makes all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.dispatch.base import Rows, rows_between
from moefold.memory.recompute import Promises, Rebuild
from moefold.model.moe.experts import Experts
from moefold.model.transformer import Transformer

RunRows = Callable[[Rows], Tensor]


@dataclass(frozen=True)
class ExpertChunks:
    """At most `most` rows at once."""

    most: int
    policy: Rebuild

    def around(self, run: RunRows, rows: Rows) -> Tensor:
        count = len(rows.order.index_R)
        if count <= self.most:
            return run(rows)
        results: list[Tensor] = []
        for begin in range(0, count, self.most):
            end = min(count, begin + self.most)
            result = self.run_chunk(run, rows, begin, end)
            results.append(result)
        return torch.cat(results)

    def run_chunk(self, run: RunRows, rows: Rows, begin: int, end: int) -> Tensor:
        order = rows_between(rows.order, begin, end)
        number_N = rows.number_N

        def run_rows(source_ND: Tensor, weight_R: Tensor) -> Tensor:
            weighted = order._replace(weight_R=weight_R)
            chunk = Rows(source_ND, weighted, number_N)
            return run(chunk)

        source_ND = rows.source_ND
        return self.policy.around(run_rows, source_ND, order.weight_R)


def attach_expert_chunks(model: Transformer, most: int) -> None:
    promises = Promises()
    policy = Rebuild(promises, drops_saved=True, promises_outputs=False, uses_expert_outputs=False)
    chunks = ExpertChunks(most, policy)
    for module in model.modules():
        if isinstance(module, Experts):
            module.around_rows = chunks.around
