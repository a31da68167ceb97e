"""Rows of tokens between ranks that write to each other's memory: which go where, sent, and summed on their return.

    count_parcels   rank_TK -> counts_2n          tokens, and choices, for each rank
    place_parcels   rank_TK, counts -> slots_Tn   the row of each token in the room of each of its ranks
    push_peer_rows  x_TD -> rooms                 room[i][slots[t, i]] = x[t]
    sum_rows_into   y_RD -> room                  room[n] = sum_k y[slots[n, k]]: results of experts, summed in place
    sum_peer_rows   rooms -> y_TD                 y[t] = sum_i room[i][slots[t, i]]

T tokens, K choices of a token, D width, n ranks that hold experts, s ranks that send. A token has one row on each rank
that holds some of its experts. On every rank, rows lie in the order of their senders, and of their tokens. A slot of -1
is no row. Push and sum are each the other's transpose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op
from moefold.kernels.routing.expert_rows import sum_over_row_slots


def ranks_of_tokens(rank_TK: Tensor, ranks: int) -> Tensor:
    """(T, n): whether a token has a choice on a rank."""
    goes = rank_TK.new_zeros(len(rank_TK), ranks + 1, dtype=torch.bool)  # the last takes missing choices
    goes.scatter_(1, rank_TK, True)
    return goes[:, :ranks]


@register_inner_op
def count_parcels(rank_TK: Tensor, ranks: int) -> Tensor:
    """(2, n) int64: the tokens with a choice on each rank, and the choices. `rank_TK`: rank of each choice; `ranks` for
    a missing one."""
    goes_Tn = ranks_of_tokens(rank_TK, ranks)
    tokens_n = goes_Tn.sum(0)
    rank = rank_TK.flatten()
    choices = rank.new_zeros(ranks + 1)
    one = torch.ones_like(rank)
    choices.scatter_add_(0, rank, one)
    return torch.stack((tokens_n, choices[:ranks]))


@register_inner_op
def place_parcels(rank_TK: Tensor, tokens_sn: Tensor, sender: int, most: int) -> Tensor:
    """(T, n) int64: the row of each token on each rank, -1 for none. `tokens_sn`: tokens of each sender for each rank;
    `sender`: which of them these are; `most`: rows of a room; tokens beyond them have no row."""
    ranks = tokens_sn.shape[1]
    goes_Tn = ranks_of_tokens(rank_TK, ranks)
    earlier_sn = tokens_sn[:sender]
    begins_n = earlier_sn.sum(0)
    number_Tn = goes_Tn.cumsum(0) - 1
    slots_Tn = begins_n + number_Tn
    fits_Tn = goes_Tn & (slots_Tn < most)
    return torch.where(fits_Tn, slots_Tn, -1)


@register_in_place_op
def push_peer_rows(x_TD: Tensor, slots_Tn: Tensor, rooms: list[Tensor]) -> None:
    """Write each token to its row in the room of each rank. Other ranks write to the same rooms, so no other row may be
    touched but the last of a room, which is of no use: here it takes the tokens that do not go there, whose list the
    host would have to wait for."""
    for slots_T, room_ND in zip(slots_Tn.unbind(1), rooms, strict=True):
        last = len(room_ND) - 1
        row_T = torch.where(slots_T >= 0, slots_T, last)
        room_ND.index_copy_(0, row_T, x_TD)


@register_in_place_op
def sum_rows_into(y_RD: Tensor, slots_NK: Tensor, room_ND: Tensor) -> None:
    """Write the sum of each source's rows to its row of a room, in fp32 or better; a slot of -1 is no row. A room may
    have further rows, which stay."""
    sums_ND = sum_over_row_slots(y_RD, slots_NK, holes=True)
    room_ND[: len(sums_ND)].copy_(sums_ND)


@register_inner_op
def sum_peer_rows(rooms: list[Tensor], slots_Tn: Tensor) -> Tensor:
    """The sum of each token's rows in the order of ranks, in fp32 or better."""
    rows: list[Tensor] = []
    for slots_T, room_ND in zip(slots_Tn.unbind(1), rooms, strict=True):
        row_T = slots_T.clamp(min=0)
        rows_TD = room_ND[row_T]
        has_row_T1 = (slots_T >= 0)[:, None]
        rows.append(rows_TD.where(has_row_T1, 0))
    rows_TnD = torch.stack(rows, dim=1)
    wide = torch.promote_types(rows_TnD.dtype, torch.float32)
    sum_TD = rows_TnD.sum(1, dtype=wide)
    return sum_TD.to(rows_TnD.dtype)


@count_parcels.register_fast("triton")
def count_parcels_triton(rank_TK: Tensor, ranks: int) -> Tensor:
    from moefold.kernels.routing.peer_rows_triton import launch_count_parcels

    return launch_count_parcels(rank_TK, ranks)


@place_parcels.register_fast("triton")
def place_parcels_triton(rank_TK: Tensor, tokens_sn: Tensor, sender: int, most: int) -> Tensor:
    from moefold.kernels.routing.peer_rows_triton import launch_place_parcels

    return launch_place_parcels(rank_TK, tokens_sn, sender, most)


@push_peer_rows.register_fast("triton")
def push_peer_rows_triton(x_TD: Tensor, slots_Tn: Tensor, rooms: list[Tensor]) -> None:
    from moefold.kernels.routing.peer_rows_triton import launch_push_peer_rows

    launch_push_peer_rows(x_TD, slots_Tn, rooms)


@sum_rows_into.register_fast("triton")
def sum_rows_into_triton(y_RD: Tensor, slots_NK: Tensor, room_ND: Tensor) -> None:
    from moefold.kernels.routing.rows_triton import sum_over_slots

    sum_over_slots(y_RD, slots_NK, room_ND[: len(slots_NK)])


@sum_peer_rows.register_fast("triton")
def sum_peer_rows_triton(rooms: list[Tensor], slots_Tn: Tensor) -> Tensor:
    from moefold.kernels.routing.peer_rows_triton import launch_sum_peer_rows

    return launch_sum_peer_rows(rooms, slots_Tn)


PARCEL_CASE_SIZES = [  # T, K, D, n
    (1, 1, 4, 2),
    (33, 2, 16, 4),
    (0, 2, 8, 2),
    (40, 8, 24, 8),
    (300, 1, 8, 3),
]


def drawn_ranks(tokens: int, k: int, ranks: int, device: str) -> Tensor:
    """Random ranks of choices, some missing."""
    generator = torch.Generator()
    generator.manual_seed(tokens + k)
    drawn = torch.randint(0, ranks + 1, (tokens, k), generator=generator)
    return drawn.to(device)


def parcel_cases(device: str) -> Iterator[tuple[str, int, Tensor, int]]:
    """Name, width, rank of each choice and number of ranks."""
    for t, k, d, n in PARCEL_CASE_SIZES:
        name = f"{t} x {k} to {n}"
        rank_TK = drawn_ranks(t, k, n, device)
        yield name, d, rank_TK, n


@count_parcels.register_cases
def count_parcels_cases(draw: CaseInputs) -> Cases:
    for name, _, rank_TK, ranks in parcel_cases(draw.device):
        yield KernelCase(name, (rank_TK, ranks))


def senders_before(rank_TK: Tensor, ranks: int) -> Tensor:
    """Counts of two senders, of which the tokens at hand are the second's."""
    tokens_n, _ = count_parcels.reference(rank_TK, ranks)
    first_n = torch.arange(ranks, device=rank_TK.device)
    return torch.stack((first_n, tokens_n))


@place_parcels.register_cases
def place_parcels_cases(draw: CaseInputs) -> Cases:
    for name, _, rank_TK, ranks in parcel_cases(draw.device):
        tokens_sn = senders_before(rank_TK, ranks)
        tokens = len(rank_TK)
        yield KernelCase(name, (rank_TK, tokens_sn, 1, tokens + ranks))
        yield KernelCase(f"{name}, a small room", (rank_TK, tokens_sn, 1, tokens // 2))


class PlacedCase(NamedTuple):
    """Placed tokens: a name, their slots, rooms, and (defined rows, rows) of a room."""

    name: str
    slots_Tn: Tensor
    rooms: list[Tensor]
    rows: tuple[int, int]


def placed_cases(draw: CaseInputs) -> Iterator[PlacedCase]:
    for name, width, rank_TK, ranks in parcel_cases(draw.device):
        most = len(rank_TK) + ranks
        tokens_sn = senders_before(rank_TK, ranks)
        slots_Tn = place_parcels.reference(rank_TK, tokens_sn, 1, most)
        rows = (most, most + 1)
        rooms = [draw.normal(most + 1, width, seed=1 + rank) for rank in range(ranks)]
        yield PlacedCase(name, slots_Tn, rooms, rows)


@push_peer_rows.register_cases
def push_peer_rows_cases(draw: CaseInputs) -> Cases:
    for name, slots_Tn, rooms, rows in placed_cases(draw):
        width = rooms[0].shape[1]
        x_TD = draw.normal(len(slots_Tn), width)
        yield KernelCase(name, (x_TD, slots_Tn, rooms), rows=rows)


@sum_rows_into.register_cases
def sum_rows_into_cases(draw: CaseInputs) -> Cases:
    for name, slots_Tn, rooms, rows in placed_cases(draw):
        room_ND = draw.normal(len(slots_Tn) + 2, rooms[0].shape[1])
        yield KernelCase(name, (rooms[0], slots_Tn, room_ND), rows=rows)


@sum_peer_rows.register_cases
def sum_peer_rows_cases(draw: CaseInputs) -> Cases:
    for name, slots_Tn, rooms, rows in placed_cases(draw):
        yield KernelCase(name, (rooms, slots_Tn), rows=rows)
