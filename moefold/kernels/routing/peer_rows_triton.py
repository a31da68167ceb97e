"""Rows between ranks that write to each other's memory, in Triton. Imported only where Triton is.

Rooms of other ranks are given by a table of their addresses. Nothing is atomic: a row has one writer.

T tokens, K choices of a token, D width, n ranks, s senders, B blocks of tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.routing.rows_triton import columns_of_program
from moefold.kernels.tile_triton import load_or_zero, numbers_from, program_block, store_inside, wide_program_id

TOKENS = 128  # of one program that counts or places
ALIGNMENT = 16  # bytes of a room's address


@triton.jit
def count_of_ranks(rank_TK, t, r, T, K: constexpr):
    """For each token and each rank, how many of its choices are there."""
    count = t[:, None] * 0 + r[None, :] * 0
    for k in tl.static_range(K):
        at = rank_TK + t * K + k
        rank = tl.load(at, mask=t < T, other=-1)
        rank = rank.to(tl.int32)
        is_there = rank[:, None] == r[None, :]
        count += is_there.to(tl.int32)
    return count


@triton.jit
def count_parcels_kernel(rank_TK, counts_B2n, T, n, K: constexpr, WIDTH: constexpr, TOKENS: constexpr):
    """Tokens and choices of one block for each rank."""
    block = tl.program_id(0)
    t = program_block(0, TOKENS)
    r = tl.arange(0, WIDTH)
    choices = count_of_ranks(rank_TK, t, r, T, K)
    goes = tl.minimum(choices, 1)
    at = counts_B2n + 2 * n * block + r
    store_inside(at, tl.sum(goes, 0), r < n)
    store_inside(at + n, tl.sum(choices, 0), r < n)


@triton.jit
def place_parcels_kernel(
    rank_TK, tokens_sn, slots_Tn, sender, most, T, n, K: constexpr, WIDTH: constexpr, TOKENS: constexpr
):  # fmt: skip
    """Rows of one block's tokens, behind those of earlier senders and of earlier blocks, which are counted again: that
    is less than a launch of its own."""
    block = tl.program_id(0)
    t = program_block(0, TOKENS)
    r = tl.arange(0, WIDTH)
    begins = r * 0
    for s in range(sender):
        earlier = load_or_zero(tokens_sn + s * n + r, r < n)
        begins += earlier.to(tl.int32)
    for b in range(block):
        earlier_t = numbers_from(b * TOKENS, TOKENS)
        choices = count_of_ranks(rank_TK, earlier_t, r, T, K)
        begins += tl.sum(tl.minimum(choices, 1), 0)
    choices = count_of_ranks(rank_TK, t, r, T, K)
    goes = tl.minimum(choices, 1)
    number = tl.cumsum(goes, 0) - goes
    slot = begins[None, :] + number
    fits = (goes > 0) & (slot < most)
    slot = tl.where(fits, slot, -1)
    at = slots_Tn + t[:, None] * n + r[None, :]
    inside = (t < T)[:, None] & (r < n)[None, :]
    store_inside(at, slot.to(tl.int64), inside)


@triton.jit
def load_room(addresses, rank, like):
    """The room of a rank, as a pointer of the type of `like`."""
    address = tl.load(addresses + rank)
    room = address.to(like.dtype)
    return tl.multiple_of(room, 16)


@triton.jit
def push_peer_rows_kernel(x_TD, slots_Tn, addresses, D, RANKS: constexpr, COLS: constexpr):
    """A part of one token, read once and written to the room of each of its ranks."""
    t = wide_program_id(0)
    c = program_block(1, COLS)
    real_c = c < D
    x = load_or_zero(x_TD + t * D + c, real_c)
    for rank in tl.static_range(RANKS):
        slot = tl.load(slots_Tn + t * RANKS + rank)
        room = load_room(addresses, rank, x_TD)
        at = room + slot * D + c
        store_inside(at, x, real_c & (slot >= 0))


@triton.jit
def sum_peer_rows_kernel(slots_Tn, addresses, out_TD, D, RANKS: constexpr, COLS: constexpr, WIDE: constexpr):
    """A part of one token's sum over its rows on all ranks, in their order."""
    t = wide_program_id(0)
    c = program_block(1, COLS)
    real_c = c < D
    total = tl.zeros([COLS], WIDE)
    for rank in tl.static_range(RANKS):
        slot = tl.load(slots_Tn + t * RANKS + rank)
        room = load_room(addresses, rank, out_TD)
        at = room + slot * D + c
        y = load_or_zero(at, real_c & (slot >= 0))
        total += y.to(WIDE)
    rounded = total.to(out_TD.dtype.element_ty)
    store_inside(out_TD + t * D + c, rounded, real_c)


@lru_cache(maxsize=256)
def uploaded_addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """A table of addresses on the device, uploaded once: rooms stay where they are."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def address_table(rooms: list[Tensor], device: torch.device) -> Tensor:
    """Addresses of rooms, each a multiple of 16 as kernels take it to be."""
    addresses = tuple(room.data_ptr() for room in rooms)
    assert all(address % ALIGNMENT == 0 for address in addresses), f"rooms begin at {addresses}"
    return uploaded_addresses(addresses, device)


def launch_count_parcels(rank_TK: Tensor, ranks: int) -> Tensor:
    """(2, n): tokens and choices for each rank."""
    tokens, k = rank_TK.shape
    blocks = triton.cdiv(tokens, TOKENS)
    counts_B2n = rank_TK.new_empty(blocks, 2, ranks)
    if tokens:
        width = triton.next_power_of_2(ranks)
        launch = count_parcels_kernel[(blocks,)]
        launch(rank_TK.contiguous(), counts_B2n, tokens, ranks, k, width, TOKENS)
    return counts_B2n.sum(0)


def launch_place_parcels(rank_TK: Tensor, tokens_sn: Tensor, sender: int, most: int) -> Tensor:
    """(T, n): the row of each token on each rank, -1 for none."""
    tokens, k = rank_TK.shape
    ranks = tokens_sn.shape[1]
    slots_Tn = rank_TK.new_empty(tokens, ranks)
    if tokens:
        blocks = triton.cdiv(tokens, TOKENS)
        width = triton.next_power_of_2(ranks)
        inputs = (rank_TK.contiguous(), tokens_sn.contiguous(), slots_Tn)
        launch = place_parcels_kernel[(blocks,)]
        launch(*inputs, sender, most, tokens, ranks, k, width, TOKENS)
    return slots_Tn


def launch_push_peer_rows(x_TD: Tensor, slots_Tn: Tensor, rooms: list[Tensor]) -> None:
    tokens, d = x_TD.shape
    if not x_TD.numel():
        return
    addresses = address_table(rooms, x_TD.device)
    cols = columns_of_program(d, 1024)
    grid = (tokens, triton.cdiv(d, cols))
    launch = push_peer_rows_kernel[grid]
    launch(x_TD.contiguous(), slots_Tn.contiguous(), addresses, d, len(rooms), cols)


def launch_sum_peer_rows(rooms: list[Tensor], slots_Tn: Tensor) -> Tensor:
    tokens = len(slots_Tn)
    like = rooms[0]
    d = like.shape[1]
    out_TD = like.new_empty(tokens, d)
    if out_TD.numel():
        addresses = address_table(rooms, like.device)
        wide = tl.float64 if like.dtype == torch.float64 else tl.float32
        cols = columns_of_program(d, 1024)
        grid = (tokens, triton.cdiv(d, cols))
        launch = sum_peer_rows_kernel[grid]
        launch(slots_Tn.contiguous(), addresses, out_TD, d, len(rooms), cols, wide)
    return out_TD
