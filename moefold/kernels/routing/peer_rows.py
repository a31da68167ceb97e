"""Rows of tokens between ranks that write to each other's memory: sent, and summed on their return.

    push_peer_rows      x_TD -> rooms      room[i][slots[t, i]] = x[t]
    sum_rows_into       y_RD -> rooms      room[n] = sum_k y[slots[n, k]]: results of experts, summed in place
    write_choices_into  x_R -> rooms       room[n, k] = x[slots[n, k]]: a number of each choice
    sum_peer_rows       rooms -> y_TD      y[t] = sum_i room[i][slots[t, i]]

T tokens, K choices of a token, D width, s ranks, p rooms of a rank. A token has one row on each rank that holds some of
its experts, in its place among all tokens (kernels/routing/peer_plan.py). A slot of -1 is no row. Push and sum are each
the other's transpose. Where an op has a `tail`, a kernel may give the signals of the exchange, and says so there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op
from moefold.kernels.routing.exchange_tail import ExchangeTail
from moefold.kernels.routing.expert_rows import sum_over_row_slots


@register_in_place_op
def push_peer_rows(
    x_TD: Tensor,
    slots_Ts: Tensor,
    rooms: list[Tensor],
    turn: int,
    room_s: Tensor | None = None,
    tail: ExchangeTail | None = None,
) -> None:
    """Write each token to its row in one of the rooms of each rank, `rooms[i]` (p, N, D): the room `room_s[i]`, or
    `turn` where that is -1. Other ranks write to the same rooms, so no other row may be touched but the last of a room,
    which is of no use: here tokens that do not go there write it as it is, since the host would have to wait for a list
    of the others."""
    for rank, room_pND in enumerate(rooms):
        slots_T = slots_Ts[:, rank]
        goes_T = slots_T >= 0
        last = room_pND.shape[1] - 1
        row_T = torch.where(goes_T, slots_T, last)
        chosen = row_T.new_full((), turn)
        if room_s is not None:
            chosen = torch.where(room_s[rank] >= 0, room_s[rank], turn)
        at = (chosen.expand_as(row_T), row_T)
        written_TD = torch.where(goes_T[:, None], x_TD, room_pND[at])
        room_pND.index_put_(at, written_TD)


@register_in_place_op
def sum_rows_into(
    y_RD: Tensor,
    slots_NK: Tensor,
    rooms: list[Tensor],
    rank: int,
    tail: ExchangeTail | None = None,
) -> None:
    """Write the sum of each source's rows to its row in the room of a rank, in fp32 or better; a slot of -1 is no row,
    and the row of a source without any is undefined. A room may have further rows, which stay."""
    sums_ND = sum_over_row_slots(y_RD, slots_NK, holes=True)
    room_ND = rooms[rank]
    room_ND[: len(sums_ND)].copy_(sums_ND)


@register_in_place_op
def write_choices_into(
    x_R: Tensor,
    slots_NK: Tensor,
    rooms: list[Tensor],
    rank: int,
    tail: ExchangeTail | None = None,
) -> None:
    """Write the number of each choice's row to the place of the choice in the room of a rank, zero for a slot of -1. A
    room may have further rows, which stay."""
    found_NK = x_R[slots_NK.clamp(min=0)]
    room_NK = rooms[rank]
    room_NK[: len(slots_NK)].copy_(found_NK.where(slots_NK >= 0, 0))


@register_inner_op
def sum_peer_rows(rooms: list[Tensor], slots_Ts: Tensor) -> Tensor:
    """The sum of each token's rows in the order of ranks, in fp32 or better."""
    rows: list[Tensor] = []
    for slots_T, room_ND in zip(slots_Ts.unbind(1), rooms, strict=True):
        row_T = slots_T.clamp(min=0)
        rows_TD = room_ND[row_T]
        has_row_T1 = (slots_T >= 0)[:, None]
        rows.append(rows_TD.where(has_row_T1, 0))
    rows_TnD = torch.stack(rows, dim=1)
    wide = torch.promote_types(rows_TnD.dtype, torch.float32)
    sum_TD = rows_TnD.sum(1, dtype=wide)
    return sum_TD.to(rows_TnD.dtype)


@cache
def device_code():
    """The launches of these ops, looked up once: an import inside each call would take a tenth of the host's time."""
    from moefold.kernels.routing import peer_rows_triton

    return peer_rows_triton


@push_peer_rows.register_fast("triton")
def push_peer_rows_triton(
    x_TD: Tensor,
    slots_Ts: Tensor,
    rooms: list[Tensor],
    turn: int,
    room_s: Tensor | None = None,
    tail: ExchangeTail | None = None,
) -> None:
    device_code().launch_push_peer_rows(x_TD, slots_Ts, rooms, turn, room_s, tail)


@sum_rows_into.register_fast("triton")
def sum_rows_into_triton(
    y_RD: Tensor,
    slots_NK: Tensor,
    rooms: list[Tensor],
    rank: int,
    tail: ExchangeTail | None = None,
) -> None:
    device_code().launch_sum_rows_into(y_RD, slots_NK, rooms, rank, tail)


@write_choices_into.register_fast("triton")
def write_choices_into_triton(
    x_R: Tensor,
    slots_NK: Tensor,
    rooms: list[Tensor],
    rank: int,
    tail: ExchangeTail | None = None,
) -> None:
    device_code().launch_write_choices_into(x_R, slots_NK, rooms, rank, tail)


@sum_peer_rows.register_fast("triton")
def sum_peer_rows_triton(rooms: list[Tensor], slots_Ts: Tensor) -> Tensor:
    return device_code().launch_sum_peer_rows(rooms, slots_Ts)


PLACED_CASE_SIZES = [  # T, D, s
    (1, 4, 2),
    (33, 16, 4),
    (0, 8, 2),
    (40, 24, 8),
    (300, 8, 3),
]


class PlacedCase(NamedTuple):
    """Placed tokens: a name, their slots, rooms, and (defined rows, rows) of a room."""

    name: str
    slots_Ts: Tensor
    rooms: list[Tensor]
    rows: tuple[int, int]


def drawn_slots(tokens: int, ranks: int, device: str) -> Tensor:
    """Rows of tokens on ranks, in the order of tokens; some tokens have none."""
    generator = torch.Generator().manual_seed(tokens)
    goes_Ts = torch.rand(tokens, ranks, generator=generator) < 0.6
    number_Ts = goes_Ts.cumsum(0) - 1
    slots_Ts = torch.where(goes_Ts, number_Ts, -1)
    return slots_Ts.int().to(device)


def placed_cases(draw: CaseInputs) -> Iterator[PlacedCase]:
    for tokens, width, ranks in PLACED_CASE_SIZES:
        most = tokens + ranks
        slots_Ts = drawn_slots(tokens, ranks, draw.device)
        rows = (most, most + 1)
        rooms = [draw.normal(most + 1, width, seed=1 + rank) for rank in range(ranks)]
        yield PlacedCase(f"{tokens} x {width} to {ranks}", slots_Ts, rooms, rows)


@push_peer_rows.register_cases
def push_peer_rows_cases(draw: CaseInputs) -> Cases:
    for name, slots_Ts, rooms, (most, _) in placed_cases(draw):
        width = rooms[0].shape[1]
        x_TD = draw.normal(len(slots_Ts), width)
        three_rooms = [draw.normal(3, most + 1, width, seed=rank) for rank in range(len(rooms))]
        room_s = torch.arange(len(rooms), device=draw.device) % 3 - 1
        yield KernelCase(name, (x_TD, slots_Ts, three_rooms, 2))
        yield KernelCase(f"{name}, rooms of their own", (x_TD, slots_Ts, three_rooms, 2, room_s.int()))


@sum_rows_into.register_cases
def sum_rows_into_cases(draw: CaseInputs) -> Cases:
    for name, slots_Ts, rooms, rows in placed_cases(draw):
        room_ND = draw.normal(len(slots_Ts) + 2, rooms[0].shape[1])
        slots_Ts[:, 0].clamp_(min=0)  # each source has a row
        yield KernelCase(name, (rooms[0], slots_Ts, [room_ND], 0), rows=rows)


@write_choices_into.register_cases
def write_choices_into_cases(draw: CaseInputs) -> Cases:
    for name, slots_Ts, _, (most, _) in placed_cases(draw):
        x_R = draw.wide(most)
        room_NK = draw.wide(len(slots_Ts) + 2, slots_Ts.shape[1], seed=1)
        yield KernelCase(name, (x_R, slots_Ts, [room_NK], 0))


@sum_peer_rows.register_cases
def sum_peer_rows_cases(draw: CaseInputs) -> Cases:
    for name, slots_Ts, rooms, rows in placed_cases(draw):
        yield KernelCase(name, (rooms, slots_Ts), rows=rows)
