"""Backward of experts inside the exchanges of their rows, on CPU ranks: the bits of the symmetric dispatcher around the
same experts, and what the local dispatcher gives on the tokens of all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import pytest
import torch

from moefold.config.run import CapacityConfig, Config, DataConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.symmetric import SymmetricDispatcher
from moefold.dispatch.tiled_experts import TiledExperts
from moefold.kernels.experts.expert_mlp import ExpertParts, expert_mlp
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.linear.linear import grouped_linear
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from tests.dispatch.test_dispatchers import BINDINGS, EXPERTS, INNER, TOKENS, VALUES, WIDTH, numbers
from tests.dispatch.test_symmetric import SILENT, distance, experts_of, ids_of
from tests.support.ranks import run_ranks

KERNELS = BINDINGS["reference"]
LAYOUTS = {"ep 2": (2, {"ep": 2}), "ep 2, etp 2": (4, {"ep": 2, "etp": 2})}
CASES = ["random", "skewed", "all to one", "empty experts", "no tokens", SILENT]
PADDED = (False, True)
TOLERANCE = 1e-11


def project_up(x_RD: torch.Tensor, gate_up_E2FD: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    h_RN = KERNELS[grouped_linear](x_RD, gate_up_E2FD.flatten(1, 2), ends_E)
    return h_RN.unflatten(1, (2, -1))


def project_down(
    a_RF: torch.Tensor, down_EDF: torch.Tensor, ends_E: torch.Tensor, inside_R: torch.Tensor | None
) -> torch.Tensor:
    return KERNELS[grouped_linear](a_RF, down_EDF, ends_E)


PARTS = ExpertParts(KERNELS[gather_rows], project_up, KERNELS[swiglu], project_down)
Values = tuple[torch.Tensor, ...]


class Share(NamedTuple):
    """What a rank gives to a layer: choices, leaves (tokens, gates, weights) and the gradient of the results."""

    ids_TK: torch.Tensor
    leaves: list[torch.Tensor]
    direction_TD: torch.Tensor


def build(world: World, padded: bool, tiles: tuple[str, ...]) -> Dispatcher:
    capacity = CapacityConfig(pad_rows=8 if padded else 1)
    moe = MoeConfig(experts=EXPERTS, ffn=INNER, top_k=3, capacity=capacity)
    parallel = ParallelConfig(ep=world.ep.size, etp=world.etp.size, dispatcher="symmetric", tiles=tiles)
    config = Config(
        model=ModelConfig(hidden=WIDTH, moe=moe),
        parallel=parallel,
        train=TrainConfig(precision="fp64", micro_batch=1),
        data=DataConfig(seq_len=TOKENS),
    )
    return build_dispatcher(config, KERNELS, world)


def draw_share(world: World, routing: str, ranks: range) -> Share:
    """Of the tokens of these ranks, with all weights."""
    ids = [ids_of(routing, rank) for rank in ranks]
    k = ids[0].shape[1]
    h = [numbers(len(chosen), WIDTH, seed=10 + rank) for rank, chosen in zip(ranks, ids, strict=True)]
    gates = [numbers(len(chosen), k, seed=20 + rank) for rank, chosen in zip(ranks, ids, strict=True)]
    directions = [numbers(len(chosen), WIDTH, seed=30 + rank) for rank, chosen in zip(ranks, ids, strict=True)]
    gate_up = numbers(EXPERTS, 2, INNER, WIDTH, seed=1)
    down = numbers(EXPERTS, WIDTH, INNER, seed=2)
    return Share(torch.cat(ids), [torch.cat(h), torch.cat(gates), gate_up, down], torch.cat(directions))


def share_of_rank(world: World, routing: str) -> Share:
    share = draw_share(world, routing, range(world.rank, world.rank + 1))
    experts, inner = experts_of(world)
    h, gates, gate_up, down = share.leaves
    return share._replace(leaves=[h, gates, gate_up[experts, :, inner], down[experts, :, inner]])


def through(dispatcher: Dispatcher, share: Share, deferred: int = 0) -> Values:
    """The result and the gradients of all leaves, of which so many are deferred."""
    leaves = [x.clone().requires_grad_() for x in share.leaves]
    h, gates, gate_up, down = leaves
    receipt = dispatcher.plan(Routing(gates, share.ids_TK))
    rows = dispatcher.dispatch(h, receipt)
    order = rows.order
    maps = (order.weight_R, order.index_R, order.slots_NK, order.ends_e, order.holes)
    inputs = (rows.source_ND, gate_up, down, *maps, PARTS)
    y_RD = rows.around(expert_mlp.reference, *inputs) if rows.around else expert_mlp.reference(*inputs)
    y = dispatcher.combine(y_RD, receipt)
    queue: list[DeferredWork] = []
    with deferring_weight_grads(queue) if deferred else nullcontext():
        y.backward(share.direction_TD)
    assert len(queue) == deferred
    for compute in queue:
        compute()
    return (y.detach(), *(leaf.grad for leaf in leaves))  # pyright: ignore[reportReturnType]


def on_all_tokens(world: World, routing: str) -> Values:
    """What the local dispatcher gives this rank's tokens and weights."""
    share = draw_share(world, routing, range(world.size))
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS)
    y, dh, dg, d_up, d_down = through(local, share)
    begin = sum(len(ids_of(routing, rank)) for rank in range(world.rank))
    mine = slice(begin, begin + len(ids_of(routing, world.rank)))
    experts, inner = experts_of(world)
    return y[mine], dh[mine], dg[mine], d_up[experts, :, inner], d_down[experts, :, inner]


class Compared(NamedTuple):
    off: dict[str, float]  # from what the local dispatcher gives
    apart: dict[str, float]  # from what the symmetric dispatcher gives
    repeats: bool  # with weight gradients deferred


def compare(world: World) -> dict[tuple[str, bool], Compared]:
    found: dict[tuple[str, bool], Compared] = {}
    for padded in PADDED:
        plain = build(world, padded, ())
        tiled = build(world, padded, ("experts",))
        assert isinstance(tiled, SymmetricDispatcher)
        assert isinstance(tiled.direct, TiledExperts)
        for routing in CASES[: 2 if padded else None]:
            share = share_of_rank(world, routing)
            values = through(tiled, share)
            off = dict(zip(VALUES, map(distance, values, on_all_tokens(world, routing)), strict=True))
            apart = dict(zip(VALUES, map(distance, values, through(plain, share)), strict=True))
            again = through(tiled, share, deferred=2)
            found[routing, padded] = Compared(off, apart, all(map(torch.equal, values, again)))
    return found


@cache
def on_ranks(layout: str) -> list[dict[tuple[str, bool], Compared]]:
    ranks, parallel = LAYOUTS[layout]
    return run_ranks(compare, ranks, **parallel)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients_are_those_of_the_local_dispatcher(layout: str):
    for rank, cases in enumerate(on_ranks(layout)):
        for case, found in cases.items():
            assert max(found.off.values()) < TOLERANCE, f"rank {rank}, {case}: {found.off}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_have_the_bits_of_the_symmetric_dispatcher_and_again_with_deferred_weight_gradients(
    layout: str,
):
    for rank, cases in enumerate(on_ranks(layout)):
        for case, found in cases.items():
            assert max(found.apart.values()) == 0, f"rank {rank}, {case}: {found.apart}"
            assert found.repeats, f"rank {rank}, {case}"
