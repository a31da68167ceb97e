"""Dense products inside exchanges between tensor-parallel ranks on several CPU ranks: by references over shared memory,
and by kernels in Triton's interpreter, whose signals and waits are those of a GPU, over the same memory. Results and
gradients are those of one rank with all rows and all weights."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from moefold.comm.arena import SharedArena, open_shared_memory, words_of
from moefold.config.errors import RunFailure
from moefold.dispatch.device_arena import DeviceArena, PeerMemory, part_sizes
from moefold.dispatch.room_sizes import flags_of_sender
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.dispatch.tiled_projections import TiledProjections
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.exchanged_products import multiply_gathered, scatter_products
from moefold.layout.axes import Axis, World
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

WIDTH, HEADS = 24, (16, 8, 8)  # of all ranks
MOST_ROWS = 140
ROOM_BYTES = 2**17
FLAGS = flags_of_sender(MOST_ROWS, max(WIDTH, *HEADS))
KERNELS = BoundKernels(Facts("cpu", "fp32"))
SHARDS = {
    "even": lambda ranks: (9,) * ranks,
    "uneven, one empty": lambda ranks: (MOST_ROWS, 0, 5, 3)[:ranks],
}
LOOKS = 40  # of a kernel without a clock, before it gives up


class AllInputs(NamedTuple):
    """Of all ranks: rows, weights of three layers, the weight of the way back, and the gradient of the result."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    out: torch.Tensor
    dy: torch.Tensor


def drawn_inputs(rows: int, dtype: torch.dtype) -> AllInputs:
    random = torch.Generator().manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    weights = [draw(width, WIDTH) / 4 for width in HEADS]
    return AllInputs(draw(rows, WIDTH), weights, draw(WIDTH, sum(HEADS)) / 4, draw(rows, WIDTH))


def whole_product(inputs: AllInputs) -> list[torch.Tensor]:
    """The result, and gradients of rows and of all weights."""
    leaves = [x.clone().requires_grad_() for x in (inputs.x, *inputs.weights, inputs.out)]
    x, *weights, out = leaves
    joined = torch.cat([x @ weight.T for weight in weights], 1)
    y = joined.tanh() @ out.T
    y.backward(inputs.dy)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def own_part(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return x.chunk(axis.size)[axis.index].clone()


def out_columns(out: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The columns of this rank's parts of all layers."""
    parts = [own_part(columns, axis) for columns in out.T.split(HEADS)]
    return torch.cat(parts).T


def product_of_rank(tiled: TiledProjections, inputs: AllInputs, shards: tuple[int, ...]) -> list[torch.Tensor]:
    """The same by this rank: its rows, its parts of weights."""
    axis = tiled.arena.axis
    begin = sum(shards[: axis.index])
    mine = slice(begin, begin + shards[axis.index])
    parts = [inputs.x[mine], *(own_part(weight, axis) for weight in inputs.weights), out_columns(inputs.out, axis)]
    leaves = [part.clone().requires_grad_() for part in parts]
    x, *weights, out = leaves
    joined = torch.cat(tiled.gather(x, weights, shards), 1)
    y = tiled.scatter(joined.tanh(), out, shards)
    y.backward(inputs.dy[mine])
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def expected_of_rank(whole: list[torch.Tensor], axis: Axis, shards: tuple[int, ...]) -> list[torch.Tensor]:
    y, dx, *d_weights, d_out = whole
    begin = sum(shards[: axis.index])
    mine = slice(begin, begin + shards[axis.index])
    return [y[mine], dx[mine], *(own_part(d, axis) for d in d_weights), out_columns(d_out, axis)]


class Seen(NamedTuple):
    """Of a rank: how far off it is for each way of sharding, whether a second run had the same bits, and what it says
    when rank 1 stays away."""

    off: dict[str, float]
    repeats: bool
    message: str


def compare(tiled: TiledProjections, dtype: torch.dtype) -> Seen:
    axis = tiled.arena.axis
    off: dict[str, float] = {}
    repeats = True
    for name, shards_of in SHARDS.items():
        shards = shards_of(axis.size)
        inputs = drawn_inputs(sum(shards), dtype)
        found = product_of_rank(tiled, inputs, shards)
        again = product_of_rank(tiled, inputs, shards)
        repeats = repeats and all(map(torch.equal, found, again))
        expected = expected_of_rank(whole_product(inputs), axis, shards)
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if len(a)]
        off[name] = max((a - b).abs().max().item() for a, b in pairs)
    return Seen(off, repeats, "")


def over_shared_memory(world: World) -> Seen:
    arena = SharedArena(world.axis("tp"), ROOM_BYTES, patience=60.0)
    return compare(TiledProjections(arena, KERNELS), torch.float64)


def host_arena(axis: Axis, flags: int = FLAGS) -> DeviceArena:
    sizes = part_sizes(axis, ROOM_BYTES, pieces=flags)
    memory = open_shared_memory(axis, sizes.total * axis.size)
    parts = list(memory.view(axis.size, sizes.total))
    return DeviceArena(axis, PeerMemory(parts, [words_of(part, sizes) for part in parts], sizes), patience=1e6)


def with_kernels(world: World) -> Seen:
    """One program sends: the interpreter runs programs one after the other, and each takes tiles when it has sent."""
    arena = host_arena(world.axis("tp"))
    tiled = TiledProjections(arena, KERNELS, signals_of_arena(arena, 3, 1), FLAGS)
    tiled.multiply_gathered = multiply_gathered.implementations["triton"]
    tiled.scatter_products = scatter_products.implementations["triton"]
    seen = compare(tiled, torch.float32)
    if world.rank == 1:
        return seen
    arena.tail.patience = LOOKS
    inputs = drawn_inputs(8, torch.float32)
    with pytest.raises(RunFailure) as lost:
        tiled.gather(inputs.x[:4], inputs.weights)
    return seen._replace(message=str(lost.value))


@cache
def seen_by_ranks(kernels: bool, ranks: int) -> list[Seen]:
    return run_ranks(with_kernels if kernels else over_shared_memory, ranks, tp=ranks)


@pytest.mark.parametrize(("kernels", "ranks", "tolerance"), [(False, 2, 1e-12), (False, 4, 1e-12), (True, 2, 1e-5)])
def test_results_and_gradients_are_those_of_one_rank_twice_the_same_bits(kernels: bool, ranks: int, tolerance: float):
    for seen in seen_by_ranks(kernels, ranks):
        assert list(seen.off) == list(SHARDS)
        assert max(seen.off.values()) < tolerance, seen.off
        assert seen.repeats


def test_a_tile_that_gives_up_names_the_rank():
    message = seen_by_ranks(True, 2)[0].message
    assert message.startswith("rank 1 gave no signal of exchange 17 over tp within 40 s")
