"""The symmetric dispatcher on ranks that share one GPU: what the local one gives, the same bits twice, no wait of the
host, and a killed rank that is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from moefold.comm.part_sizes import TURNS
from moefold.config.errors import RunFailure
from moefold.config.run import Config, DataConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.build import build_dispatcher
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.symmetric import SymmetricDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World
from moefold.layout.dtypes import DTYPES
from tests.dispatch.test_dispatchers import VALUES, liked
from tests.dispatch.test_symmetric import require_local_values
from tests.support.ranks import run_device_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"
EXPERTS, WIDTH, INNER, TOKENS = 8, 32, 16, 150
LAYOUTS = {
    "ep 2": (2, {"ep": 2}),
    "ep 4": (4, {"ep": 4}),
    "ep 2, etp 2": (4, {"ep": 2, "etp": 2}),
}
TOLERANCES = {"fp32": 1e-6, "bf16": 0.02}  # of the largest value; bf16 rounds sums of a rank before they are added
SILENT = "a rank without tokens"
ROUTINGS = {
    "random": lambda rank: liked(rank, 3, tokens=TOKENS),
    "skewed": lambda rank: liked(rank, 2, towards=0.3, tokens=TOKENS),
    "one expert": lambda rank: torch.full((TOKENS, 1), 5),
    "one rank": lambda rank: liked(rank, 2, among=2, tokens=TOKENS),
    "empty experts": lambda rank: 2 * liked(rank, 2, among=3, tokens=TOKENS) + 1,
    "no tokens": lambda rank: torch.empty(0, 2, dtype=torch.int64),
    "one token": lambda rank: liked(rank, 2, tokens=1),
    SILENT: lambda rank: liked(rank, 3, tokens=TOKENS)[: TOKENS * (rank != 1)],
}
PATIENCE = 3.0


class RankInputs(NamedTuple):
    """Choices and numbers of one rank."""

    ids_TK: torch.Tensor
    h_TD: torch.Tensor
    gates_TK: torch.Tensor
    direction_TD: torch.Tensor


def numbers(*shape: int, seed: int, like: World, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=random, dtype=torch.float64)
    return drawn.to(like.device, dtype)


def inputs_of(world: World, routing: str, rank: int, dtype: torch.dtype) -> RankInputs:
    ids = ROUTINGS[routing](rank)
    tokens, k = ids.shape
    h = numbers(tokens, WIDTH, seed=10 + rank, like=world, dtype=dtype)
    gates = numbers(tokens, k, seed=20 + rank, like=world, dtype=torch.float32)
    direction = numbers(tokens, WIDTH, seed=30 + rank, like=world, dtype=dtype)
    return RankInputs(ids.to(world.device), h, gates, direction)


def kernels_of(world: World, precision: str) -> BoundKernels:
    capability = torch.cuda.get_device_capability(world.device) if world.device.type == "cuda" else (0, 0)
    return BoundKernels(Facts(world.device.type, precision, capability, hidden=WIDTH, ffn=INNER))


def build(world: World, precision: str) -> Dispatcher:
    model = ModelConfig(hidden=WIDTH, moe=MoeConfig(experts=EXPERTS, ffn=INNER, top_k=3))
    parallel = ParallelConfig(ep=world.ep.size, etp=world.etp.size, dispatcher="symmetric")
    train = TrainConfig(precision=precision, micro_batch=1, slow_timeout=60.0)
    config = Config(model=model, parallel=parallel, train=train, data=DataConfig(seq_len=TOKENS))
    return build_dispatcher(config, kernels_of(world, precision), world)


def through(dispatcher: Dispatcher, kernels: BoundKernels, given: RankInputs, weights: list[torch.Tensor]):
    """Tokens through experts of two matrices, which are spread over their rows: nothing here waits for the device.
    Experts multiply in fp64, so that what differs is the dispatcher's."""
    inputs = (given.h_TD, given.gates_TK, *weights)
    leaves = [x.clone().requires_grad_() for x in inputs]
    h, gates, up, down = leaves
    receipt = dispatcher.plan(Routing(gates, given.ids_TK))
    rows = dispatcher.dispatch(h, receipt)
    order = rows.order
    x = kernels[gather_rows](rows.source_ND, order.index_R, order.slots_NK, order.holes)
    row = torch.arange(len(x), device=x.device, dtype=order.ends_e.dtype)
    expert_R = torch.searchsorted(order.ends_e, row, right=True)
    experts = torch.arange(len(up), device=x.device)
    is_of = (expert_R[:, None] == experts).double()
    is_row = is_of.any(1, keepdim=True)
    x = torch.where(is_row, x, 0)  # rows behind the last are undefined
    weight_R = order.weight_R.double()
    raised = torch.einsum("rd,re,eid->ri", x.double(), is_of, up.double())
    inner = raised.tanh() * weight_R[:, None]
    made = torch.einsum("ri,re,edi->rd", inner, is_of, down.double())
    made = torch.where(is_row, made, 0)  # and so are their gradients
    y = dispatcher.combine(made.to(x.dtype), receipt)
    return (y.detach(), *torch.autograd.grad(y, leaves, given.direction_TD))


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Any wait of the host for the device is an error inside."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def joined(parts: list[RankInputs]) -> RankInputs:
    return RankInputs(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return largest(a.float() - b.float())


def largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def compare(world: World, routing: str, dispatcher: Dispatcher, precision: str) -> dict[str, Any]:
    """Distances from the local dispatcher on the tokens of all ranks, and whether a second run has the same bits."""
    dtype = DTYPES[precision]
    kernels = kernels_of(world, precision)
    parts = [inputs_of(world, routing, rank, dtype) for rank in range(world.size)]
    up = numbers(EXPERTS, INNER, WIDTH, seed=1, like=world, dtype=dtype)
    down = numbers(EXPERTS, WIDTH, INNER, seed=2, like=world, dtype=dtype)
    local = LocalDispatcher(RowPolicy(contiguous_placement(EXPERTS)), kernels)
    y, dh, dg, d_up, d_down = through(local, kernels, joined(parts), [up, down])
    begin = sum(len(part.ids_TK) for part in parts[: world.rank])
    mine = slice(begin, begin + len(parts[world.rank].ids_TK))
    held, part = EXPERTS // world.ep.size, INNER // world.etp.size
    experts = slice(world.ep.index * held, (world.ep.index + 1) * held)
    inner = slice(world.etp.index * part, (world.etp.index + 1) * part)
    expected = (
        y[mine],
        dh[mine],
        dg[mine],
        d_up[experts, inner],
        d_down[experts, :, inner],
    )
    weights = [up[experts, inner], down[experts, :, inner]]
    through(dispatcher, kernels, parts[world.rank], weights)  # tables are uploaded and kernels compiled
    with no_waits(world.device):
        values = through(dispatcher, kernels, parts[world.rank], weights)
    again = through(dispatcher, kernels, parts[world.rank], weights)
    return {
        "off": dict(zip(VALUES, map(distance, values, expected), strict=True)),
        "scale": max(map(largest, expected)),
        "repeats": all(map(torch.equal, values, again)),
    }


def compare_all(world: World) -> dict[tuple[str, str], dict[str, Any]]:
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    found = {}
    for precision in TOLERANCES:
        dispatcher = build(world, precision)
        for routing in ROUTINGS:
            found[precision, routing] = compare(world, routing, dispatcher, precision)
    return found


@cache
def on_ranks(layout: str):
    ranks, parallel = LAYOUTS[layout]
    return run_device_ranks(compare_all, ranks, device=DEVICE, **parallel)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_gives_what_the_local_one_gives_twice_and_the_host_waits_for_nothing(layout: str):
    for rank, cases in enumerate(on_ranks(layout)):
        for (precision, routing), found in cases.items():
            where = f"rank {rank}, {routing} in {precision}"
            require_local_values(found, TOLERANCES[precision], where)


class Replayed(NamedTuple):
    exchanges: int
    are_equal: list[bool]


def replay_a_layer(world: World) -> Replayed:
    """Forward and backward captured as one graph, and replayed on the choices and numbers of other routings."""
    torch.cuda.set_device(world.device)
    dispatcher, kernels = build(world, "bf16"), kernels_of(world, "bf16")
    assert isinstance(dispatcher, SymmetricDispatcher)
    up = numbers(EXPERTS, INNER, WIDTH, seed=1, like=world, dtype=torch.bfloat16)
    down = numbers(EXPERTS, WIDTH, INNER, seed=2, like=world, dtype=torch.bfloat16)
    held = EXPERTS // world.ep.size
    mine = slice(world.rank * held, (world.rank + 1) * held)
    weights = [up[mine], down[mine]]
    inputs = [inputs_of(world, "random", rank, torch.bfloat16) for rank in (world.rank, world.rank + 5, world.rank + 9)]
    expected = [through(dispatcher, kernels, given, weights) for given in inputs]
    read = RankInputs(*(x.clone() for x in inputs[0]))
    graph = torch.cuda.CUDAGraph()
    before = dispatcher.arena.number
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = through(dispatcher, kernels, read, weights)
    exchanges = dispatcher.arena.number - before
    are_equal = []
    for given, values in zip(inputs, expected, strict=True):
        for old, new in zip(read, given, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        are_equal.append(all(map(torch.equal, results, values)))
    dispatcher.arena.require_peers()
    return Replayed(exchanges, are_equal)


def test_forward_and_backward_are_captured_and_replayed_on_other_tokens():
    for seen in run_device_ranks(replay_a_layer, 2, device=DEVICE, ep=2):
        assert seen.exchanges % TURNS == 0
        assert seen.are_equal == [True] * 3


class LostPeer(NamedTuple):
    message: str
    seconds: float


def lose_a_peer(world: World) -> LostPeer:
    """Rank 1 is killed behind the first exchange."""
    torch.cuda.set_device(world.device)
    memory = open_device_memory(world.ep, 64, world.device)
    arena = DeviceArena(world.ep, memory, PATIENCE)
    arena.exchange("something")
    torch.cuda.synchronize()
    arena.require_peers()
    if world.rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return LostPeer("", 0.0)
    begun = time.monotonic()
    arena.exchange("tokens")
    torch.cuda.synchronize()
    seconds = time.monotonic() - begun
    with pytest.raises(RunFailure) as lost:
        arena.require_peers()
    return LostPeer(str(lost.value), seconds)


def test_a_killed_peer_is_named_within_the_timeout():
    lost = run_device_ranks(lose_a_peer, 2, device=DEVICE, ep=2)[0]
    assert lost.message.startswith(f"rank 1 gave no signal of exchange 2 over ep within {PATIENCE:g} s")
    assert PATIENCE <= lost.seconds < PATIENCE + 5
