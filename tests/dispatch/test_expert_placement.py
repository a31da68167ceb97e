"""Experts placed by a map: with another map, and the weights in its order, every dispatcher gives the same results."""

from __future__ import annotations

import pytest
import torch

from moefold.config.run import Config, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import Hop, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.deepep import DeepEpHop, make_deepep_buffer
from moefold.dispatch.expert_placement import ExpertPlacement, contiguous_placement, permuted_placement
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.layout.axes import World, create_world
from tests.dispatch.test_dispatchers import (
    BINDINGS,
    DISPATCHERS,
    EXPERTS,
    INNER,
    VALUES,
    WIDTH,
    liked,
    numbers,
    through,
)
from tests.support import deep_ep_over_gloo
from tests.support.ranks import run_ranks

KERNELS = BINDINGS["chosen"]
ORDER = [5, 0, 7, 2, 1, 6, 3, 4]  # experts by rank and slot
TOKENS, K = 10, 3


def test_contiguous_placement_is_arithmetic():
    placement = contiguous_placement(8, 4)
    ids = torch.arange(8)
    assert placement.rank_of(ids).tolist() == (ids // 2).tolist()
    assert placement.slot_on_rank(ids, 1).tolist() == [2, 2, 0, 1, 2, 2, 2, 2]
    assert placement.slot_on_rank(torch.tensor([-1]), 1).tolist() == [2], "no choice has no slot"
    assert placement.position_of(ids).tolist() == list(range(8))
    assert placement.experts_of_rank(3) == [6, 7]


def test_a_permuted_placement_maps_there_and_back():
    placement = permuted_placement(ORDER, 4)
    ids = torch.arange(8)
    assert placement.expert_at(placement.position_of(ids)).tolist() == list(range(8))
    assert placement.position_of(torch.tensor(ORDER)).tolist() == list(range(8))
    assert placement.experts_of_rank(0) == [5, 0]
    assert placement.rank_of(torch.tensor([7, 2])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("ranks", "slots"), [((0, 0, 1), (0, 1, 0)), ((0, 0, 1, 1), (0, 0, 0, 1)), ((0, 2, 2, 2), (0, 0, 1, 2))]
)
def test_a_placement_that_is_not_even_is_refused(ranks: tuple[int, ...], slots: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"expected each of \d+ ranks to hold"):
        ExpertPlacement(ranks, slots)


def test_local_rows_follow_the_slots():
    placement = permuted_placement(ORDER)
    for multiple in (1, 4):
        dispatcher = LocalDispatcher(RowPolicy(placement, multiple=multiple), KERNELS)
        ids_TK = liked(0, K, tokens=TOKENS)
        leaves = [numbers(TOKENS, WIDTH, seed=1), numbers(TOKENS, K, seed=2)]
        matrices = [numbers(EXPERTS, INNER, WIDTH, seed=3), numbers(EXPERTS, WIDTH, INNER, seed=4)]
        direction = numbers(TOKENS, WIDTH, seed=5)
        moved = [x.clone().requires_grad_() for x in (*leaves, *(m[ORDER] for m in matrices))]
        plain = [x.clone().requires_grad_() for x in (*leaves, *matrices)]
        reference = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS)
        found = through(dispatcher, KERNELS, ids_TK, moved, direction)
        y, dh, dg, d_up, d_down = through(reference, KERNELS, ids_TK, plain, direction)
        for a, b in zip(found, (y, dh, dg, d_up[ORDER], d_down[ORDER]), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def build_by_name(name: str, world: World, placement: ExpertPlacement):
    if name == "deepep":
        buffer = make_deepep_buffer(deep_ep_over_gloo, world.ep, WIDTH * 8)
        hops: list[Hop] = [DeepEpHop(buffer, world.ep, placement)]
        return HopDispatcher(hops, RowPolicy(placement, world.ep.index), KERNELS)
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER))
    parallel = ParallelConfig(ep=world.ep.size, dispatcher=name)
    config = Config(model=model, parallel=parallel, train=TrainConfig(precision="fp64"))
    return build_dispatcher(config, KERNELS, world, placement)


def distances(world: World) -> dict[tuple[str, str], float]:
    """Distance of each dispatcher with permuted experts from the local one, which has all of them in order."""
    world = create_world(world.rank, world.size, world.device, ParallelConfig(ep=world.size), node_size=2)
    placement = permuted_placement(ORDER, world.size)
    up, down = numbers(EXPERTS, INNER, WIDTH, seed=1), numbers(EXPERTS, WIDTH, INNER, seed=2)
    ids = [liked(rank, K, tokens=TOKENS) for rank in range(world.size)]
    h = [numbers(TOKENS, WIDTH, seed=10 + rank) for rank in range(world.size)]
    weights = [numbers(TOKENS, K, seed=20 + rank).float().double() for rank in range(world.size)]
    directions = [numbers(TOKENS, WIDTH, seed=30 + rank) for rank in range(world.size)]
    everything = [x.clone().requires_grad_() for x in (torch.cat(h), torch.cat(weights), up, down)]
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS)
    y, dh, dg, d_up, d_down = through(local, KERNELS, torch.cat(ids), everything, torch.cat(directions))
    mine = slice(world.rank * TOKENS, (world.rank + 1) * TOKENS)
    held = placement.experts_of_rank(world.rank)
    expected = (y[mine], dh[mine], dg[mine], d_up[held], d_down[held])
    found = {}
    for name in (*DISPATCHERS, "deepep"):
        leaves = [h[world.rank], weights[world.rank], up[held], down[held]]
        leaves = [x.clone().requires_grad_() for x in leaves]
        dispatcher = build_by_name(name, world, placement)
        values = through(dispatcher, KERNELS, ids[world.rank], leaves, directions[world.rank])
        for what, a, b in zip(VALUES, values, expected, strict=True):
            found[name, what] = (a - b).abs().max().item()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_permuted_experts_with_permuted_weights_equal_the_local_dispatcher(size: int):
    for rank, found in enumerate(run_ranks(distances, size, ep=size)):
        for (name, what), off in found.items():
            most = 1e-5 if (name, what) == ("deepep", "gradient of gates") else 1e-12  # DeepEP sends them as fp32
            assert off <= most, f"rank {rank}, {name}: {what} off by {off}"
