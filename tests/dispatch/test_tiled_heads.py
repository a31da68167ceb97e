"""Dense products inside exchanges of positions for heads on several CPU ranks: by references over shared memory, and by
kernels in Triton's interpreter, whose signals and waits are those of a GPU, over the same memory. Results and gradients
are those of one rank with all rows, also where gradients of weights are computed after rooms have other contents."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from moefold.comm.arena import SharedArena
from moefold.comm.collectives import all_reduce_no_grad
from moefold.config.errors import RunFailure
from moefold.dispatch.room_sizes import flags_of_heads
from moefold.dispatch.tiled_experts import signals_of_arena
from moefold.dispatch.tiled_heads import TiledHeads
from moefold.kernels.linear.swapped_products import project_from_heads, project_to_heads
from moefold.layout.axes import Axis, World
from moefold.layout.deferred_wgrad import DeferredWork, deferring_weight_grads
from tests.dispatch.test_tiled_projections import KERNELS, LOOKS, ROOM_BYTES, Seen, host_arena
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")

WIDTH, HEADS = 24, (20, 4, 12)  # of all ranks
MOST_ROWS = 130
FLAGS = flags_of_heads(MOST_ROWS, HEADS)
SHARDS = {
    "even": lambda ranks: (9,) * ranks,
    "uneven": lambda ranks: (MOST_ROWS, 5, 0, 3)[:ranks],
}
NAN_BYTE = 255  # of floats of any width


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


def mixed_rows(heads_CH: torch.Tensor) -> torch.Tensor:
    """In the place of attention: each row is mixed with another, which is that of another rank."""
    return (heads_CH + heads_CH.flip(0)).tanh()


def whole_product(inputs: AllInputs, ranks: int) -> list[torch.Tensor]:
    """The result, and gradients of rows and of all weights."""
    leaves = [x.clone().requires_grad_() for x in (inputs.x, *inputs.weights, inputs.out)]
    x, *weights, out = leaves
    layers = [mixed_rows(x @ weight.T).chunk(ranks, 1) for weight in weights]
    by_rank = [heads for of_rank in zip(*layers, strict=True) for heads in of_rank]
    y = torch.cat(by_rank, 1) @ out.T
    y.backward(inputs.dy)
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def product_of_rank(tiled: TiledHeads, inputs: AllInputs, shards: tuple[int, ...], later: bool) -> list[torch.Tensor]:
    """The same by this rank: its rows, and gradients of weights of its rows alone. `later`: gradients of weights are
    computed when rooms have other contents."""
    mine = own_rows(tiled, shards)
    leaves = [part.clone().requires_grad_() for part in (inputs.x[mine], *inputs.weights, inputs.out)]
    x, *weights, out = leaves
    heads = [mixed_rows(each) for each in tiled.to_heads(x, weights, shards)]
    y = tiled.from_heads(torch.cat(heads, 1), out, shards)
    if later:
        queue: list[DeferredWork] = []
        with deferring_weight_grads(queue):
            y.backward(inputs.dy[mine])
        spoil_rooms(tiled)
        for work in queue:
            work()
    else:
        y.backward(inputs.dy[mine])
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def summed_over_ranks(found: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """Gradients of weights of all ranks' rows."""
    y, dx, *d_weights = found
    return [y, dx, *(all_reduce_no_grad(d_weight, axis) for d_weight in d_weights)]


def expected_of_rank(tiled: TiledHeads, inputs: AllInputs, shards: tuple[int, ...]) -> list[torch.Tensor]:
    y, dx, *d_weights = whole_product(inputs, len(shards))
    mine = own_rows(tiled, shards)
    return [y[mine], dx[mine], *d_weights]


def own_rows(tiled: TiledHeads, shards: tuple[int, ...]) -> slice:
    me = tiled.arena.axis.index
    begin = sum(shards[:me])
    return slice(begin, begin + shards[me])


def spoil_rooms(tiled: TiledHeads) -> None:
    """What an exchange that uses a room finds there from now on is no number."""
    dist.barrier()
    rooms = tiled.arena.arena_rooms
    rooms.parts[tiled.arena.axis.index][rooms.sizes.first_room :] = NAN_BYTE
    dist.barrier()


def compare(tiled: TiledHeads, dtype: torch.dtype) -> Seen:
    ranks = tiled.arena.axis.size
    off: dict[str, float] = {}
    repeats = True
    for name, shards_of in SHARDS.items():
        shards = shards_of(ranks)
        inputs = drawn_inputs(sum(shards), dtype)
        found = product_of_rank(tiled, inputs, shards, later=False)
        again = product_of_rank(tiled, inputs, shards, later=True)
        repeats = repeats and all(map(torch.equal, found, again))
        expected = expected_of_rank(tiled, inputs, shards)
        pairs = zip(summed_over_ranks(found, tiled.arena.axis), expected, strict=True)
        off[name] = max((a - b).abs().max().item() for a, b in pairs if len(a))
    return Seen(off, repeats, "")


def over_shared_memory(world: World) -> Seen:
    arena = SharedArena(world.axis("tp"), ROOM_BYTES, patience=60.0)
    return compare(TiledHeads(arena, KERNELS), torch.float64)


def with_kernels(world: World) -> Seen:
    """One program sends: the interpreter runs programs one after the other, and each takes tiles when it has sent."""
    arena = host_arena(world.axis("tp"), FLAGS)
    tiled = TiledHeads(arena, KERNELS, signals_of_arena(arena, 3, 1), FLAGS)
    tiled.project_to_heads = project_to_heads.implementations["triton"]
    tiled.project_from_heads = project_from_heads.implementations["triton"]
    seen = compare(tiled, torch.float32)
    if world.rank == 1:
        return seen
    arena.tail.patience = LOOKS
    inputs = drawn_inputs(8, torch.float32)
    with pytest.raises(RunFailure) as lost:
        tiled.to_heads(inputs.x[:4], inputs.weights)
    return seen._replace(message=str(lost.value))


@cache
def seen_by_ranks(kernels: bool, ranks: int) -> list[Seen]:
    return run_ranks(with_kernels if kernels else over_shared_memory, ranks, tp=ranks)


@pytest.mark.parametrize(("kernels", "ranks", "tolerance"), [(False, 2, 1e-10), (False, 4, 1e-10), (True, 2, 1e-4)])
def test_results_and_gradients_are_those_of_one_rank_twice_the_same_bits(kernels: bool, ranks: int, tolerance: float):
    for seen in seen_by_ranks(kernels, ranks):
        assert list(seen.off) == list(SHARDS)
        assert max(seen.off.values()) < tolerance, seen.off
        assert seen.repeats


def test_a_tile_that_gives_up_names_the_rank():
    message = seen_by_ranks(True, 2)[0].message
    assert message.startswith("rank 1 gave no signal of exchange 17 over tp within 40 s")
