"""Experts inside the exchanges of their rows, on ranks that share one GPU: what a plain formula gives, the same bits
twice, no wait of the host, and a rank that stays away is named."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

from moefold.anatomy.announced_choices import blocks_of_tokens
from moefold.comm.part_sizes import TURNS
from moefold.config.errors import RunFailure
from moefold.dispatch.base import Routing
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.tiled_experts import ExpertWeights, TiledExperts, signals_of_arena, way_of
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World
from tests.dispatch.test_symmetric_on_gpu import no_waits
from tests.dispatch.test_tiled_experts import (
    EXPERTS,
    INNER,
    ROOM_BYTES,
    ROUTINGS,
    TOKENS,
    WIDTH,
    build_experts,
    drawn_tokens,
    drawn_weights,
    results_written_out,
)
from tests.support.ranks import run_device_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"
PROGRAMS, SENDERS = 16, 3
PATIENCE = 3.0
TOLERANCE = 0.03  # of the largest value; bf16 rounds tokens, weights, activations and results


class SeenOnCard(NamedTuple):
    """Of a rank: how far off it is for each routing, whether a second run had the same bits, and what it says when
    rank 1 stays away."""

    off: dict[str, float]
    repeats: bool
    message: str


def tiled_experts(world: World) -> TiledExperts:
    axis = world.ep
    memory = open_device_memory(axis, ROOM_BYTES, world.device, pieces=blocks_of_tokens(TOKENS))
    arena = DeviceArena(axis, memory, PATIENCE)
    capability = torch.cuda.get_device_capability(world.device)
    kernels = BoundKernels(Facts("cuda", "bf16", capability, hidden=WIDTH, ffn=INNER))
    return build_experts(arena, kernels, signals_of_arena(arena, PROGRAMS, SENDERS))


def own_weights(world: World) -> ExpertWeights:
    held = EXPERTS // world.ep.size
    mine = slice(world.rank * held, (world.rank + 1) * held)
    return ExpertWeights(*(x[mine].to(world.device, torch.bfloat16) for x in drawn_weights()))


def inputs_of(world: World, routing: str) -> tuple[Routing, torch.Tensor]:
    ids, gates, h = drawn_tokens(routing, world.rank)
    on_card = Routing(gates.to(world.device), ids.to(world.device))
    return on_card, h.to(world.device, torch.bfloat16)


def run_on_card(world: World) -> SeenOnCard:
    torch.cuda.set_device(world.device)
    experts = tiled_experts(world)
    weights = own_weights(world)
    off: dict[str, float] = {}
    repeats = True
    for routing in ROUTINGS:
        routed, h = inputs_of(world, routing)
        for _ in range(TURNS):  # kernels are compiled, and the tables of both turns' rooms uploaded
            _, first = experts.forward(h, weights, way_of(experts.plan(routed)))
        with no_waits(world.device):
            _, again = experts.forward(h, weights, way_of(experts.plan(routed)))
        repeats = repeats and torch.equal(first, again)
        expected = results_written_out(*drawn_tokens(routing, world.rank))
        scale = expected.abs().max().item() if len(expected) else 1.0
        off[routing] = (first.cpu() - expected).abs().max().item() / scale if len(first) else 0.0
    routed, h = inputs_of(world, "random")
    plan = experts.plan(routed)
    torch.cuda.synchronize()
    if world.rank == 1:
        return SeenOnCard(off, repeats, "")
    experts.multiply(h, weights.gate_up_E2FD, way_of(plan))
    torch.cuda.synchronize()
    with pytest.raises(RunFailure) as lost:
        experts.arena.require_peers()
    return SeenOnCard(off, repeats, str(lost.value))


@cache
def on_ranks(ranks: int) -> list[SeenOnCard]:
    return run_device_ranks(run_on_card, ranks, device=DEVICE, ep=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_token_has_what_its_experts_give_twice_the_same_bits_without_a_wait(ranks: int):
    for seen in on_ranks(ranks):
        assert list(seen.off) == list(ROUTINGS)
        assert max(seen.off.values()) < TOLERANCE, seen.off
        assert seen.repeats


def test_a_rank_that_stays_away_is_named():
    exchange = 3 * (TURNS + 1) * len(ROUTINGS) + 2
    message = on_ranks(2)[0].message
    assert message.startswith(f"rank 1 gave no signal of exchange {exchange} over ep within {PATIENCE:g} s")
