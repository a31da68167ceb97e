"""The kernels that multiply inside an exchange, in Triton's interpreter where there is no GPU, against the references.
Products are in fp32 there: the interpreter has no products in bf16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moefold.kernels.experts import arriving_rows_triton, returning_rows_triton
from moefold.kernels.experts.arriving_tiles_triton import order_tiles
from moefold.kernels.experts.tiles_in_exchange import (
    multiply_arrivals,
    return_products,
    signals_given,
)
from moefold.kernels.registry import KernelCase, KernelOp, map_tensors
from moefold.kernels.routing.arrival_pieces import empty_records

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels have no products in fp32")

FORWARD: dict[str, KernelOp[..., Any]] = {op.name: op for op in (multiply_arrivals, return_products)}
NAMES = [
    "3 x 1 to 2 x 1, all fit",
    "9 x 2 to 2 x 2, all fit",
    "130 x 1 to 2 x 1, fewer fit",
    "200 x 3 to 3 x 1, all fit",
]
LOOKS = 6  # of a tile at pieces, before it gives up


def case_of(op: str, name: str) -> KernelCase:
    found = {case.name: case for case in FORWARD[op].cases("cpu", torch.float32)}
    return found[name]


def run(
    op: str, case: KernelCase, implementation: str, **signals: object
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Defined results, and the rooms of all ranks; on copies of the inputs."""
    *inputs, exchange = map_tensors(case.inputs, torch.Tensor.clone)
    exchange = exchange._replace(signals=exchange.signals._replace(**signals))
    out = FORWARD[op].implementations[implementation](*inputs, exchange)
    results = [out] if isinstance(out, torch.Tensor) else [case.defined(x) for x in out]
    return results, [room[:, :-1] for room in inputs[-1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("op", FORWARD)
def test_results_and_rooms_are_those_of_the_reference_twice_the_same_bits(op: str, name: str):
    """Ranks without tokens, experts without rows, widths that are no multiples, tokens that no rank has room for."""
    case = case_of(op, name)
    expected, rooms = run(op, case, "reference")
    several = {"senders": 2, "programs": 5, "apart": True}
    for found, found_rooms in (run(op, case, "triton"), run(op, case, "triton", **several)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found_rooms, rooms, rtol=1e-6, atol=1e-6)
    again, _ = run(op, case, "triton")
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("op", FORWARD)
def test_products_of_several_columns_of_tiles_are_those_of_the_reference(op: str, monkeypatch: pytest.MonkeyPatch):
    """Columns and depths that end inside a tile, and a band of fewer rows of tiles than the others."""
    for kernels in (arriving_rows_triton, returning_rows_triton):
        for size, length in (("COLUMNS", 16), ("DEPTH", 16), ("BAND", 3)):
            monkeypatch.setattr(kernels, size, length)
    case = case_of(op, NAMES[-1])
    expected, rooms = run(op, case, "reference")
    found, found_rooms = run(op, case, "triton", senders=2, programs=5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_rooms, rooms, rtol=1e-6, atol=1e-6)


def turns_of_tiles(index: list[int], ends: list[int], tiles: list[list[int]], first: int) -> list[list[int]]:
    """For each tile how many ranks come before those from its first to its last row's."""
    turns: list[list[int]] = []
    for _, row, real, _ in tiles:
        begin, end = (sum(index[r] >= end for end in ends) for r in (row, row + real - 1))
        turns.append([(rank - first) % len(ends) for rank in range(begin, end + 1)])
    return turns


@pytest.mark.parametrize("by_last", [True, False])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_tiles_come_in_the_order_of_what_they_wait_for_or_of_what_waits_for_them(first: int, by_last: bool):
    """Many rows of few experts, in the order of their sources."""
    generator = torch.Generator().manual_seed(first)
    arrived = 900
    rows = [torch.randperm(arrived, generator=generator)[:count].sort().values for count in (700, 0, 5, 300)]
    index = torch.cat([*rows, torch.full((50,), -1)]).int()
    ends_E = torch.tensor([len(each) for each in rows]).cumsum(0).int()
    ends_P = torch.tensor([200, 200, 400, 410, 410, 410, 600, 600, 900]).int()
    tiles, count = order_tiles(index, ends_E, ends_P, first, 3, by_last)
    used = tiles[: int(count)].tolist()
    assert sorted(row for _, row, _, _ in used) == [0, 128, 256, 384, 512, 640, 700, 705, 833, 961]
    choose = max if by_last else min
    turns = [choose(each) for each in turns_of_tiles(index.tolist(), [400, 410, 900], used, first)]
    assert turns == sorted(turns)
    assert len(set(turns)) > 1


def test_all_tiles_of_a_rank_come_before_those_that_it_does_not_need():
    """Each of eight experts has a tile and a half of each of four ranks: their borders lie inside tiles."""
    ranks, blocks, experts, each = 4, 2, 8, 192
    index = torch.arange(ranks * each).repeat(experts).int()
    ends_E = (torch.arange(experts) + 1).mul(ranks * each).int()
    ends_P = (torch.arange(ranks * blocks) + 1).mul(each // blocks).int()
    for me in range(ranks):
        first = (me + 1) % ranks
        tiles, count = order_tiles(index, ends_E, ends_P, first, ranks, returning_rows_triton.BY_LAST)
        sources = [
            set(range(row % 768 // each, (row % 768 + real - 1) // each + 1)) for _, row, real, _ in tiles.tolist()
        ]
        done = [max(m for m, ranks_of in enumerate(sources[: int(count)]) if rank in ranks_of) for rank in range(ranks)]
        assert done[first] + 1 == sum(first in ranks_of for ranks_of in sources[: int(count)])
        assert done[first] < done[(first + 1) % ranks] < done[(first + 2) % ranks]


def fault_without_piece(case: KernelCase, piece: int) -> list[int]:
    """The words of the fault where all signals have been given but the flag of one piece."""
    exchange = case.inputs[-1]
    pieces = len(exchange.pieces.ends_P)
    ranks = len(exchange.pieces.shift_s)
    signals = signals_given(ranks, pieces, exchange.me, torch.device("cpu"))
    words_sW = signals.tail.lost._base
    assert words_sW is not None
    words_sW[exchange.me, ranks + 2 + piece] = 0
    signals.tail.patience = LOOKS
    run("multiply_arrivals", case, "triton", **signals._asdict())
    assert words_sW[exchange.me, ranks + 1] == signals.tail.fault_2[0].clamp(max=1)
    return signals.tail.fault_2.tolist()


def pieces_waited_for(case: KernelCase) -> set[int]:
    """Of experts with less than a tile of rows: from the piece of the first row to that of the last."""
    _, _, _, index, ends, *_, exchange = case.inputs
    ends_P = exchange.pieces.ends_P.tolist()
    waited: set[int] = set()
    for rows in index.tensor_split(ends.tolist()):
        arrived = rows[rows >= 0].tolist()
        if arrived:
            first, last = (sum(n >= end for end in ends_P) for n in (min(arrived), max(arrived)))
            waited |= set(range(first, last + 1))
    return waited


def test_a_tile_waits_for_the_pieces_of_its_rows_alone_and_names_the_rank_that_gives_none():
    """With all rows, and with those of a few pieces alone; others are padding."""
    case = case_of("multiply_arrivals", "130 x 1 to 2 x 1, all fit")
    exchange = case.inputs[-1]
    ends_P = exchange.pieces.ends_P
    blocks = len(ends_P) // 2
    seen: set[bool] = set()
    for first_row in (0, int(ends_P[0])):
        *before, index, ends, slots, rooms, last = case.inputs
        few = torch.where(index >= first_row, index, -1)
        with_few = replace(case, inputs=(*before, few, ends, slots, rooms, last))
        waited = pieces_waited_for(with_few)
        for piece in range(blocks):  # of the first rank; this one is the second
            assert fault_without_piece(with_few, piece) == ([1, 1] if piece in waited else [0, 0])
            seen.add(piece in waited)
    assert seen == {True, False}


def test_sums_wait_for_tiles_that_no_program_runs_with_patience_and_name_their_own_rank():
    """All programs send, so that none multiplies."""
    case = case_of("return_products", "130 x 1 to 2 x 1, all fit")
    exchange = case.inputs[-1]
    pieces, ranks = len(exchange.pieces.ends_P), len(exchange.pieces.shift_s)
    signals = signals_given(ranks, pieces, exchange.me, torch.device("cpu"))
    signals.tail.patience = LOOKS
    run("return_products", case, "triton", **signals._replace(programs=2, senders=2)._asdict())
    assert signals.tail.fault_2.tolist() == [exchange.me + 1, 1]
    assert bool(signals.tail.lost == 1)


def test_clocks_of_tiles_and_pieces_are_in_order():
    case = case_of("return_products", "200 x 3 to 3 x 1, all fit")
    records = empty_records(64, 64, torch.device("cpu"))
    run("return_products", case, "triton", records=records)
    pieces = len(case.inputs[-1].pieces.ends_P)
    begun, ready, ended = records.pieces_P3[:pieces].T
    assert bool((begun < ready).all() and (ready < ended).all())
    tiles = records.tiles_M3[records.tiles_M3[:, 2] > 0]
    assert len(tiles) > 0
    last_tile = tiles[:, 2].max()
    assert bool((last_tile < begun).all())  # programs run one after the other in the interpreter, tiles first
    assert records.pieces_P3[pieces:].sum() == 0
