"""Dense products inside exchanges on ranks that share one GPU: what one rank gives, the same bits twice, no wait of the
host, and a rank that stays away is named."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

from moefold.comm.part_sizes import TURNS
from moefold.config.errors import RunFailure
from moefold.dispatch.device_arena import DeviceArena, open_device_memory
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.dispatch.tiled_projections import TiledProjections
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.axes import World
from tests.dispatch.test_symmetric_on_gpu import no_waits
from tests.dispatch.test_tiled_projections import (
    FLAGS,
    HEADS,
    ROOM_BYTES,
    SHARDS,
    WIDTH,
    drawn_inputs,
    expected_of_rank,
    product_of_rank,
    whole_product,
)
from tests.support.ranks import run_device_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda:0"
PROGRAMS, SENDERS = 16, 3
COMPILING = 120.0  # seconds in which a rank may be behind another one that has compiled its kernels
PATIENCE = 6.0
TOLERANCE = 0.03  # of the largest value; bf16 rounds results between the products


class SeenOnCard(NamedTuple):
    """Of a rank: how far off it is for each way of sharding, whether a second run had the same bits, and what it says
    when rank 1 stays away."""

    off: dict[str, float]
    repeats: bool
    message: str


def tiled_projections(world: World) -> TiledProjections:
    axis = world.axis("tp")
    memory = open_device_memory(axis, ROOM_BYTES, world.device, pieces=FLAGS)
    arena = DeviceArena(axis, memory, COMPILING)
    capability = torch.cuda.get_device_capability(world.device)
    kernels = BoundKernels(Facts("cuda", "bf16", capability, hidden=WIDTH, ffn=sum(HEADS)))
    return TiledProjections(arena, kernels, signals_of_arena(arena, PROGRAMS, SENDERS), FLAGS)


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = [(a.cpu().float(), b) for a, b in zip(found, expected, strict=True) if len(b)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def run_on_card(world: World) -> SeenOnCard:
    torch.cuda.set_device(world.device)
    tiled = tiled_projections(world)
    axis = tiled.arena.axis
    off: dict[str, float] = {}
    repeats = True
    for name, shards_of in SHARDS.items():
        shards = shards_of(axis.size)
        inputs = drawn_inputs(sum(shards), torch.bfloat16)
        on_card = inputs._replace(
            x=inputs.x.to(world.device),
            weights=[weight.to(world.device) for weight in inputs.weights],
            out=inputs.out.to(world.device),
            dy=inputs.dy.to(world.device),
        )
        runs = [product_of_rank(tiled, on_card, shards) for _ in range(TURNS)]  # compiled, tables of rooms uploaded
        with no_waits(world.device):
            again = product_of_rank(tiled, on_card, shards)
        repeats = repeats and all(map(torch.equal, runs[0], again))
        wide = inputs._replace(
            x=inputs.x.float(),
            weights=[weight.float() for weight in inputs.weights],
            out=inputs.out.float(),
            dy=inputs.dy.float(),
        )
        off[name] = largest_difference(runs[0], expected_of_rank(whole_product(wide), axis, shards))
    torch.cuda.synchronize()
    if world.rank == 1:
        return SeenOnCard(off, repeats, "")
    tiled.arena.tail.patience = PATIENCE
    rows = torch.zeros(4, WIDTH, dtype=torch.bfloat16, device=world.device)
    tiled.gather(rows, [rows])
    torch.cuda.synchronize()
    with pytest.raises(RunFailure) as lost:
        tiled.arena.require_peers()
    return SeenOnCard(off, repeats, str(lost.value))


@cache
def on_ranks(ranks: int) -> list[SeenOnCard]:
    return run_device_ranks(run_on_card, ranks, device=DEVICE, tp=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_and_gradients_are_those_of_one_rank_twice_the_same_bits_without_a_wait(ranks: int):
    for seen in on_ranks(ranks):
        assert list(seen.off) == list(SHARDS)
        assert max(seen.off.values()) < TOLERANCE, seen.off
        assert seen.repeats


def test_a_rank_that_stays_away_is_named():
    exchange = 4 * (TURNS + 1) * len(SHARDS) + 1
    message = on_ranks(2)[0].message
    assert message.startswith(f"rank 1 gave no signal of exchange {exchange} over tp within {PATIENCE:g} s")
