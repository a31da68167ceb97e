"""Experts inside the exchanges of their rows, on several CPU ranks: by references over shared memory, and by kernels in
Triton's interpreter, whose signals and waits are those of a GPU, over the same memory. What all of them give is what
one rank gives that has all tokens and all experts."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from moefold.anatomy.announced_choices import blocks_of_tokens
from moefold.comm.arena import SharedArena, open_shared_memory, words_of
from moefold.config.errors import RunFailure
from moefold.dispatch.base import Routing, RowPolicy
from moefold.dispatch.device_arena import DeviceArena, PeerMemory, part_sizes
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.room_sizes import ArenaRows
from moefold.dispatch.symmetric import ArenaDispatcher
from moefold.dispatch.tiled_experts import ExpertWeights, TiledExperts, signals_of_arena
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.tiles_in_exchange import multiply_arrivals, return_products
from moefold.layout.axes import Axis, World
from tests.dispatch.test_dispatchers import BINDINGS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

TOKENS, WIDTH, INNER, EXPERTS, K = 132, 20, 12, 8, 2  # tokens of two pieces
ROOM_BYTES = 2**17
KERNELS = BINDINGS["chosen"]
LOOKS = 40  # of a kernel without a clock, before it gives up
ROUTINGS = ("skewed", "one expert", "a rank without tokens", "random")
FEW_ROUTINGS = ROUTINGS[:3]  # in the interpreter
LAYERS = len(FEW_ROUTINGS) + 1


def drawn_tokens(routing: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, weights and tokens of a rank."""
    random = torch.Generator().manual_seed(rank)
    tokens = 0 if routing == "a rank without tokens" and rank == 1 else TOKENS - rank
    liking = torch.rand(tokens, EXPERTS, generator=random)
    if routing == "skewed":
        liking -= torch.arange(EXPERTS) / 4
    ids = liking.argsort(1, descending=True)[:, :K]
    if routing == "one expert":
        ids = torch.full_like(ids, -1)
        ids[:, 0] = 5
    weights = torch.rand(tokens, K, generator=random)
    return ids, weights, torch.randn(tokens, WIDTH, generator=random)


def drawn_weights() -> ExpertWeights:
    random = torch.Generator().manual_seed(9)
    gate_up = torch.randn(EXPERTS, 2, INNER, WIDTH, generator=random)
    return ExpertWeights(gate_up / 4, torch.randn(EXPERTS, WIDTH, INNER, generator=random) / 4)


def results_written_out(ids: torch.Tensor, gates: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Each token through its experts, one by one, in fp64."""
    gate_up, down = (x.double() for x in drawn_weights())
    y = torch.zeros(len(h), WIDTH, dtype=torch.float64)
    for t, x in enumerate(h.double()):
        for expert, weight in zip(ids[t].tolist(), gates[t].tolist(), strict=True):
            if expert >= 0:
                gate, up = gate_up[expert] @ x
                y[t] += down[expert] @ (torch.nn.functional.silu(gate) * up * weight)
    return y


def build_dispatcher(arena: DeviceArena | SharedArena, kernels: BoundKernels = KERNELS) -> ArenaDispatcher:
    axis = arena.axis
    policy = RowPolicy(contiguous_placement(EXPERTS, axis.size), axis.index)
    return ArenaDispatcher(arena, policy, kernels, 1, ArenaRows(TOKENS, TOKENS * axis.size))


def host_arena(axis: Axis) -> DeviceArena:
    sizes = part_sizes(axis, ROOM_BYTES, pieces=blocks_of_tokens(TOKENS))
    memory = open_shared_memory(axis, sizes.total * axis.size)
    parts = list(memory.view(axis.size, sizes.total))
    return DeviceArena(axis, PeerMemory(parts, [words_of(part, sizes) for part in parts], sizes), patience=1e6)


def by_kernels(arena: DeviceArena) -> TiledExperts:
    """One program sends: the interpreter runs programs one after the other, and each takes tiles when it has sent."""
    experts = TiledExperts(build_dispatcher(arena), KERNELS, signals_of_arena(arena, 3, 1))
    experts.multiply_arrivals = multiply_arrivals.implementations["triton"]
    experts.return_products = return_products.implementations["triton"]
    return experts


def run_layer(experts: TiledExperts, routing: str) -> torch.Tensor:
    axis = experts.arena.axis
    ids, gates, h = drawn_tokens(routing, axis.index)
    weights = drawn_weights()
    held = EXPERTS // axis.size
    mine = slice(axis.index * held, (axis.index + 1) * held)
    own = ExpertWeights(*(x[mine] for x in weights))
    plan = experts.plan(Routing(gates, ids))
    return experts.forward(h, own, plan)


class Seen(NamedTuple):
    """Of a rank: how far off it is for each routing, whether a second run had the same bits, its words, and what it
    says when rank 1 stays away."""

    off: dict[str, float]
    repeats: bool
    words: list[int]
    message: str


def compare_with_formula(experts: TiledExperts, routings: tuple[str, ...]) -> tuple[dict[str, float], bool]:
    """For each routing how far off the results are, and whether those of the first have the same bits again."""
    off: dict[str, float] = {}
    found = {routing: run_layer(experts, routing) for routing in routings}
    for routing, y in found.items():
        expected = results_written_out(*drawn_tokens(routing, experts.arena.axis.index))
        off[routing] = (y - expected).abs().max().item() if len(y) else 0.0
    first, *_ = routings
    return off, torch.equal(run_layer(experts, first), found[first])


def over_shared_memory(world: World) -> Seen:
    arena = SharedArena(world.ep, ROOM_BYTES, patience=60.0)
    off, repeats = compare_with_formula(TiledExperts(build_dispatcher(arena), KERNELS), ROUTINGS)
    return Seen(off, repeats, [], "")


def with_kernels(world: World) -> Seen:
    arena = host_arena(world.ep)
    experts = by_kernels(arena)
    off, repeats = compare_with_formula(experts, FEW_ROUTINGS)
    words = arena.memory.words[world.rank].tolist()
    ids, gates, h = drawn_tokens("random", world.rank)
    plan = experts.plan(Routing(gates, ids))
    if world.rank == 1:
        return Seen(off, repeats, words, "")
    arena.tail.patience = LOOKS
    held = EXPERTS // world.size
    with pytest.raises(RunFailure) as lost:
        experts.multiply(h, drawn_weights().gate_up_E2FD[:held], plan)
    return Seen(off, repeats, words, str(lost.value))


@cache
def seen_by_ranks(kernels: bool, ranks: int) -> list[Seen]:
    return run_ranks(with_kernels if kernels else over_shared_memory, ranks, ep=ranks)


@pytest.mark.parametrize(("kernels", "ranks"), [(False, 2), (False, 4), (True, 2)])
def test_every_token_has_what_its_experts_give_twice_the_same_bits(kernels: bool, ranks: int):
    for seen in seen_by_ranks(kernels, ranks):
        assert list(seen.off) == list(FEW_ROUTINGS if kernels else ROUTINGS)
        assert max(seen.off.values()) < 1e-5, seen.off
        assert seen.repeats


def test_each_exchange_is_counted_once_and_each_piece_has_its_flag():
    exchanges = 3 * LAYERS  # choices, tokens, results
    flags = [exchanges - 1] * 2 * blocks_of_tokens(TOKENS)
    for rank, seen in enumerate(seen_by_ranks(True, 2)):
        assert seen.words[rank] == exchanges  # the other rank may be ahead
        assert seen.words[2:] == [exchanges, 0, *flags]


def test_a_tile_that_gives_up_names_the_rank_and_the_exchange():
    seen = seen_by_ranks(True, 2)[0]
    assert seen.message.startswith(f"rank 1 gave no signal of exchange {3 * LAYERS + 2} over ep within 40 s")
