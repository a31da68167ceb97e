"""Every dispatcher gives what the local one gives, and sends no more than it says."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from moefold.comm import byte_counters
from moefold.config.open_names import DISPATCHER_NAMES
from moefold.config.run import Config, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.catalog import CATALOG
from moefold.kernels.experts.grouped_gemm import grouped_gemm
from moefold.kernels.facts import Facts
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World, create_world
from tests.support.ranks import run_ranks

# deepep needs its package, for which test_deepep.py has a stand-in; symmetric runs on one node (test_symmetric.py)
DISPATCHERS = [name for name in DISPATCHER_NAMES.builtin if name not in ("deepep", "symmetric")]
WORLD, EXPERTS, WIDTH, INNER, TOKENS = 4, 8, 6, 8, 12
LAYOUTS = {"ep 4": {"ep": 4}, "ep 2, etp 2": {"ep": 2, "etp": 2}, "etp 4": {"etp": 4}}
FACTS = Facts("cpu", "fp64", hidden=WIDTH, ffn=INNER)
BINDINGS = {"chosen": BoundKernels(FACTS), "reference": BoundKernels(FACTS, [f"{op}=reference" for op in CATALOG])}
VALUES = ("result", "gradient of tokens", "gradient of gates", "gradient of up", "gradient of down")


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def liked(rank: int, k: int, towards: float = 0.0, among: int = EXPERTS, tokens: int = TOKENS) -> torch.Tensor:
    liking = torch.rand(tokens, among, generator=torch.Generator().manual_seed(rank)) - towards * torch.arange(among)
    return liking.argsort(dim=1, descending=True)[:, :k]


def cycling(tokens: int, k: int) -> torch.Tensor:
    """Choices that go round all experts: spread exactly evenly."""
    return torch.arange(tokens * k).view(tokens, k) % EXPERTS


ROUTINGS = {
    "random": lambda rank: liked(rank, 3),
    "one choice": lambda rank: liked(rank, 1),
    "every expert": lambda rank: liked(rank, EXPERTS),
    "skewed": lambda rank: liked(rank, 2, towards=0.3),
    "cycling": lambda rank: cycling(TOKENS, 2),
    "all to one": lambda rank: torch.full((TOKENS, 1), 5),
    "all to one rank": lambda rank: liked(rank, 2, among=2),
    "empty experts": lambda rank: 2 * liked(rank, 2, among=3) + 1,
    "one rank has its own wish": lambda rank: (
        liked(rank, 2) if rank == 2 else torch.full((TOKENS, 2), 6) + cycling(1, 2)
    ),
    "no tokens": lambda rank: torch.empty(0, 2, dtype=torch.int64),
    "one token": lambda rank: liked(rank, 2, tokens=1),
}


def choose(name: str, kernels: Any, world: World) -> Dispatcher:
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER))
    parallel = ParallelConfig(ep=world.axis("ep").size, etp=world.axis("etp").size, dispatcher=name)
    config = Config(model=model, parallel=parallel, train=TrainConfig(precision="fp64"))
    return build_dispatcher(config, kernels, world)


def through(dispatcher: Dispatcher, kernels: Any, ids_TK: torch.Tensor, leaves: list[torch.Tensor], direction):
    """Tokens through experts of two matrices; the result and the gradients of all leaves."""
    h, gates, up, down = leaves
    receipt = dispatcher.plan(Routing(gates, ids_TK))
    rows = dispatcher.dispatch(h, receipt)
    order = rows.order
    x = kernels[gather_rows](rows.source_ND, order.index_R, order.slots_NK, order.holes)
    inner = kernels[grouped_gemm](x, up, order.ends_e).tanh() * order.weight_R[:, None]
    y = dispatcher.combine(kernels[grouped_gemm](inner, down, order.ends_e), receipt)
    return (y.detach(), *torch.autograd.grad(y, leaves, direction))


def worth_running(routing: str, binding: str, node_size: int) -> list[str]:
    """Every dispatcher on two nodes with every routing; other nodes where they matter, other kernels once."""
    if binding == "reference":
        return [*DISPATCHERS] if node_size == 2 and routing in ("random", "no tokens") else []
    return [*DISPATCHERS] if node_size == 2 else ["hierarchical"]


def agreement(world: World) -> dict[tuple[str, str, str, int], dict[str, float]]:
    """Each rank's distance from the local dispatcher on the tokens of all ranks."""
    found = {}
    parallel = ParallelConfig(ep=world.ep.size, etp=world.etp.size)
    up, down = numbers(EXPERTS, INNER, WIDTH, seed=1), numbers(EXPERTS, WIDTH, INNER, seed=2)
    for node_size in (4, 2):
        here = create_world(world.rank, WORLD, world.device, parallel, node_size)
        ep, etp = here.axis("ep"), here.axis("etp")
        experts = slice(ep.index * EXPERTS // ep.size, (ep.index + 1) * EXPERTS // ep.size)
        inner = slice(etp.index * INNER // etp.size, (etp.index + 1) * INNER // etp.size)
        for routing, choices in ROUTINGS.items():
            ids = [choices(rank) for rank in range(WORLD)]
            tokens, k = ids[0].shape
            held = [(numbers(tokens, WIDTH, seed=10 + r), numbers(tokens, k, seed=20 + r)) for r in range(WORLD)]
            directions = [numbers(tokens, WIDTH, seed=30 + r) for r in range(WORLD)]
            for binding, kernels in BINDINGS.items():
                if not worth_running(routing, binding, node_size):
                    continue
                together = [torch.cat([h for h, _ in held]), torch.cat([g for _, g in held]), up, down]
                together = [x.clone().requires_grad_() for x in together]
                local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), kernels)
                y, dh, dg, d_up, d_down = through(local, kernels, torch.cat(ids), together, torch.cat(directions))
                mine = slice(world.rank * tokens, (world.rank + 1) * tokens)
                expected = (y[mine], dh[mine], dg[mine], d_up[experts, inner], d_down[experts, :, inner])
                for name in worth_running(routing, binding, node_size):
                    leaves = [*held[world.rank], up[experts, inner], down[experts, :, inner]]
                    leaves = [x.clone().requires_grad_() for x in leaves]
                    dispatcher = choose(name, kernels, here)
                    values = through(dispatcher, kernels, ids[world.rank], leaves, directions[world.rank])
                    off = {}
                    for what, a, b in zip(VALUES, values, expected, strict=True):
                        assert a.shape == b.shape
                        off[what] = (a - b).abs().max().item() if a.numel() else 0.0
                    found[name, routing, binding, node_size] = off
    return found


@cache
def on_four(layout: str):
    return run_ranks(agreement, WORLD, **LAYOUTS[layout])


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dispatcher_equals_the_local_one_forward_and_backward(layout: str, dispatcher: str, routing: str):
    for rank, found in enumerate(on_four(layout)):
        seen = {case: off for case, off in found.items() if case[:2] == (dispatcher, routing)}
        assert (dispatcher, routing, "chosen", 2) in seen
        for case, values in seen.items():
            for what, off in values.items():
                assert off <= 1e-12, f"rank {rank}, {case}: {what} off by {off}"


def test_where_all_experts_are_here_nothing_travels():
    world = create_world(0, 1, torch.device("cpu"), ParallelConfig())
    assert all(isinstance(choose(name, BINDINGS["chosen"], world), LocalDispatcher) for name in DISPATCHERS)


def bytes_sent(world: World) -> dict[tuple[str, str], dict[str, dict[tuple[str, str], int]]]:
    """What dispatch and combine send, in bytes of fp64 rows."""
    here = create_world(world.rank, WORLD, world.device, ParallelConfig(ep=WORLD), node_size=2)
    found = {}
    for routing, choices in ROUTINGS.items():
        ids = choices(world.rank)
        tokens, k = ids.shape
        for name in DISPATCHERS:
            dispatcher = choose(name, BINDINGS["chosen"], here)
            receipt = dispatcher.plan(Routing(numbers(tokens, k, seed=1), ids))
            with byte_counters.counted_bytes_sent() as out:
                rows = dispatcher.dispatch(numbers(tokens, WIDTH, seed=2), receipt)
            x = rows.source_ND[rows.order.index_R]
            with byte_counters.counted_bytes_sent() as back:
                dispatcher.combine(x, receipt)
            found[name, routing] = {"out": dict(out), "back": dict(back)}
    return found


@cache
def sent_on_four():
    return run_ranks(bytes_sent, WORLD)


ROW = WIDTH * 8
HELD = EXPERTS // WORLD


def ranks_of(rank: int, routing: str) -> list[list[int]]:
    """For each token of a rank, where each of its choices lives."""
    return (ROUTINGS[routing](rank) // HELD).tolist()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_to_all_sends_exactly_the_rows_that_leave(routing: str):
    for rank, found in enumerate(sent_on_four()):
        leaving = sum(there != rank for choices in ranks_of(rank, routing) for there in choices)
        assert found["all_to_all", routing]["out"] == {("rows", "ep"): leaving * ROW}


def test_on_evenly_spread_choices_all_to_all_sends_its_formula():
    tokens, k = ROUTINGS["cycling"](0).shape
    assert tokens * k % EXPERTS == 0
    for found in sent_on_four():
        assert found["all_to_all", "cycling"]["out"]["rows", "ep"] == tokens * k * ROW * (WORLD - 1) // WORLD


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dedup_sends_a_token_once_to_each_other_rank(routing: str):
    for rank, found in enumerate(sent_on_four()):
        pairs = {(t, there) for t, choices in enumerate(ranks_of(rank, routing)) for there in choices if there != rank}
        assert found["dedup", routing]["out"] == {("rows", "ep"): len(pairs) * ROW}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_hierarchical_sends_a_token_once_to_each_other_node_and_then_once_to_each_rank_inside(routing: str):
    inside: dict[int, int] = dict.fromkeys(range(WORLD), 0)
    for rank, found in enumerate(sent_on_four()):
        nodes = set()
        for token, choices in enumerate(ranks_of(rank, routing)):
            for there in set(choices):
                nodes |= {(token, there // 2)} if there // 2 != rank // 2 else set()
                gateway = there // 2 * 2 + rank % 2  # the rank of that node at the same place as this one
                inside[gateway] += there != gateway
        assert found["hierarchical", routing]["out"]["rows", "ep nodes"] == len(nodes) * ROW
    for rank, found in enumerate(sent_on_four()):
        assert found["hierarchical", routing]["out"]["rows", "ep inside"] == inside[rank] * ROW


@pytest.mark.parametrize("routing", ROUTINGS)
def test_all_gather_sends_every_token_to_every_other_rank_whatever_the_routing(routing: str):
    for rank, found in enumerate(sent_on_four()):
        tokens = len(ROUTINGS[routing](rank))
        assert found["all_gather", routing]["out"] == {("gather", "ep_etp"): tokens * ROW * (WORLD - 1)}
        assert found["all_gather", routing]["back"] == {("scatter_sum", "ep_etp"): tokens * ROW * (WORLD - 1)}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dispatcher", ["all_to_all", "dedup", "hierarchical"])
def test_as_much_comes_back_as_went_out(dispatcher: str, routing: str):
    ways = {
        way: sum(sum(found[dispatcher, routing][way].values()) for found in sent_on_four()) for way in ("out", "back")
    }
    assert ways["out"] == ways["back"]
