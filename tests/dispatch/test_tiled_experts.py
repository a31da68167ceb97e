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
from moefold.dispatch.tiled_experts import ExpertWeights, TiledExperts, signals_of_arena, way_of
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.tiles_in_exchange import multiply_arrivals, return_products
from moefold.kernels.routing.arrival_pieces import PieceSignals
from moefold.layout.axes import Axis, World
from tests.dispatch.test_dispatchers import BINDINGS, VALUES
from tests.dispatch.test_symmetric import distance
from tests.dispatch.test_tiled_experts_backward import Share, through
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

TOKENS, WIDTH, INNER, EXPERTS, K = 132, 20, 12, 8, 2  # tokens of two pieces
ROOM_BYTES = 2**17
KERNELS = BINDINGS["chosen"]
LOOKS = 40  # of a kernel without a clock, before it gives up
ROUTINGS = ("skewed", "one expert", "a rank without tokens", "random")
FEW_ROUTINGS = ROUTINGS[:3]  # in the interpreter
LAYERS = len(FEW_ROUTINGS) + 1
EXCHANGES = 3 * LAYERS + 6  # choices, tokens and results of each; of one that has a backward, three more and that


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


def build_experts(
    arena: DeviceArena | SharedArena, kernels: BoundKernels = KERNELS, signals: PieceSignals | None = None
) -> TiledExperts:
    axis = arena.axis
    policy = RowPolicy(contiguous_placement(EXPERTS, axis.size), axis.index)
    return TiledExperts(arena, policy, kernels, 1, ArenaRows(TOKENS, TOKENS * axis.size), signals=signals)


def host_arena(axis: Axis) -> DeviceArena:
    sizes = part_sizes(axis, ROOM_BYTES, pieces=blocks_of_tokens(TOKENS))
    memory = open_shared_memory(axis, sizes.total * axis.size)
    parts = list(memory.view(axis.size, sizes.total))
    return DeviceArena(axis, PeerMemory(parts, [words_of(part, sizes) for part in parts], sizes), patience=1e6)


def by_kernels(arena: DeviceArena) -> TiledExperts:
    """One program sends: the interpreter runs programs one after the other, and each takes tiles when it has sent."""
    experts = build_experts(arena, signals=signals_of_arena(arena, 3, 1))
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
    _, results = experts.forward(h, own, way_of(plan))
    return results


class Seen(NamedTuple):
    """Of a rank: how far off it is for each routing, whether a second run had the same bits, its words, what it says
    when rank 1 stays away, and how far off results and gradients are of a layer with a backward."""

    off: dict[str, float]
    repeats: bool
    words: list[int]
    message: str
    gradients_off: dict[str, float]


def compare_with_formula(experts: TiledExperts, routings: tuple[str, ...]) -> tuple[dict[str, float], bool]:
    """For each routing how far off the results are, and whether those of the first have the same bits again."""
    off: dict[str, float] = {}
    found = {routing: run_layer(experts, routing) for routing in routings}
    for routing, y in found.items():
        expected = results_written_out(*drawn_tokens(routing, experts.arena.axis.index))
        off[routing] = (y - expected).abs().max().item() if len(y) else 0.0
    first, *_ = routings
    return off, torch.equal(run_layer(experts, first), found[first])


def gradients_written_out(routing: str, ranks: int, direction_TD: torch.Tensor) -> list[torch.Tensor]:
    """Results of the tokens of all ranks, and gradients of tokens, gates and weights, in fp64."""
    ids, gates, h = map(torch.cat, zip(*[drawn_tokens(routing, rank) for rank in range(ranks)], strict=True))
    leaves = [x.double().requires_grad_() for x in (h, gates, *drawn_weights())]
    h, gates, gate_up, down = leaves
    gate_TKF, up_TKF = torch.einsum("tkcfd,td->ctkf", gate_up[ids], h)
    a_TKF = torch.nn.functional.silu(gate_TKF) * up_TKF * gates[:, :, None]
    y = torch.einsum("tkdf,tkf->td", down[ids], a_TKF)
    return [y, *torch.autograd.grad(y, leaves, direction_TD.double())]


def compare_gradients(experts: TiledExperts, routing: str = "skewed") -> dict[str, float]:
    """How far off results and gradients are of a layer with a backward."""
    axis = experts.arena.axis
    held = EXPERTS // axis.size
    mine = slice(axis.index * held, (axis.index + 1) * held)
    tokens = [len(drawn_tokens(routing, rank)[0]) for rank in range(axis.size)]
    begin = sum(tokens[: axis.index])
    own = slice(begin, begin + tokens[axis.index])
    direction_TD = torch.randn(sum(tokens), WIDTH, generator=torch.Generator().manual_seed(5))
    y, dh, dgates, d_up, d_down = gradients_written_out(routing, axis.size, direction_TD)
    ids, gates, h = drawn_tokens(routing, axis.index)
    weights = [x[mine] for x in drawn_weights()]
    found = through(experts, Share(ids, [h, gates, *weights], direction_TD[own]))
    expected = (y[own], dh[own], dgates[own], d_up[mine], d_down[mine])
    pairs = zip(VALUES, found, expected, strict=True)
    return {what: distance(x.double(), written) for what, x, written in pairs}


def over_shared_memory(world: World) -> Seen:
    arena = SharedArena(world.ep, ROOM_BYTES, patience=60.0)
    off, repeats = compare_with_formula(build_experts(arena), ROUTINGS)
    return Seen(off, repeats, [], "", {})


def with_kernels(world: World) -> Seen:
    arena = host_arena(world.ep)
    experts = by_kernels(arena)
    gradients_off = compare_gradients(experts)
    off, repeats = compare_with_formula(experts, FEW_ROUTINGS)
    words = arena.memory.words[world.rank].tolist()
    ids, gates, h = drawn_tokens("random", world.rank)
    plan = experts.plan(Routing(gates, ids))
    if world.rank == 1:
        return Seen(off, repeats, words, "", gradients_off)
    arena.tail.patience = LOOKS
    held = EXPERTS // world.size
    with pytest.raises(RunFailure) as lost:
        experts.multiply(h, drawn_weights().gate_up_E2FD[:held], way_of(plan))
    return Seen(off, repeats, words, str(lost.value), gradients_off)


@cache
def seen_by_ranks(kernels: bool, ranks: int) -> list[Seen]:
    return run_ranks(with_kernels if kernels else over_shared_memory, ranks, ep=ranks)


@pytest.mark.parametrize(("kernels", "ranks"), [(False, 2), (False, 4), (True, 2)])
def test_every_token_has_what_its_experts_give_twice_the_same_bits(kernels: bool, ranks: int):
    for seen in seen_by_ranks(kernels, ranks):
        assert list(seen.off) == list(FEW_ROUTINGS if kernels else ROUTINGS)
        assert max(seen.off.values()) < 1e-5, seen.off
        assert seen.repeats


def test_gradients_of_what_kernels_computed_are_those_of_a_plain_formula():
    for seen in seen_by_ranks(True, 2):
        assert len(seen.gradients_off) == len(VALUES)
        assert max(seen.gradients_off.values()) < 1e-4, seen.gradients_off


def test_each_exchange_is_counted_once_and_each_piece_has_its_flag():
    flags = [EXCHANGES - 1] * 2 * blocks_of_tokens(TOKENS)
    for rank, seen in enumerate(seen_by_ranks(True, 2)):
        assert seen.words[rank] == EXCHANGES  # the other rank may be ahead
        assert seen.words[2:] == [EXCHANGES, 0, *flags]


def test_a_tile_that_gives_up_names_the_rank_and_the_exchange():
    seen = seen_by_ranks(True, 2)[0]
    assert seen.message.startswith(f"rank 1 gave no signal of exchange {EXCHANGES + 2} over ep within 40 s")
