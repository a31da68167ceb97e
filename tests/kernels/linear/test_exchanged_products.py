"""Dense products inside exchanges: the kernels in Triton's interpreter, where there is no GPU, against the references,
with signals that have been given, and with signals that have not. In fp32: the interpreter has no products in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.experts.tiles_in_exchange import signals_given
from moefold.kernels.linear import shard_tiles_triton
from moefold.kernels.linear.exchanged_products import (
    EXCHANGED_SIZES,
    FLAGS,
    multiply_gathered,
    scatter_products,
)
from moefold.kernels.linear.from_heads_triton import launch_from_heads
from moefold.kernels.linear.gathered_product_triton import launch_gathered_product
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.linear.scattered_product_triton import bind_scattered_product, launch_scattered_product
from moefold.kernels.linear.shard_tiles_triton import TileSizes
from moefold.kernels.linear.swapped_products import SWAPPED_SIZES, project_from_heads, project_to_heads
from moefold.kernels.linear.to_heads_triton import bind_to_heads, launch_to_heads
from moefold.kernels.registry import KernelCase, KernelOp, map_tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels have no products in fp32")

BY_OP: dict[KernelOp[..., Any], Any] = {
    multiply_gathered: launch_gathered_product,
    scatter_products: launch_scattered_product,
    project_to_heads: launch_to_heads,
    project_from_heads: launch_from_heads,
}
OPS = {op.name: op for op in BY_OP}
LAUNCHES = {op.name: launch for op, launch in BY_OP.items()}
SMALL = TileSizes(32, 16, 16, 3, 4, 1)  # several columns of tiles, and bands that are not full
DESCRIBED = SMALL._replace(described=True)
CASES = [(op, sizes.name) for op in ("multiply_gathered", "scatter_products") for sizes in EXCHANGED_SIZES]
CASES += [(op, sizes.name) for op in ("project_to_heads", "project_from_heads") for sizes in SWAPPED_SIZES]
LOOKS = 6  # at a flag, before a tile gives up


def case_of(op: str, name: str) -> KernelCase:
    found = {case.name: case for case in OPS[op].cases("cpu", torch.float32)}
    return found[name]


def run(op: str, case: KernelCase, launch: Any, **signals: object) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and the rooms of all ranks; on copies of the inputs, of which weights keep their strides."""
    rows, weights, rooms, exchange = case.inputs
    rows, rooms = map_tensors((rows, rooms), torch.Tensor.clone)
    exchange = exchange._replace(signals=exchange.signals._replace(**signals))
    out = launch(rows, weights, rooms, exchange)
    return [out] if isinstance(out, torch.Tensor) else list(out), rooms


def launch_with(op: str, sizes: TileSizes) -> Any:
    def launch(*inputs: Any) -> Any:
        return LAUNCHES[op](*inputs, sizes)

    return launch


@pytest.mark.parametrize(("op", "name"), CASES)
def test_results_and_rooms_are_those_of_the_reference_twice_the_same_bits(op: str, name: str):
    """Ranks without rows, widths that are no multiples of a tile, weights that are transposed views."""
    case = case_of(op, name)
    expected, expected_rooms = run(op, case, OPS[op].reference)
    several = {"senders": 2, "programs": 5}
    small = launch_with(op, SMALL)
    forms = [(small, {}), (small, {"apart": True}), (small, several), (launch_with(op, DESCRIBED), {})]
    found: list[torch.Tensor] = []
    for launch, signals in forms:
        found, rooms = run(op, case, launch, **signals)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rooms, expected_rooms, rtol=1e-5, atol=1e-5)
    again, _ = run(op, case, launch_with(op, DESCRIBED), programs=5)
    assert all(map(torch.equal, found, again))


def test_products_by_themselves_and_their_exchange_give_the_same():
    case = case_of("scatter_products", "5 + 0 + 70 rows, 24 and 40, turned")
    expected, expected_rooms = run("scatter_products", case, scatter_products.reference)

    def in_two_launches(inputs: Any, weights: Any, rooms: Any, exchange: ProductExchange) -> torch.Tensor:
        y_CN = torch.zeros(exchange.rows, len(weights[0]))
        bind_scattered_product(inputs, weights, rooms, exchange, SMALL, y_CN).run(sends=False, sums=False)
        launch = bind_scattered_product(inputs, weights, rooms, exchange, SMALL, y_CN)
        launch.run(multiplies=False)
        return launch.y_TN

    found, rooms = run("scatter_products", case, in_two_launches)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rooms, expected_rooms, rtol=1e-5, atol=1e-5)


def test_heads_made_by_themselves_and_sent_behind_give_the_same_to_others():
    case = case_of("project_to_heads", "5 + 0 + 35 rows, 24 and 20, turned")
    expected, expected_rooms = run("project_to_heads", case, project_to_heads.reference)

    def in_two_launches(x: Any, weights: Any, rooms: Any, exchange: ProductExchange) -> tuple[torch.Tensor, ...]:
        made = torch.zeros(len(x), len(weights[0]))
        bind_to_heads(x, weights, rooms, exchange, SMALL, made).run(sends=False, keeps=False)
        launch = bind_to_heads(x, weights, rooms, exchange, SMALL, made)
        launch.run(multiplies=False)
        return launch.outputs

    (found,), rooms = run("project_to_heads", case, in_two_launches)
    of_others = slice(case.inputs[-1].rows_of(2).start)
    torch.testing.assert_close(found[of_others], expected[0][of_others], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rooms, expected_rooms, rtol=1e-5, atol=1e-5)


WAITING_CASES = {
    "multiply_gathered": "70 + 70 + 70 rows, 40 and 24, 16",
    "scatter_products": "70 + 70 + 70 rows, 40 and 24, 16",
    "project_to_heads": "35 + 35 + 35 rows, 24 and 8, 8",
    "project_from_heads": "35 + 35 + 35 rows, 24 and 8, 8",
}


def fault_without(op: str, sender: int, piece: int) -> list[int]:
    """The words of the fault where all signals have been given but one flag."""
    case = case_of(op, WAITING_CASES[op])
    me, ranks = case.inputs[-1].me, len(case.inputs[-1].shards)
    signals = signals_given(ranks, ranks * FLAGS, me, torch.device("cpu"))
    words_sW = signals.tail.lost._base
    assert words_sW is not None
    words_sW[me, ranks + 2 + sender * FLAGS + piece] = 0
    signals.tail.patience = LOOKS
    run(op, case, launch_with(op, SMALL), **signals._asdict())
    assert words_sW[me, ranks + 1] == signals.tail.fault_2[0].clamp(max=1)
    return signals.tail.fault_2.tolist()


PIECES = [("multiply_gathered", 3), ("scatter_products", 9), ("project_to_heads", 4), ("project_from_heads", 2)]


@pytest.mark.parametrize(("op", "pieces"), PIECES)
def test_a_tile_waits_for_the_pieces_of_its_rows_alone_and_names_the_rank_that_gives_none(op: str, pieces: int):
    """Of 70 or 35 rows in tiles of 32, and of 40 or 8 + 8 columns in tiles of 16; the last rank waits for all
    others."""
    for sender, piece in ((0, 0), (1, pieces - 1)):
        assert fault_without(op, sender, piece) == [sender + 1, 1]
    assert fault_without(op, 1, pieces) == [0, 0]
    assert fault_without(op, 2, 0) == [0, 0]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_rows_of_tiles_come_by_shard_from_a_given_one_on(first: int):
    shards = (5, 0, 70)
    tiles = shard_tiles_triton.tiles_of(shards, 32)
    assert tiles == [1, 0, 3]
