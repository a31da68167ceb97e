"""FP8 sums of gradients: each summand rounded once by the rule, sums in fp32, in about half of bf16's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.comm.grad_reduce import reduce_scatter_bf16
from moefold.comm.two_levels import reduce_over_levels
from moefold.config.run import ParallelConfig, ShardConfig
from moefold.layout.axes import World, create_world
from moefold.precision import fp8_gradient_sum
from moefold.precision.fp8_gradient_sum import reduce_scatter_fp8
from tests.support.ranks import run_ranks

SHARE = 3 * 128 + 40  # of a rank: the last block is short
MOST_BYTES = 0.53
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def gradient(rank: int, ranks: int) -> Tensor:
    """Magnitudes from 2^-20 to 2^20 by block, and zeros."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(ranks * SHARE, generator=generator).bfloat16().float()
    values[: SHARE // 3] = 0
    exponents = torch.arange(len(values)) // 128 % 41 - 20
    return values * 2.0**exponents


def rounded(whole: Tensor, ranks: int) -> Tensor:
    """What E4M3 with a scale for 128 gradients of a part keeps of them, by the words of the rule."""
    blocks = [block for part in whole.view(ranks, -1) for block in part.split(128)]
    kept: list[Tensor] = []
    for block in blocks:
        amax = block.abs().max()
        scale = amax / 448 if amax > 0 else torch.ones(())
        kept.append((block * (1 / scale)).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(kept)


def reduce_each(world: World) -> dict[str, Any]:
    """Sums of this rank's share by dtype, in two levels and with a NaN; bytes sent, beside those of bf16."""
    axis = world.everyone
    found: dict[str, Any] = {}
    fp8_gradient_sum.AT_ONCE = 256  # so that parts are quantised in several pieces
    for dtype in DTYPES:
        with counted_bytes_sent() as sent:
            total = reduce_scatter_fp8(gradient(world.rank, axis.size).to(dtype), axis).arrived()
        found[str(dtype)] = total, sent.total()
    with counted_bytes_sent() as sent:
        reduce_scatter_bf16(gradient(world.rank, axis.size), axis).arrived()
    found["bytes of bf16"] = sent.total()
    broken = gradient(world.rank, axis.size)
    broken[0] = torch.nan if world.rank == 1 else 1.0
    found["broken"] = reduce_scatter_fp8(broken, axis).arrived().isnan().sum().item()
    shard = ShardConfig(sync="hierarchical")
    nodes = create_world(world.rank, world.size, world.device, ParallelConfig(), 2, shard=shard)
    replicas = nodes.axis("gradients of", "edp", "etp")
    assert replicas.levels is not None
    found["two levels"] = reduce_over_levels(reduce_scatter_fp8, gradient(world.rank, axis.size), replicas).arrived()
    return found


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_summand_is_rounded_once_and_half_of_the_bytes_are_sent(ranks: int):
    found = run_ranks(reduce_each, ranks)
    summands = [gradient(rank, ranks) for rank in range(ranks)]
    totals = {dtype: torch.zeros(ranks * SHARE, dtype=torch.promote_types(dtype, torch.float32)) for dtype in DTYPES}
    for summand in summands:
        for total in totals.values():
            total += rounded(summand, ranks)
    exact = torch.stack(summands).double().sum(0)
    assert (totals[torch.float32] - exact).norm() / exact.norm() < 0.03
    for rank, here in enumerate(found):
        mine = slice(rank * SHARE, (rank + 1) * SHARE)
        for dtype in DTYPES:
            share, sent = here[str(dtype)]
            assert torch.equal(share, totals[dtype][mine]), (rank, dtype)
            assert sent <= MOST_BYTES * here["bytes of bf16"]
        assert here["broken"] == (128 if rank == 0 else 0), "a NaN is seen by the rank that has its part"
        twice = here["two levels"] - exact[mine]
        assert twice.norm() / exact[mine].norm() < 0.045, "sums of a node are rounded once more"
