"""The arena of GPU ranks. Its kernel is run by Triton's interpreter here, on ranks that share memory of the host; real
ranks on a GPU are in test_symmetric_on_gpu.py."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from moefold.comm.arena import open_shared_memory, words_of
from moefold.config.errors import RunFailure, UserError
from moefold.dispatch.device_arena import DeviceArena, PeerMemory, part_sizes, succeed_together
from moefold.layout.axes import Axis, World
from tests.comm.test_arena import wrong_exchanges
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

EXCHANGES = 6
LOOKS = 40  # of a kernel without a clock, before it gives up


def host_memory(axis: Axis) -> PeerMemory:
    sizes = part_sizes(axis, 64)
    memory = open_shared_memory(axis, sizes.total * axis.size)
    parts = list(memory.view(axis.size, sizes.total))
    return PeerMemory(parts, [words_of(part, sizes) for part in parts], sizes)


class SeenExchanges(NamedTuple):
    wrong: list[int]
    message: str
    again: str
    numbers: list[int]
    unallocated: str


def message_of_failed_allocation(axis: Axis) -> str:
    """Rank 1 has no memory for its part."""

    def allocate() -> int:
        if axis.index == 1:
            raise RuntimeError("out of memory\nand more")
        return 1

    with pytest.raises(UserError) as failed:
        succeed_together(allocate, axis, part_sizes(axis, 64))
    return str(failed.value)


def exchange_and_lose_a_peer(world: World) -> SeenExchanges:
    """Exchanges of all ranks; then rank 1 stays away."""
    unallocated = message_of_failed_allocation(world.ep)
    memory = host_memory(world.ep)
    arena = DeviceArena(world.ep, memory, patience=1e6)
    wrong = wrong_exchanges(arena, world, EXCHANGES, pause=1e-3)
    if world.rank == 1:
        return SeenExchanges(wrong, "", "", [], unallocated)
    arena.tail.patience = LOOKS
    arena.require_peers()
    arena.exchange("tokens")  # gives up, and says so later
    with pytest.raises(RunFailure) as lost:
        arena.require_peers()
    with pytest.raises(RunFailure) as again:
        arena.exchange("results")
    numbers = memory.words[0].tolist()
    return SeenExchanges(wrong, str(lost.value), str(again.value), numbers, unallocated)


@cache
def on_two() -> list[SeenExchanges]:
    return run_ranks(exchange_and_lose_a_peer, 2, ep=2)


def test_no_room_is_written_while_it_is_read():
    assert [seen.wrong for seen in on_two()] == [[], []]


def test_a_kernel_that_gives_up_names_the_rank_and_the_exchange():
    seen = on_two()[0]
    assert seen.message.startswith(f"rank 1 gave no signal of exchange {EXCHANGES + 1} over ep within 40 s")
    assert seen.again == seen.message
    assert seen.numbers == [EXCHANGES + 1, EXCHANGES, EXCHANGES + 1, 1]


def test_all_ranks_say_which_one_has_no_memory():
    for seen in on_two():
        assert seen.unallocated.startswith("rank 1 cannot share ")
        assert "(out of memory)" in seen.unallocated
