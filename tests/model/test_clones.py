"""A layer whose hot experts are cloned computes what it computes without clones, and its ranks have more even rows."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moefold.config.run import ModelConfig, MoeConfig, ParallelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World, create_world, single_rank_world
from moefold.model.initialise import initialise_parameters
from moefold.model.moe.layer import MoeSublayer
from tests.support.models import choices
from tests.support.ranks import run_ranks

EXPERTS, WIDTH, INNER, TOKENS, K, SLOTS, STEPS = 16, 6, 8, 24, 2, 2, 2
MODEL = ModelConfig(hidden=WIDTH, layers=1, moe=MoeConfig(experts=EXPERTS, ffn=INNER, top_k=K))
# Bits of a row do not depend on how many others there are.
KERNELS = BoundKernels(Facts("cpu", "fp64", hidden=WIDTH, ffn=INNER, invariant=True))


def zipf(rank: int, step: int) -> Tensor:
    """Choices by Zipf's law over a random order of experts."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(3))
    share = 1 / torch.arange(1, EXPERTS + 1).double() ** 1.5
    chosen = torch.multinomial(share.expand(TOKENS, -1), K, generator=generator)
    return order[chosen]


def without_tokens(rank: int, step: int) -> Tensor:
    """Ranks of an odd number have no tokens."""
    return zipf(rank, step)[: TOKENS * (1 - rank % 2)]


ROUTINGS = {
    "zipf": zipf,
    "one expert": lambda rank, step: torch.tensor([5, 4]).expand(TOKENS, K),
    "empty experts": lambda rank, step: zipf(rank, step) // 4 * 4 + torch.arange(K),
    "ranks without tokens": without_tokens,
    "even": lambda rank, step: (torch.arange(TOKENS * K) + rank).view(TOKENS, K) % EXPERTS,
}


class Case(NamedTuple):
    dispatcher: str
    decision: str
    routing: str


class Found(NamedTuple):
    """Of one case on one rank, by step: relative distances from the layer on one rank and from that without clones,
    whether outputs have the same bits as without, and the largest rank's rows over the mean."""

    off_alone: list[float]
    off_plain: list[float]
    same_output: list[bool]
    rank_rows: list[float]
    rank_rows_without: list[float]


def cases(layout: dict[str, int]) -> list[Case]:
    """Every routing by one dispatcher; the other decision and the other dispatchers on four ranks."""
    if "etp" in layout:
        return [Case("all_to_all", "now", "zipf")]
    found = [Case("all_to_all", "now", routing) for routing in ROUTINGS]
    if layout["ep"] == 4:
        found += [Case("all_to_all", "previous", routing) for routing in ("zipf", "ranks without tokens")]
        found += [Case(name, "now", "zipf") for name in ("dedup", "hierarchical")]
    return found


def make_layer(world: World, **parallel: Any) -> MoeSublayer:
    parts = choices(MODEL, TOKENS, KERNELS, world, ParallelConfig(**parallel))
    layer = MoeSublayer(MODEL, 0, parts)
    initialise_parameters(layer, seed=1)
    return layer


def run_step(layer: MoeSublayer, routing: str, step: int, ranks: range) -> list[Tensor]:
    """The output for the tokens of these ranks, and the gradients of tokens, router and experts."""
    ids: list[Tensor] = []
    drawn: list[Tensor] = []
    for rank in ranks:
        of_rank = ROUTINGS[routing](rank, step)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        ids.append(of_rank)
        drawn.append(torch.randn(2, len(of_rank), WIDTH, generator=generator))
    x_TD, direction_TD = torch.cat(drawn, dim=1).unbind()
    x_TD.requires_grad_()
    leaves = [x_TD, layer.router.weight, layer.experts.first_weight, layer.experts.down]
    y_TD, _ = layer(x_TD, torch.cat(ids))
    return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, direction_TD)]


def part_of_rank(whole: list[Tensor], world: World, lengths: list[int]) -> list[Tensor]:
    """What this rank has of the values on one rank."""
    y, dx, _, d_up, d_down = whole
    ep = world.ep
    etp = world.etp
    found = [each.split(lengths)[world.rank] for each in (y, dx)]
    for gradient in (d_up, d_down):  # experts over ep, their inner width over etp
        held = gradient.chunk(ep.size)[ep.index]
        found.append(held.chunk(etp.size, 2)[etp.index])
    return found


def distance(values: list[Tensor], expected: list[Tensor]) -> float:
    """The largest distance, of each tensor relative to its largest value."""
    far = [0.0]
    for a, b in zip(values, expected, strict=True):
        assert a.shape == b.shape
        if a.any():
            far.append(((a - b).abs().max() / b.abs().max()).item())
    return max(far)


def run_case(case: Case, world: World, alone: MoeSublayer) -> Found:
    plain = make_layer(world, dispatcher=case.dispatcher)
    cloning = make_layer(world, dispatcher=case.dispatcher, clone_slots=SLOTS, clone_decision=case.decision)
    assert list(cloning.state_dict()) == list(plain.state_dict()), "clones are in no checkpoint"
    found = Found([], [], [], [], [])
    here = range(world.rank, world.rank + 1)
    everyone = range(world.size)
    for step in range(STEPS):
        values = run_step(cloning, case.routing, step, here)
        without = run_step(plain, case.routing, step, here)
        whole = run_step(alone, case.routing, step, everyone)
        lengths = [len(ROUTINGS[case.routing](rank, step)) for rank in everyone]
        y, dx, _, *d_experts = values
        found.off_alone.append(distance([y, dx, *d_experts], part_of_rank(whole, world, lengths)))
        found.off_plain.append(distance(values, without))
        found.same_output.append(torch.equal(y, without[0]))
        figures = cloning.router.load.clones
        found.rank_rows.append(figures.filled / figures.rows)
        found.rank_rows_without.append(figures.filled_without / figures.rows)
        assert torch.equal(cloning.router.load.counts_E, plain.router.load.counts_E), "loads are of logical experts"
        cloning.router.load.forget_counts()
        plain.router.load.forget_counts()
    return found


def on_ranks(world: World, layout: dict[str, int]) -> dict[Case, Found]:
    torch.set_default_dtype(torch.float64)
    here = create_world(world.rank, world.size, world.device, ParallelConfig(**layout), node_size=2)
    alone = make_layer(single_rank_world())
    return {case: run_case(case, here, alone) for case in cases(layout)}


LAYOUTS: list[dict[str, int]] = [{"ep": 2}, {"ep": 4}, {"ep": 8}, {"ep": 2, "etp": 2}]
every_layout = pytest.mark.parametrize("layout", range(len(LAYOUTS)), ids=map(str, LAYOUTS))


@cache
def found_on(layout: int) -> list[dict[Case, Found]]:
    axes = LAYOUTS[layout]
    return run_ranks(on_ranks, prod(axes.values()), axes)


@every_layout
def test_a_layer_with_clones_equals_one_without_and_one_on_a_single_rank(layout: int):
    for found in found_on(layout):
        for case, told in found.items():
            assert max(told.off_alone) <= 1e-12, case
            assert max(told.off_plain) <= 1e-12, case
            assert all(told.same_output), case


@every_layout
def test_ranks_have_even_rows_where_experts_are_cloned(layout: int):
    """At most 1.05 x the mean in whole rows, where two slots are enough; if decided from the step before, nearly."""
    for case, told in found_on(layout)[0].items():
        if case.decision == "now":
            assert max(told.rank_rows) <= 1.15, case
        else:
            assert told.rank_rows[0] == told.rank_rows_without[0] > 2, case
            assert told.rank_rows[1] <= 1.3 < told.rank_rows_without[1], case
        if case.routing == "one expert":
            assert told.rank_rows_without == [LAYOUTS[layout]["ep"]] * STEPS
