"""The seam of hops: a second, toy hop takes part in a dispatcher as the built-in ones do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moefold.config.errors import UserError
from moefold.config.open_names import DISPATCHER_NAMES
from moefold.config.run import Config, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import HopPlan, Routing, RowPolicy
from moefold.dispatch.build import (
    DISPATCHER_BUILDERS,
    DispatchSetting,
    HopChain,
    build_dispatcher,
    build_from_hops,
    dedup_hops,
)
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.traffic import Traffic
from moefold.layout.axes import World
from tests.dispatch.test_dispatchers import BINDINGS, EXPERTS, INNER, ROUTINGS, VALUES, WIDTH, numbers, through
from tests.support.ranks import run_ranks

KERNELS = BINDINGS["chosen"]


class ShufflingHop:
    """Sends nothing: tokens arrive in another order on their own rank."""

    def plan(self, routing: Routing, traffic: Traffic | None) -> HopPlan:
        order_T = torch.randperm(len(routing.ids_TK), generator=torch.Generator().manual_seed(7))
        return HopPlan(order_T, Routing(routing.weights_TK[order_T], routing.ids_TK[order_T]))

    def out(self, h_TD: torch.Tensor, leg: Any) -> torch.Tensor:
        return h_TD[leg]

    def back(self, y_ND: torch.Tensor, leg: Any) -> torch.Tensor:
        return torch.zeros_like(y_ND).index_copy(0, leg, y_ND)


def leaves_of(tokens: int, k: int) -> list[torch.Tensor]:
    leaves = [
        numbers(tokens, WIDTH, seed=1),
        numbers(tokens, k, seed=2),
        numbers(EXPERTS, INNER, WIDTH, seed=3),
        numbers(EXPERTS, WIDTH, INNER, seed=4),
    ]
    return [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("hops", [0, 1, 2])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_dispatcher_of_any_number_of_toy_hops_equals_the_local_one(routing: str, hops: int):
    ids_TK = ROUTINGS[routing](0)
    tokens, k = ids_TK.shape
    direction = numbers(tokens, WIDTH, seed=5)
    policy = RowPolicy(contiguous_placement(EXPERTS))
    toy = HopDispatcher([ShufflingHop() for _ in range(hops)], policy, KERNELS)
    values = through(toy, KERNELS, ids_TK, leaves_of(tokens, k), direction)
    expected = through(LocalDispatcher(policy, KERNELS), KERNELS, ids_TK, leaves_of(tokens, k), direction)
    for what, a, b in zip(VALUES, values, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}")


def shuffled_dedup_hops(setting: DispatchSetting) -> HopChain:
    return HopChain([ShufflingHop(), *dedup_hops(setting).hops])


def build_shuffled_dedup(setting: DispatchSetting):
    return build_from_hops(shuffled_dedup_hops, setting)


def config_for(world: World, name: str) -> Config:
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER))
    parallel = ParallelConfig(ep=world.ep.size, dispatcher=name)
    return Config(model=model, parallel=parallel, train=TrainConfig(precision="fp64"))


def shuffled_and_plain(world: World) -> float:
    """The largest difference between dedup and a registered dispatcher that shuffles first."""
    DISPATCHER_NAMES.add("shuffled", "dedup after a permutation of the rank's own tokens")
    DISPATCHER_BUILDERS["shuffled"] = build_shuffled_dedup
    ids_TK = ROUTINGS["random"](world.rank)
    tokens, k = ids_TK.shape
    mine = slice(world.rank * EXPERTS // world.size, (world.rank + 1) * EXPERTS // world.size)
    results = []
    for name in ("shuffled", "dedup"):
        h, weights, up, down = leaves_of(tokens, k)
        leaves = [h, weights, up[mine].detach().requires_grad_(), down[mine].detach().requires_grad_()]
        dispatcher = build_dispatcher(config_for(world, name), KERNELS, world)
        results.append(through(dispatcher, KERNELS, ids_TK, leaves, numbers(tokens, WIDTH, seed=5)))
    pairs = zip(*results, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def test_a_registered_dispatcher_is_built_by_its_name():
    assert max(run_ranks(shuffled_and_plain, 2, ep=2)) <= 1e-12


def test_every_built_in_name_has_a_builder():
    assert set(DISPATCHER_BUILDERS) - {"local"} == set(DISPATCHER_NAMES.builtin) - {"auto"}


def no_builder(world: World) -> str:
    DISPATCHER_NAMES.add("unbuilt", "a name without code")
    with pytest.raises(UserError) as refused:
        build_dispatcher(config_for(world, "unbuilt"), KERNELS, world)
    return str(refused.value)


def test_a_name_without_a_builder_is_refused():
    assert all('no builder of a dispatcher "unbuilt"' in text for text in run_ranks(no_builder, 2, ep=2))
