"""Choices of all ranks, announced in each other's memory, and what a rank derives from them without a further exchange.

    announce_choices   ids_TK, weights_TK -> rooms      places of the chosen experts, router weights, counts by block
    arrange_arrivals   own room -> maps of rows         rows of own tokens on all ranks, order of the rows that arrive

Every rank writes the choices of its tokens to all ranks, so that each knows the routing of all. Counts stand beside
them for each block of tokens: a block finds its rows from the counts of the blocks before, and needs no other block.

s ranks that send, n ranks of ep, T tokens, K choices of a token, B blocks of a sender, E experts, e experts held here,
C = E + n + 1 counts of a block: choices of each expert by its place, tokens for each rank, and in the last column a
number of the sender: the room that it keeps for the tokens. N rows of arrived tokens, R rows of experts. A place is
rank x held + slot; -1 is no choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.announced_choices import BLOCK_TOKENS, blocks_of_tokens, columns_of_counts
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op
from moefold.kernels.routing.arrivals import ArrivalShape
from moefold.kernels.routing.exchange_tail import ExchangeTail

ROOM_COLUMN = -1  # of counts


@register_in_place_op
def announce_choices(
    ids_TK: Tensor,
    weights_TK: Tensor,
    position_E: Tensor,
    sender: int,
    kept_room: int,
    positions: list[Tensor],
    weights: list[Tensor],
    counts: list[Tensor],
    tail: ExchangeTail | None = None,
) -> None:
    """Write the choices of a rank to all rooms: `positions` and `weights` (s, T, K) and `counts` (s, B, C) of each
    rank, where T are as many as a rank may send: those that it does not send have no choice."""
    _, most, k = positions[0].shape
    experts = len(position_E)
    tokens = len(ids_TK)
    is_choice_TK = (ids_TK >= 0) & (ids_TK < experts)
    some_id_TK = ids_TK.clamp(0, experts - 1)
    place_TK = position_E[some_id_TK]
    position_TK = ids_TK.new_full((most, k), -1, dtype=torch.int32)
    position_TK[:tokens] = torch.where(is_choice_TK, place_TK, -1)
    columns = counts[0].shape[-1]
    ranks = columns - columns_of_counts(experts, 0)
    counts_BC = count_blocks(position_TK, experts, ranks)
    counts_BC[:, ROOM_COLUMN] = kept_room
    for positions_sTK, weights_sTK, counts_sBC in zip(positions, weights, counts, strict=True):
        positions_sTK[sender] = position_TK
        weights_sTK[sender, :tokens] = weights_TK
        counts_sBC[sender] = counts_BC


def count_blocks(position_TK: Tensor, experts: int, ranks: int) -> Tensor:
    """(B, C): choices of each expert, and tokens for each rank, of each block; the last column is not set."""
    tokens, k = position_TK.shape
    device = position_TK.device
    blocks = blocks_of_tokens(tokens)
    columns = columns_of_counts(experts, ranks)
    counts_BC = position_TK.new_zeros(blocks, columns)
    token_T = torch.arange(tokens, device=device)
    block_T = token_T // BLOCK_TOKENS
    block_T1 = block_T[:, None]
    # choices of each expert; missing ones go to the last column
    place_TK = torch.where(position_TK >= 0, position_TK, columns - 1)
    one_TK = torch.ones_like(position_TK)
    at = (block_T1.expand(-1, k), place_TK.long())
    counts_BC.index_put_(at, one_TK, accumulate=True)
    # tokens for each rank
    goes_Tn = ranks_of_tokens(position_TK, experts // ranks, ranks)
    rank_n = torch.arange(ranks, device=device)
    column_n = experts + rank_n
    at = (block_T1.expand(-1, ranks), column_n.expand(tokens, -1))
    counts_BC.index_put_(at, goes_Tn.int(), accumulate=True)
    return counts_BC


def ranks_of_tokens(position_TK: Tensor, held: int, ranks: int) -> Tensor:
    """(T, n): whether a token has a choice on a rank."""
    rank_TK = position_TK.div(held, rounding_mode="floor").long()
    rank_TK = torch.where(position_TK >= 0, rank_TK, ranks)  # the last takes missing choices
    goes = position_TK.new_zeros(len(position_TK), ranks + 1, dtype=torch.bool)
    goes.scatter_(1, rank_TK, True)
    return goes[:, :ranks]


@register_inner_op
def arrange_arrivals(
    positions_sTK: Tensor,
    weights_sTK: Tensor,
    counts_sBC: Tensor,
    shape: ArrivalShape,
    overflowed: Tensor,
    lost: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The fields of `ArrangedArrivals`. Rows of tokens lie in the order of their senders and of their tokens; rows of
    experts in that of experts, and within an expert in that of the tokens. `overflowed` (bool) is set where tokens or
    rows of this rank find no room: those have none. Where `lost` (a word) is not zero, a rank has not written what is
    read here, and nothing arrives: taken for places, it would end the device before the host can name that rank."""
    room_s = counts_sBC[:, 0, ROOM_COLUMN]
    if lost is not None:
        is_whole = lost == 0
        positions_sTK = torch.where(is_whole, positions_sTK, -1)
        room_s = torch.where(is_whole, room_s, -1)
    senders, most, _ = positions_sTK.shape
    position_AK = positions_sTK.flatten(0, 1)
    goes_An = ranks_of_tokens(position_AK, shape.held, senders // shape.etp)
    number_An = goes_An.cumsum(0) - 1
    fits_An = goes_An & (number_An < shape.arriving)
    slots_An = torch.where(fits_An, number_An, -1)
    begin = shape.sender * most
    end = begin + shape.tokens
    slots_Ts = slots_An[begin:end].repeat_interleave(shape.etp, dim=1)
    arrived = goes_An[:, shape.rank].sum()
    overflowed.logical_or_(arrived > shape.arriving)
    source_A = slots_An[:, shape.rank]
    order = order_arrivals(position_AK, weights_sTK.flatten(), source_A, shape, overflowed)
    return *order, slots_Ts.int(), room_s.clone()


def order_arrivals(
    position_AK: Tensor,
    weights: Tensor,
    source_A: Tensor,
    shape: ArrivalShape,
    overflowed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """index_R, slots_NK, weight_R and ends_e of the choices of experts held here. `source_A`: rows of the tokens that
    arrive here, -1 for others."""
    k = position_AK.shape[1]
    row, ends_e = rows_of_choices(position_AK.flatten(), shape)
    overflowed.logical_or_(ends_e[-1] > shape.rows)
    source = source_A.repeat_interleave(k)
    has_row = (row < shape.rows) & (source >= 0)
    # one more place behind the last takes what has no row
    place = torch.where(has_row, row, shape.rows)
    index = source.new_full((shape.rows + 1,), -1)
    index.scatter_(0, place, source)
    weight = weights.new_zeros(shape.rows + 1)
    weight.scatter_(0, place, weights)
    choice_K = torch.arange(k, device=source.device)
    choice_AK = source_A[:, None] * k + choice_K
    last = shape.arriving * k
    link = torch.where(has_row, choice_AK.flatten(), last)
    slots = source.new_full((last + 1,), -1)
    slots.scatter_(0, link, row)
    slots_NK = slots[:last].view(-1, k)
    ends_e = ends_e.clamp(max=shape.rows)
    return index[:-1].int(), slots_NK.int(), weight[:-1], ends_e.int()


def rows_of_choices(position: Tensor, shape: ArrivalShape) -> tuple[Tensor, Tensor]:
    """The row of each choice, at least R for one of other ranks' experts, and the end of each expert's rows."""
    held = shape.held
    slot = position - shape.rank * held
    is_held = (slot >= 0) & (slot < held)
    slot = torch.where(is_held, slot, held)
    order = slot.argsort(stable=True)
    sorted_slot = slot[order]
    every_slot = torch.arange(held, device=slot.device)
    last_e = torch.searchsorted(sorted_slot, every_slot, right=True)
    zero = last_e.new_zeros(1)
    counts_e = last_e.diff(prepend=zero)
    pads_e = -(-counts_e // shape.multiple)
    sizes_e = pads_e * shape.multiple
    if shape.each:
        sizes_e = torch.full_like(counts_e, shape.each)
    ends_e = sizes_e.cumsum(0)
    # A row moves by the difference between its expert's begin with padding and without.
    begins_e = ends_e - sizes_e
    shift_e = begins_e - last_e + counts_e
    held_slot = sorted_slot.clamp(max=held - 1)
    number = torch.arange(len(slot), device=slot.device)
    moved = number + shift_e[held_slot]
    sorted_row = torch.where(sorted_slot < held, moved, shape.rows)
    row = torch.empty_like(sorted_row)
    row.scatter_(0, order, sorted_row)
    return row, ends_e


@cache
def device_code():
    """The launches of these ops, looked up once (peer_rows.py)."""
    from moefold.kernels.routing import peer_plan_triton

    return peer_plan_triton


@announce_choices.register_fast("triton")
def announce_choices_triton(
    ids_TK: Tensor,
    weights_TK: Tensor,
    position_E: Tensor,
    sender: int,
    kept_room: int,
    positions: list[Tensor],
    weights: list[Tensor],
    counts: list[Tensor],
    tail: ExchangeTail | None = None,
) -> None:
    rooms = (positions, weights, counts)
    device_code().launch_announce_choices(ids_TK, weights_TK, position_E, (sender, kept_room), rooms, tail)


@arrange_arrivals.register_fast("triton")
def arrange_arrivals_triton(
    positions_sTK: Tensor,
    weights_sTK: Tensor,
    counts_sBC: Tensor,
    shape: ArrivalShape,
    overflowed: Tensor,
    lost: Tensor | None = None,
) -> tuple[Tensor, ...]:
    rooms = (positions_sTK, weights_sTK, counts_sBC)
    return device_code().launch_arrange_arrivals(rooms, shape, overflowed, lost)


class PlanRooms(NamedTuple):
    """Rooms of all ranks for the choices of all."""

    positions: list[Tensor]
    weights: list[Tensor]
    counts: list[Tensor]

    def of(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.positions[rank], self.weights[rank], self.counts[rank]


ANNOUNCED_CASES = [  # T that a rank may send, those of each rank, K, n, etp, e
    (3, (3, 1), 1, 2, 1, 2),
    (9, (9, 0, 5, 9), 2, 2, 2, 3),
    (130, (130, 129), 1, 2, 1, 4),
    (200, (200, 0, 197), 3, 3, 1, 5),
]


class AnnouncedCase(NamedTuple):
    """Choices of all ranks: a name, (ids, weights) of each, the place of each expert, and empty rooms."""

    name: str
    choices: list[tuple[Tensor, Tensor]]
    position_E: Tensor
    rooms: PlanRooms
    etp: int


def announced_cases(draw: CaseInputs) -> Iterator[AnnouncedCase]:
    for most, sent, k, ranks, etp, held in ANNOUNCED_CASES:
        experts = ranks * held
        generator = torch.Generator().manual_seed(most)
        position_E = torch.randperm(experts, generator=generator).to(draw.device)
        choices: list[tuple[Tensor, Tensor]] = []
        for rank, tokens in enumerate(sent):
            ids_TK = torch.randint(-1, experts, (tokens, k), generator=generator)
            weights_TK = draw.wide(tokens, k, seed=rank)
            choices.append((ids_TK.to(draw.device), weights_TK))
        rooms = empty_plan_rooms(len(sent), most, k, columns_of_counts(experts, ranks), draw)
        yield AnnouncedCase(f"{most} x {k} to {ranks} x {etp}", choices, position_E, rooms, etp)


def empty_plan_rooms(senders: int, most: int, k: int, columns: int, draw: CaseInputs) -> PlanRooms:
    blocks = blocks_of_tokens(most)
    rooms = PlanRooms([], [], [])
    for _ in range(senders):
        positions = torch.zeros(senders, most, k, dtype=torch.int32, device=draw.device)
        rooms.positions.append(positions)
        rooms.weights.append(torch.zeros_like(positions, dtype=draw.wide_dtype))
        rooms.counts.append(torch.zeros(senders, blocks, columns, dtype=torch.int32, device=draw.device))
    return rooms


def announce_all(case: AnnouncedCase) -> None:
    for sender, (ids_TK, weights_TK) in enumerate(case.choices):
        announce_choices.reference(ids_TK, weights_TK, case.position_E, sender, sender - 1, *case.rooms)


@announce_choices.register_cases
def announce_choices_cases(draw: CaseInputs) -> Cases:
    for name, choices, position_E, rooms, _ in announced_cases(draw):
        yield KernelCase(name, (*choices[0], position_E, 0, 1, *rooms))


@arrange_arrivals.register_cases
def arrange_arrivals_cases(draw: CaseInputs) -> Cases:
    for case in announced_cases(draw):
        announce_all(case)
        overflowed = torch.zeros((), dtype=torch.bool, device=draw.device)
        for sender, (ids_TK, _) in enumerate(case.choices):
            for about, shape in arrival_shapes(case, sender, len(ids_TK)):
                inputs = (*case.rooms.of(sender), shape, overflowed)
                yield KernelCase(f"{case.name}, rank {sender}, {about}", inputs)


def arrival_shapes(case: AnnouncedCase, sender: int, tokens: int) -> Iterator[tuple[str, ArrivalShape]]:
    senders, most, k = case.rooms.positions[0].shape
    held = len(case.position_E) * case.etp // senders
    arriving = senders * most
    rows = arriving * min(k, held)
    shape = ArrivalShape(sender, case.etp, held, tokens, arriving, rows)
    yield "all fit", shape
    yield "few fit", shape._replace(arriving=arriving // 3, rows=rows // 4)
    yield "padded", shape._replace(rows=rows + held * 3, multiple=4)
    yield "padded to one size", shape._replace(rows=rows * held, each=rows)
