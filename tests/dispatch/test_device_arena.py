"""The arena of GPU ranks. Its kernel is run by Triton's interpreter here, on ranks that share memory of the host; real
ranks on a GPU are in test_symmetric_on_gpu.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from moefold.comm.arena import open_shared_memory, words_of
from moefold.config.errors import RunFailure, UserError
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.device_arena import DeviceArena, PeerMemory, part_sizes, succeed_together
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.room_sizes import ArenaRows
from moefold.dispatch.symmetric import ArenaDispatcher
from moefold.kernels.routing.peer_plan import announce_choices, arrange_arrivals
from moefold.kernels.routing.peer_rows import push_peer_rows, sum_peer_rows, sum_rows_into
from moefold.layout.axes import Axis, World
from tests.comm.test_arena import wrong_exchanges
from tests.dispatch.test_dispatchers import BINDINGS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

EXCHANGES = 6
TOKENS, WIDTH, EXPERTS = 5, 6, 4
KERNELS = BINDINGS["chosen"]
LOOKS = 40  # of a kernel without a clock, before it gives up


def host_memory(axis: Axis, room_bytes: int = 64, kept: int = 0) -> PeerMemory:
    sizes = part_sizes(axis, room_bytes, kept)
    memory = open_shared_memory(axis, sizes.total * axis.size)
    parts = list(memory.view(axis.size, sizes.total))
    return PeerMemory(parts, [words_of(part, sizes) for part in parts], sizes)


class SeenExchanges(NamedTuple):
    wrong: list[int]
    message: str
    again: str
    numbers: list[int]
    unallocated: str
    layer: LayerByKernels


class LayerByKernels(NamedTuple):
    """Distances from the local dispatcher, and the words of this rank behind the exchanges of a layer."""

    off: list[float]
    words: list[int]


def run_layer(dispatcher: Dispatcher, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tokens through experts that are the same function, and the gradients of tokens and router weights."""
    ids, direction, *given = inputs
    h, gates = leaves = [x.clone().requires_grad_() for x in given]
    receipt = dispatcher.plan(Routing(gates, ids))
    rows = dispatcher.dispatch(h, receipt)
    index = rows.order.index_R
    x = torch.where((index >= 0)[:, None], rows.source_ND[index.clamp(min=0).long()], 0)
    y = dispatcher.combine(x.tanh() * rows.order.weight_R[:, None], receipt)
    return [y.detach(), *torch.autograd.grad(y, leaves, direction)]


def layer_inputs(rank: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(rank)
    ids = torch.rand(TOKENS, EXPERTS, generator=random).argsort(1)[:, :2]
    widths = (WIDTH, WIDTH, 2)
    return [ids, *(torch.randn(TOKENS, width, generator=random) for width in widths)]


def run_layer_by_kernels(axis: Axis) -> LayerByKernels:
    """A layer whose kernels give the signals of its exchanges, on tokens in a kept room."""
    memory = host_memory(axis, room_bytes=4096, kept=1)
    arena = DeviceArena(axis, memory, patience=1e6)
    policy = RowPolicy(contiguous_placement(EXPERTS, axis.size), axis.index)
    rows = ArenaRows(TOKENS, TOKENS * axis.size)
    dispatcher = ArenaDispatcher(arena, policy, KERNELS, 1, rows)
    for op in (announce_choices, arrange_arrivals, push_peer_rows, sum_peer_rows, sum_rows_into):
        setattr(dispatcher, op.name, op.implementations["triton"])
    inputs = [layer_inputs(rank) for rank in range(axis.size)]
    together = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
    expected = run_layer(LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS), together)
    values = run_layer(dispatcher, inputs[axis.index])
    begin = axis.index * TOKENS
    pairs = zip(values, expected, strict=True)
    off = [(mine - all_ranks[begin : begin + TOKENS]).abs().max().item() for mine, all_ranks in pairs]
    return LayerByKernels(off, memory.words[axis.index].tolist())


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
    layer = run_layer_by_kernels(world.ep)
    memory = host_memory(world.ep)
    arena = DeviceArena(world.ep, memory, patience=1e6)
    wrong = wrong_exchanges(arena, world, EXCHANGES, pause=1e-3)
    if world.rank == 1:
        return SeenExchanges(wrong, "", "", [], unallocated, layer)
    arena.tail.patience = LOOKS
    arena.require_peers()
    arena.exchange("tokens")  # gives up, and says so later
    with pytest.raises(RunFailure) as lost:
        arena.require_peers()
    with pytest.raises(RunFailure) as again:
        arena.exchange("results")
    numbers = memory.words[0].tolist()
    return SeenExchanges(wrong, str(lost.value), str(again.value), numbers, unallocated, layer)


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


def test_kernels_that_give_the_signals_themselves_do_what_the_local_dispatcher_does():
    for seen in on_two():
        assert max(seen.layer.off) < 1e-6
        assert seen.layer.words == [6, 6, 6, 0]  # three exchanges each way, and no rank lost


def test_all_ranks_say_which_one_has_no_memory():
    for seen in on_two():
        assert seen.unallocated.startswith("rank 1 cannot share ")
        assert "(out of memory)" in seen.unallocated
