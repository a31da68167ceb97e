"""FP8 sums over tp: what the rules say to the bit, near the exact sums, in about half of the bytes."""

from __future__ import annotations

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.comm.collectives import reduce_scatter
from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.fp8_payload import (
    dequantised_channels,
    dequantised_rows,
    quantise_channels,
    quantise_row_blocks,
)
from moefold.layout.axes import World
from moefold.precision.fp8_scatter_sum import ScatterFormat, scatter_sums_fp8
from tests.support.ranks import run_ranks

WIDTH, TOKENS = 128, 128  # of each rank
MOST_BYTES = 0.53


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Result = tuple[torch.Tensor, torch.Tensor, int, int]


def scatter(world: World, format: ScatterFormat | None) -> Result:
    """The sums, the gradient of the summands, and the bytes sent forward and backward."""
    tp = world.axis("tp")
    summand = numbers(tp.size * TOKENS, WIDTH, seed=tp.index).bfloat16().requires_grad_()
    with counted_bytes_sent() as counter:
        y = reduce_scatter(summand, tp) if format is None else scatter_sums_fp8(summand, tp, format)
        forward = counter.total()
        y.backward(numbers(TOKENS, WIDTH, seed=100 + tp.index).bfloat16())
    assert summand.grad is not None
    return y.detach(), summand.grad, forward, counter.total() - forward


def every_format(world: World) -> list[Result]:
    both, forward, backward = ScatterFormat(True, True, ScaleRule()), (True, False), (False, True)
    formats = [None, both, *(ScatterFormat(*ways, ScaleRule()) for ways in (forward, backward))]
    return [scatter(world, format) for format in formats]


@pytest.mark.parametrize("ranks", [4, 8])
def test_sums_and_gradients_follow_the_rules_in_half_of_the_bytes(ranks: int):
    found = run_ranks(every_format, ranks, tp=ranks)
    summands = [numbers(ranks * TOKENS, WIDTH, seed=rank).bfloat16() for rank in range(ranks)]
    total = torch.zeros(ranks * TOKENS, WIDTH)
    for summand in summands:
        total += dequantised_rows(quantise_row_blocks(summand, ScaleRule(), WIDTH), torch.float32, WIDTH)
    exact = torch.stack(summands).double().sum(0)
    assert (total - exact).norm() / exact.norm() < 0.03
    outputs = [numbers(TOKENS, WIDTH, seed=100 + rank).bfloat16() for rank in range(ranks)]
    rounded = [dequantised_channels(quantise_channels(dy, ScaleRule()), dy.dtype) for dy in outputs]
    gradient = torch.cat(rounded)
    plain_gradient = torch.cat(outputs)
    assert (gradient - plain_gradient).norm() / plain_gradient.norm() < 0.03
    for rank, (plain, both, forward, backward) in enumerate(found):
        mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
        assert torch.equal(both[0], total[mine].bfloat16())
        assert torch.equal(both[1], gradient)
        assert both[2] <= MOST_BYTES * plain[2]
        assert both[3] <= MOST_BYTES * plain[3]
        # each way by itself
        assert torch.equal(forward[0], both[0])
        assert torch.equal(forward[1], plain[1])
        assert torch.equal(backward[0], plain[0])
        assert torch.equal(backward[1], both[1])
        assert (forward[3], backward[2]) == (plain[3], plain[2])
