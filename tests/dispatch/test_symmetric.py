"""The symmetric dispatcher: what the local one gives and the bits of dedup, without a wait of the host."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from moefold.comm.byte_counters import counted_bytes_sent
from moefold.config.errors import UserError
from moefold.config.run import Config, DataConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.room_sizes import arena_bytes, room_in_words
from moefold.dispatch.symmetric import SymmetricDispatcher
from moefold.layout.axes import World, create_world
from moefold.presets.recipe import resolve_recipe
from tests.dispatch.test_dispatchers import BINDINGS, EXPERTS, INNER, ROUTINGS, TOKENS, VALUES, WIDTH, numbers, through
from tests.support.host_waits import counted_waits
from tests.support.ranks import run_ranks

KERNELS = BINDINGS["chosen"]
LAYOUTS = {"ep 2": (2, {"ep": 2}), "ep 2, etp 2": (4, {"ep": 2, "etp": 2}), "ep 8": (8, {"ep": 8})}
SILENT = "a rank without tokens"
CASES = [*ROUTINGS, SILENT]
FEW_CASES = ["random", "all to one", "empty experts", SILENT]  # on eight ranks, and in fp32
EXPERTS_CHOOSE = [
    "--train.precision=fp32",
    "--model.moe.router.kind=expert_choice",
    "--model.moe.router.looks_ahead=true",
    "--model.moe.balance.bias_rate=0",
    "--parallel.ep=2",
    "--parallel.dispatcher=symmetric",
    "--parallel.room=1.5",
]
TOLERANCES = {"fp64": 1e-13, "fp32": 1e-6}


def ids_of(routing: str, rank: int) -> torch.Tensor:
    if routing != SILENT:
        return ROUTINGS[routing](rank)
    return ROUTINGS["random"](rank)[: TOKENS * (rank != 1)]


def build(name: str, world: World, precision: str) -> Dispatcher:
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER, top_k=EXPERTS))
    parallel = ParallelConfig(ep=world.ep.size, etp=world.etp.size, dispatcher=name)
    train = TrainConfig(precision=precision, micro_batch=1)
    config = Config(model=model, parallel=parallel, train=train, data=DataConfig(seq_len=TOKENS))
    return build_dispatcher(config, KERNELS, world)


def experts_of(world: World) -> tuple[slice, slice]:
    """The experts of a rank, and its part of each."""
    ep, etp = world.ep, world.etp
    held, part = EXPERTS // ep.size, INNER // etp.size
    return slice(ep.index * held, (ep.index + 1) * held), slice(etp.index * part, (etp.index + 1) * part)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item() if a.numel() else 0.0


def rows_elsewhere(ids_TK: torch.Tensor, world: World) -> int:
    """A token once for each other rank that has a part of one of its experts."""
    ep, etp = world.ep, world.etp
    homes = [{expert * ep.size // EXPERTS for expert in chosen} for chosen in ids_TK.tolist()]
    return sum(etp.size * len(ranks) - (ep.index in ranks) for ranks in homes)


def bytes_of_choices(k: int, world: World, dtype: torch.dtype) -> int:
    """What a rank announces to each other: place and weight of every choice it has room for, and of each block of 128
    tokens the choices of every expert, the tokens for every rank of ep, and a room."""
    blocks = -(-TOKENS // 128)
    counts = blocks * (EXPERTS + world.ep.size + 1)
    return TOKENS * k * (4 + dtype.itemsize) + counts * 4


def compare(world: World, routing: str, dispatchers: dict[str, Dispatcher], dtype: torch.dtype) -> dict[str, Any]:
    """Distances of the symmetric dispatcher from the local one on the tokens of all ranks; whether its bits are those
    of dedup and of a second run; where the host waited; and counted bytes of choices and of tokens beside those
    that leave."""
    ids = [ids_of(routing, rank) for rank in range(world.size)]
    k = ids[0].shape[1]
    h = [numbers(len(chosen), WIDTH, seed=10 + rank).to(dtype) for rank, chosen in enumerate(ids)]
    gates = [numbers(len(chosen), k, seed=20 + rank).to(dtype) for rank, chosen in enumerate(ids)]
    directions = [numbers(len(chosen), WIDTH, seed=30 + rank).to(dtype) for rank, chosen in enumerate(ids)]
    up, down = numbers(EXPERTS, INNER, WIDTH, seed=1).to(dtype), numbers(EXPERTS, WIDTH, INNER, seed=2).to(dtype)
    together = [x.clone().requires_grad_() for x in (torch.cat(h), torch.cat(gates), up, down)]
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), KERNELS)
    y, dh, dg, d_up, d_down = through(local, KERNELS, torch.cat(ids), together, torch.cat(directions))
    begin = sum(map(len, ids[: world.rank]))
    mine = slice(begin, begin + len(ids[world.rank]))
    experts, inner = experts_of(world)
    expected = (y[mine], dh[mine], dg[mine], d_up[experts, inner], d_down[experts, :, inner])

    def run(name: str):
        own = (h[world.rank], gates[world.rank], up[experts, inner], down[experts, :, inner])
        leaves = [x.clone().requires_grad_() for x in own]
        return through(dispatchers[name], KERNELS, ids[world.rank], leaves, directions[world.rank])

    with counted_waits() as waits:
        values = run("symmetric")
    again = run("symmetric") if routing == "random" else values
    off = dict(zip(VALUES, map(distance, values, expected), strict=True))
    dedup = run("dedup") if routing in ("random", SILENT) else values
    with counted_bytes_sent() as announced:
        receipt = dispatchers["symmetric"].plan(Routing(gates[world.rank], ids[world.rank]))
    with counted_bytes_sent() as sent:
        dispatchers["symmetric"].dispatch(h[world.rank], receipt)
    order = receipt.order
    behind = slice(int(order.ends_e[-1]), None)
    return {
        "off": off,
        "announced": announced.total() - (world.size - 1) * bytes_of_choices(k, world, dtype),
        "sent": sent.total() - rows_elsewhere(ids[world.rank], world) * WIDTH * dtype.itemsize,
        "undefined rows": order.index_R[behind].max().item() if len(order.index_R[behind]) else -1,
        "scale": max(x.abs().max().item() if x.numel() else 0.0 for x in expected),
        "repeats": all(map(torch.equal, values, again)),
        "dedup": max(map(distance, values, dedup)),
        "waits": [place for place in waits.places if "grouped_gemm" not in place],
    }


def compare_all(world: World) -> dict[tuple[str, str], dict[str, Any]]:
    found = {}
    for precision, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
        dispatchers = {name: build(name, world, precision) for name in ("symmetric", "dedup")}
        for routing in CASES if precision == "fp64" and world.size < 8 else FEW_CASES:
            found[precision, routing] = compare(world, routing, dispatchers, dtype)
    return found


@cache
def on_ranks(layout: str):
    ranks, parallel = LAYOUTS[layout]
    return run_ranks(compare_all, ranks, **parallel)


def require_local_values(found: dict[str, Any], tolerance: float, where: str) -> None:
    """Values within a share of the largest one from those of the local dispatcher, and the same bits twice."""
    for what, off in found["off"].items():
        assert off <= tolerance * max(1.0, found["scale"]), f"{where}: {what} off by {off}"
    assert found["repeats"], where


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_gives_what_the_local_one_gives_twice_and_the_host_waits_for_nothing(layout: str):
    for rank, cases in enumerate(on_ranks(layout)):
        for (precision, routing), found in cases.items():
            where = f"rank {rank}, {routing} in {precision}"
            require_local_values(found, TOLERANCES[precision], where)
            assert found["waits"] == [], where
            assert found["undefined rows"] == -1, where
            assert found["announced"] == 0, where
            assert found["sent"] == 0, where
            if layout != "ep 2, etp 2":
                assert found["dedup"] == 0, where


def refusals(world: World) -> list[str]:
    """What is refused: more tokens than there is room for, and ranks on several nodes."""
    dispatcher = build("symmetric", world, "fp64")
    with pytest.raises(UserError) as too_many:
        dispatcher.plan(Routing(torch.ones(TOKENS + 1, 1), torch.zeros(TOKENS + 1, 1, dtype=torch.int64)))
    on_nodes = create_world(world.rank, world.size, world.device, ParallelConfig(ep=2), node_size=1)
    with pytest.raises(UserError) as several_nodes:
        build("symmetric", on_nodes, "fp64")
    return [str(too_many.value), str(several_nodes.value)]


def bounds_where_experts_choose(world: World) -> tuple[int, int | None, str]:
    """Rows that a run with experts that choose has room for, and what is said of them."""
    config = resolve_recipe("tiny", EXPERTS_CHOOSE, world.size)
    dispatcher = build_dispatcher(config, KERNELS, world)
    assert isinstance(dispatcher, SymmetricDispatcher)
    arena = dispatcher.arena.arena_rooms
    assert arena.sizes.total == arena_bytes(config, 4)
    rows = dispatcher.direct.rows
    return rows.arriving, rows.choices, room_in_words(config, 4)


def all_of_two(world: World):
    return refusals(world), bounds_where_experts_choose(world)


@cache
def on_two():
    return run_ranks(all_of_two, 2, ep=2)


def test_where_experts_choose_rows_are_bounded_by_the_mean_as_is_said():
    for _, (arriving, choices, words) in on_two():
        assert (arriving, choices) == (1024, 1536)  # 512 tokens a rank, of 2 experts in the mean
        assert words.startswith("room for 1536 rows, 1.5 x the mean")


def test_what_has_no_room_is_refused():
    for (too_many, several_nodes), *_ in on_two():
        assert "has room for 12 tokens of a rank" in too_many
        assert "a rank sends 13" in too_many
        assert "on one machine, but these 2 are on 2" in several_nodes
