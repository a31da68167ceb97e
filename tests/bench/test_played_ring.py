"""A played ring computes attention over the whole sequence, and its rows compare it with the plain kernel."""

from __future__ import annotations

import pytest
import torch

from moefold.bench.played_ring import PLAYED_SHAPES, RING_SIZES, PlayedRing, played_ring_rows, random_heads
from moefold.bench.ring_blocks import BlockMask
from moefold.kernels.attention.attention import attention
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import AttentionShape, Facts

SHAPE = AttentionShape(48, heads=2, kv_heads=1, head_dim=8, value_dim=4)
FACTS = Facts("cpu", "fp64", attention=SHAPE)
BEGINS = torch.tensor([[0] * 5 + [5] * 2 + [7] * 30 + [37] + [38] * 10])
MASKS = {"causal": BlockMask(0), "documents": BlockMask(0, 0, BEGINS), "window": BlockMask(0, 9)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MASKS)
def test_a_played_ring_has_the_gradients_of_attention_over_the_whole_sequence(name: str, ranks: int):
    mask, heads = MASKS[name], random_heads(SHAPE, FACTS)
    ring = PlayedRing(heads, mask, ranks, BoundKernels(FACTS))
    q, k, v = inputs = [x.clone().requires_grad_() for x in heads[:3]]
    y = attention(q, k, v, window=mask.window, begins_BS=mask.begins_BS)
    expected = torch.autograd.grad(y, inputs, heads.dy)
    for positions, found in zip(ring.positions(), ring.play(), strict=True):
        torch.testing.assert_close(found, tuple(x[:, positions] for x in expected), rtol=1e-10, atol=1e-12)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the long sequence would run")
def test_every_mask_has_a_row_for_the_whole_sequence_and_one_for_each_ring():
    rows = played_ring_rows("cpu")
    by_mask = {row["mask"]: [each for each in rows if each["mask"] == row["mask"]] for row in rows}
    assert len(by_mask) == 3
    for whole, *rings in by_mask.values():
        assert whole["ring"] == "whole"
        assert [row["ring"] for row in rings] == [f"{ranks} ranks" for ranks in RING_SIZES]
        for row in rings:
            assert row["of whole"] == pytest.approx(row["teraflops"] / whole["teraflops"])
    length = PLAYED_SHAPES["cpu"].length
    causal, *_ = rows
    flops = 7 * 2 * length * (length + 1) / 2 * 2 * 8
    assert causal["teraflops"] * causal["milliseconds"] * 1e9 == pytest.approx(flops)
