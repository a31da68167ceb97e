"""Gradients of attention that are added up over pairs of chunks are those of the whole sequence."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.attention.chunked_backward import KeySide, QuerySide, backward_in_chunks
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward
from moefold.kernels.attention.workspace import ChunkPlan
from moefold.kernels.registry import seeded_randn

SCALE = 0.3
POSITIONS = 24


def reference_pair(dy, q, k, v, lse, delta, causal: bool):
    ahead = 0 if causal else POSITIONS
    return attention_block_backward.reference(dy, q, k, v, lse, delta, SCALE, ahead, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("plan", [ChunkPlan(8, 1, 0), ChunkPlan(6, 2, 0), ChunkPlan(12, 3, 0)], ids=str)
def test_sums_over_pairs_of_chunks_are_the_gradients_of_the_whole(plan: ChunkPlan, causal: bool):
    q, k, v, dy = (
        seeded_randn("cpu", torch.float64, 2, POSITIONS, heads, 4, seed=seed) for seed, heads in enumerate((6, 3, 3, 6))
    )
    y, lse = attention_block.reference(q, k, v, SCALE, 0 if causal else POSITIONS, 0)
    delta = (dy * y).sum(-1).transpose(1, 2)
    found = backward_in_chunks(reference_pair, QuerySide(dy, q, lse, delta), KeySide(k, v), plan, causal)
    torch.testing.assert_close(found, reference_pair(dy, q, k, v, lse, delta, causal), rtol=1e-12, atol=1e-12)
