"""Gradients rounded to bf16 in their own memory."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from moefold.comm.grad_reduce import reduce_scatter_bf16, round_to_bf16_in_place
from moefold.layout.axes import World
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 2, 4095, 4096, 4097, 100_003])
def test_every_element_is_rounded_once_and_both_halves_lie_in_the_old_memory(length: int, dtype: torch.dtype):
    x = torch.randn(length, dtype=dtype, generator=torch.Generator().manual_seed(length))
    expected, memory = x.to(torch.bfloat16), x.untyped_storage()
    sent, received = round_to_bf16_in_place(x)
    assert torch.equal(sent, expected)
    received.fill_(7)
    assert torch.equal(sent, expected), "what arrives does not lie on what is sent"
    for half in (sent, received):
        assert half.untyped_storage().data_ptr() == memory.data_ptr()
        assert len(half) == length


LENGTH = 1 << 20


def allocated(world: World) -> int:
    """The most bytes that a reduction asked for at once."""
    x = torch.randn(LENGTH)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        reduce_scatter_bf16(x, world.everyone).arrived()
    return max(event.cpu_memory_usage for event in seen.events())


def test_a_reduction_as_bf16_allocates_no_more_than_this_rank_keeps():
    assert max(run_ranks(allocated, 4)) <= LENGTH * 4 // 4 + 16_384
