"""Products inside exchanges of positions for heads on ranks that share one GPU: what one rank gives, twice the same
bits, no wait of the host."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from moefold.comm.part_sizes import TURNS
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.dispatch.tiled_heads import TiledHeads
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World
from tests.dispatch.test_symmetric_on_gpu import no_waits
from tests.dispatch.test_tiled_heads import (
    FLAGS,
    HEADS,
    SHARDS,
    WIDTH,
    AllInputs,
    drawn_inputs,
    expected_of_rank,
    product_of_rank,
)
from tests.dispatch.test_tiled_projections import ROOM_BYTES
from tests.dispatch.test_tiled_projections_on_gpu import COMPILING, PROGRAMS, SENDERS, TOLERANCE, largest_difference
from tests.support.ranks import run_device_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"


class SeenOnCard(NamedTuple):
    """Of a rank: how far off it is for each way of sharding, and whether a second run had the same bits."""

    off: dict[str, float]
    repeats: bool


def tiled_heads(world: World) -> TiledHeads:
    axis = world.axis("tp")
    memory = open_device_memory(axis, ROOM_BYTES, world.device, pieces=FLAGS)
    arena = DeviceArena(axis, memory, COMPILING)
    capability = torch.cuda.get_device_capability(world.device)
    kernels = BoundKernels(Facts("cuda", "bf16", capability, hidden=WIDTH, ffn=sum(HEADS)))
    return TiledHeads(arena, kernels, signals_of_arena(arena, PROGRAMS, SENDERS), FLAGS)


def moved(inputs: AllInputs, device: torch.device | None, dtype: torch.dtype) -> AllInputs:
    weights = [weight.to(device, dtype) for weight in inputs.weights]
    x, out, dy = (each.to(device, dtype) for each in (inputs.x, inputs.out, inputs.dy))
    return AllInputs(x, weights, out, dy)


def summed_on_host(found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of weights of all ranks' rows; nothing is left on the card."""
    y, dx, *d_weights = (part.cpu().float() for part in found)
    for d_weight in d_weights:
        dist.all_reduce(d_weight)
    return [y, dx, *d_weights]


def run_on_card(world: World) -> SeenOnCard:
    torch.cuda.set_device(world.device)
    tiled = tiled_heads(world)
    off: dict[str, float] = {}
    repeats = True
    for name, shards_of in SHARDS.items():
        shards = shards_of(tiled.arena.axis.size)
        inputs = drawn_inputs(sum(shards), torch.bfloat16)
        on_card = moved(inputs, world.device, torch.bfloat16)
        compute = partial(product_of_rank, tiled, on_card, shards, later=False)
        runs = [compute() for _ in range(TURNS)]  # compiled, tables of rooms uploaded
        with no_waits(world.device):
            again = compute()
        repeats = repeats and all(map(torch.equal, runs[0], again))
        expected = expected_of_rank(tiled, moved(inputs, None, torch.float32), shards)
        off[name] = largest_difference(summed_on_host(runs[0]), expected)
    return SeenOnCard(off, repeats)


@cache
def on_ranks(ranks: int) -> list[SeenOnCard]:
    return run_device_ranks(run_on_card, ranks, device=DEVICE, tp=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_gradients_are_those_of_one_rank_twice_the_same_bits_without_a_wait(ranks: int):
    for seen in on_ranks(ranks):
        assert list(seen.off) == list(SHARDS)
        assert max(seen.off.values()) < TOLERANCE, seen.off
        assert seen.repeats
