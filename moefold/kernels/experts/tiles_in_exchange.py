"""Products of experts inside the exchanges of their rows: the first while tokens arrive, the second while results
return. Forward alone.

    multiply_arrivals   tokens -> rooms of all ranks | x_RD = own room[index]     h = x W_gate_up     a = swiglu(h)
    return_products     y = a W_down     sums of y by arrived token -> room of the token's rank | sums over ranks

The references do one behind the other, with the whole exchange between them. Kernels do both at a time, tile by tile
(arriving_rows_triton.py, returning_rows_triton.py), and give the signals themselves.

T tokens of this rank, D width, F inner width, s ranks, p rooms of a rank, N rows of arrived tokens, K choices of a
token, R rows of experts, E experts held here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.experts.expert_mlp import plain_down_product, plain_up_product, random_experts
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_inner_op
from moefold.kernels.routing.arrival_pieces import PieceSignals, TileExchange, arrange_pieces
from moefold.kernels.routing.arrivals import ArrangedArrivals, ArrivalShape
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.kernels.routing.expert_rows import gather_rows, sum_over_row_slots
from moefold.kernels.routing.peer_plan import AnnouncedCase, announce_all, announced_cases, arrange_arrivals
from moefold.kernels.routing.peer_rows import push_peer_rows, sum_peer_rows


@register_inner_op
def multiply_arrivals(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    ends_E: Tensor,
    slots_Ts: Tensor,
    rooms: list[Tensor],
    exchange: TileExchange,
) -> tuple[Tensor, Tensor]:
    """The pre-activation h_R2F and the activation times the router's weight, a_RF, of what arrives in `rooms[me]`. Each
    `rooms[i]` is (p, N, D), of which the exchange uses one."""
    push_peer_rows.reference(x_TD, slots_Ts, rooms, exchange.turn)
    exchange.end()
    source_ND = rooms[exchange.me][exchange.turn]
    no_slots = index_R[:0, None]
    x_RD = gather_rows.reference(source_ND, index_R, no_slots, True)
    h_R2F = plain_up_product(x_RD, gate_up_E2FD, ends_E)
    return h_R2F, swiglu.reference(h_R2F, weight_R)


@register_inner_op
def return_products(
    a_RF: Tensor,
    down_EDF: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    rooms: list[Tensor],
    exchange: TileExchange,
) -> Tensor:
    """The results of this rank's tokens: of each rank the sum over its experts, then over ranks, in fp32 or better."""
    y_RD = plain_down_product(a_RF, down_EDF, ends_E, None)
    sums_ND = sum_over_row_slots(y_RD, slots_NK, holes=True)
    return_sums(sums_ND, rooms, exchange)
    exchange.end()
    own_ND = rooms[exchange.me][exchange.turn]
    return sum_peer_rows.reference([own_ND] * len(rooms), exchange.pieces.back_Ts)


def return_sums(sums_ND: Tensor, rooms: list[Tensor], exchange: TileExchange) -> None:
    """Write each row to the room of its sender. A row that does not exist goes to the last one of a room, which is of
    no use, as it is."""
    ends_P, shift_s, _ = exchange.pieces
    ends_s = ends_P.view(len(rooms), -1)[:, -1]
    begins_s = ends_s.roll(1)
    begins_s[0] = 0
    n = torch.arange(len(sums_ND), device=sums_ND.device)
    for sender, room_pND in enumerate(rooms):
        room_ND = room_pND[exchange.turn]
        is_sent_N = (n >= begins_s[sender]) & (n < ends_s[sender])
        row_N = torch.where(is_sent_N, n + shift_s[sender], len(room_ND) - 1)
        written_ND = torch.where(is_sent_N[:, None], sums_ND, room_ND[row_N])
        room_ND.index_put_((row_N,), written_ND)


@multiply_arrivals.register_fast("triton")
def multiply_arrivals_triton(
    x_TD: Tensor,
    gate_up_E2FD: Tensor,
    weight_R: Tensor,
    index_R: Tensor,
    ends_E: Tensor,
    slots_Ts: Tensor,
    rooms: list[Tensor],
    exchange: TileExchange,
) -> tuple[Tensor, Tensor]:
    from moefold.kernels.experts.arriving_rows_triton import launch_arriving_rows

    return launch_arriving_rows(x_TD, gate_up_E2FD, weight_R, index_R, ends_E, slots_Ts, rooms, exchange)


@return_products.register_fast("triton")
def return_products_triton(
    a_RF: Tensor,
    down_EDF: Tensor,
    index_R: Tensor,
    slots_NK: Tensor,
    ends_E: Tensor,
    rooms: list[Tensor],
    exchange: TileExchange,
) -> Tensor:
    from moefold.kernels.experts.returning_rows_triton import launch_returning_rows

    return launch_returning_rows(a_RF, down_EDF, index_R, slots_NK, ends_E, rooms, exchange)


class ExchangedCase(NamedTuple):
    """A rank in an exchange whose other ranks have sent: a name, tokens, their maps, rooms of all ranks, how many rows
    are defined, and the exchange."""

    name: str
    x_TD: Tensor
    arranged: ArrangedArrivals
    rooms: list[Tensor]
    rows: tuple[int, int]
    exchange: TileExchange


def exchanged_cases(draw: CaseInputs, width: int) -> Iterator[ExchangedCase]:
    for announced in announced_cases(draw):
        announce_all(announced)
        for about, all_fit in (("all fit", True), ("fewer fit", False)):
            ranks = len(announced.choices)
            shapes = [shape_of_rank(announced, rank, all_fit) for rank in range(ranks)]
            rooms = rooms_with_tokens(draw, announced, shapes, width)
            me = ranks - 1
            arranged = arrange_for_rank(announced, shapes[me])
            x_TD = tokens_of_rank(draw, me, shapes[me].tokens, width)
            exchange = exchange_of_rank(announced, arranged, shapes[me])
            rows = (int(arranged.ends_e[-1]), shapes[me].rows)
            yield ExchangedCase(f"{announced.name}, {about}", x_TD, arranged, rooms, rows, exchange)


def shape_of_rank(case: AnnouncedCase, rank: int, all_fit: bool) -> ArrivalShape:
    """With room for all that could come, or for as much as results of this rank's tokens need."""
    senders, most, k = case.rooms.positions[0].shape
    held = len(case.position_E) * case.etp // senders
    from_ranks = senders if all_fit else min(senders, k * case.etp)
    arriving = most * from_ranks
    rows = arriving * min(k, held)
    tokens = len(case.choices[rank][0])
    return ArrivalShape(rank, case.etp, held, tokens, arriving, rows)


def arrange_for_rank(case: AnnouncedCase, shape: ArrivalShape) -> ArrangedArrivals:
    overflowed = torch.zeros((), dtype=torch.bool, device=case.position_E.device)
    arranged = arrange_arrivals.reference(*case.rooms.of(shape.sender), shape, overflowed)
    return ArrangedArrivals(*arranged)


def tokens_of_rank(draw: CaseInputs, rank: int, tokens: int, width: int) -> Tensor:
    return draw.normal(tokens, width, seed=rank)


def rooms_with_tokens(draw: CaseInputs, case: AnnouncedCase, shapes: list[ArrivalShape], width: int) -> list[Tensor]:
    """Two rooms of each rank, with the tokens of all in the second."""
    rooms = [draw.normal(2, shape.arriving + 1, width, seed=7) for shape in shapes]
    for shape in shapes:
        x_TD = tokens_of_rank(draw, shape.sender, shape.tokens, width)
        push_peer_rows.reference(x_TD, arrange_for_rank(case, shape).slots_Ts, rooms, 1)
    return rooms


def exchange_of_rank(case: AnnouncedCase, arranged: ArrangedArrivals, shape: ArrivalShape) -> TileExchange:
    """An exchange whose signals have all been given."""
    me, ranks = shape.sender, len(case.choices)
    pieces = arrange_pieces(case.rooms.counts[me], arranged.slots_Ts, me, case.etp, shape.arriving)
    signals = signals_given(ranks, len(pieces.ends_P), me, case.position_E.device)
    return TileExchange(me, 1, pieces, do_nothing, signals)


def do_nothing() -> None: ...


GIVEN = 2**40  # the number of an exchange that is never reached
PATIENCE = 5.0


def signals_given(ranks: int, pieces: int, me: int, device: torch.device, senders: int = 1) -> PieceSignals:
    """Signals of an exchange for which all ranks have signalled. `lost` keeps the memory of all words."""
    words_sW = torch.zeros(ranks, ranks + 2 + pieces, dtype=torch.int64, device=device)
    words_sW[me] = GIVEN
    words_sW[me, ranks : ranks + 2] = 0
    addresses = torch.tensor([words.data_ptr() for words in words_sW], device=device)
    fault_2 = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")
    finished = torch.zeros(1, dtype=torch.int32, device=device)
    lost = words_sW[me, ranks + 1 : ranks + 2]
    tail = ExchangeTail(addresses, fault_2, finished, lost, me, PATIENCE)
    flags = addresses + (ranks + 2) * words_sW.itemsize
    return PieceSignals(tail, flags, senders + 2, senders)


INNER_WIDTH = 24
CASE_WIDTH = 40


@multiply_arrivals.register_cases
def multiply_arrivals_cases(draw: CaseInputs) -> Cases:
    for name, x_TD, arranged, rooms, rows, exchange in exchanged_cases(draw, CASE_WIDTH):
        gate_up, _ = random_experts(draw, len(arranged.ends_e), CASE_WIDTH, INNER_WIDTH)
        weight_R = arranged.weight_R.to(draw.wide_dtype)
        inputs = (x_TD, gate_up, weight_R, arranged.index_R, arranged.ends_e, arranged.slots_Ts, rooms, exchange)
        yield KernelCase(name, inputs, hidden=CASE_WIDTH, ffn=INNER_WIDTH, rows=rows)


@return_products.register_cases
def return_products_cases(draw: CaseInputs) -> Cases:
    """Rooms hold what they held before: any numbers, which stand for the results of other ranks."""
    for name, _, arranged, rooms, rows, exchange in exchanged_cases(draw, CASE_WIDTH):
        _, down = random_experts(draw, len(arranged.ends_e), CASE_WIDTH, INNER_WIDTH)
        a_RF = draw.normal(rows[1], INNER_WIDTH)
        inputs = (a_RF, down, arranged.index_R, arranged.slots_NK, arranged.ends_e, rooms, exchange)
        yield KernelCase(name, inputs, hidden=CASE_WIDTH, ffn=INNER_WIDTH, rows=rows)
