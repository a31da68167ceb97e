"""A layer whose experts are spread over played ranks has the results and gradients of one rank with all experts."""

from __future__ import annotations

import pytest
import torch

from moefold.bench.dispatched_layer import SpreadLayer, layer_row, run_layer
from moefold.bench.options import DispatchOptions
from moefold.bench.played_layer import DispatchCase, PlayedLayer
from moefold.dispatch.base import RowPolicy
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.tiled_experts import ExpertWeights

RANKS, TOKENS, WIDTH, INNER, EXPERTS, K = 2, 40, 24, 12, 4, 2
OPTIONS = DispatchOptions(
    device="cpu", ranks=(RANKS,), hidden=(WIDTH,), tokens=TOKENS, experts=EXPERTS, top_k=K, dtype="fp32", repeat=1
)
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="played on a CPU without signals")


@needs_cpu
@pytest.mark.parametrize("zipf", [0.0, 2.0])
def test_spread_experts_give_what_one_rank_with_all_of_them_gives(zipf: float):
    layer = PlayedLayer(OPTIONS, DispatchCase(RANKS, WIDTH, zipf), "cpu")
    spread = SpreadLayer(layer, INNER)
    found = layer.play(spread.run)
    everything = ExpertWeights(*(torch.cat(parts) for parts in zip(*spread.weights, strict=True)))
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS, 1)), spread.kernels)
    summed = [torch.zeros_like(x) for x in everything]
    for rank, (y_TD, (dh, d_weights, *_)) in enumerate(found):
        alone = run_layer(local, layer.h_TD, layer.routings[rank], everything, spread.kernels)
        torch.testing.assert_close(y_TD, alone.y_TD, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(dh, alone.gradients[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(d_weights, alone.gradients[1], rtol=1e-4, atol=1e-5)
        for total, part in zip(summed, alone.gradients[2:], strict=True):
            total += part
    for number, total in enumerate(summed):
        spread_over_ranks = torch.cat([each.gradients[2 + number] for each in found])
        torch.testing.assert_close(spread_over_ranks, total, rtol=1e-4, atol=1e-5)


@needs_cpu
def test_a_row_compares_a_rank_of_several_with_one_rank_of_as_many_experts():
    row = layer_row(OPTIONS, RANKS, WIDTH, "cpu")
    assert row["over_local"] == pytest.approx(row["layer_ms"] / row["local_ms"])
