"""Rows of experts in blocks along the tokens, for column copies in small blocks: each expert's rows fill blocks of
`height` rows, the last one with zeros.

R rows sorted by expert, P padded rows in B blocks of K rows, E experts, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.quantise.fp8 import in_blocks
from moefold.kernels.quantise.row_tiles import rows_of_experts


class RowBlocks(NamedTuple):
    """`ends_E`: where each expert's padded rows end. `expert_R`: the expert of each row, E for none. `place_R`: the
    padded place of each row, P for rows without an expert. `source_P`: the row of each padded place, -1 for none.
    `expert_B`: the expert of each block."""

    ends_E: Tensor
    expert_R: Tensor
    place_R: Tensor
    source_P: Tensor
    expert_B: Tensor


def row_blocks(ends_E: Tensor, rows: int, height: int) -> RowBlocks:
    """B is an upper bound that depends on shapes alone, so that nothing waits for the device."""
    experts = len(ends_E)
    last_expert = experts - 1
    filling = experts * (height - 1)  # at most
    blocks = (rows + filling) // height
    # each expert's rows and padded rows
    ends = ends_E.long()
    rows_E = rows_of_experts(ends)
    blocks_E = (rows_E + height - 1) // height
    padded_E = blocks_E * height
    padded_ends_E = padded_E.cumsum(0)
    first_E = padded_ends_E - padded_E
    # the place of each row
    expert_R = expert_of_rows(ends_E, rows)
    held_R = expert_R.clamp(max=last_expert)
    begins_E = ends - rows_E
    shift_E = first_E - begins_E
    row_R = torch.arange(rows, device=ends.device)
    place_R = row_R + shift_E[held_R]
    has_expert_R = expert_R < experts
    padded = blocks * height
    place_R = torch.where(has_expert_R, place_R, padded)
    source_P = row_R.new_full((padded + 1,), -1)  # rows without an expert go to the last place
    source_P[place_R] = row_R
    # the expert of each block
    number_B = torch.arange(blocks, device=ends.device)
    row_B = number_B * height
    expert_B = torch.searchsorted(padded_ends_E, row_B, right=True)
    expert_B = expert_B.clamp(max=last_expert)
    padded_ends_E = padded_ends_E.int()
    return RowBlocks(padded_ends_E, expert_R, place_R, source_P[:padded], expert_B)


def expert_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """The expert of each row; E for rows behind the last end."""
    ends = ends_E.long()
    row_R = torch.arange(rows, device=ends.device)
    return torch.searchsorted(ends, row_R, right=True)


def rows_to_blocks(x_RD: Tensor, source_P: Tensor, height: int) -> Tensor:
    """(B, D, K): each block transposed, so that the values of a column lie together; zeros where there is no row."""
    width = x_RD.shape[1]
    zeros = x_RD.new_zeros(1, width)
    with_zeros = torch.cat((x_RD, zeros))  # -1 is its last row
    x_PD = with_zeros[source_P]
    x_BKD = in_blocks(x_PD, 0, height)
    return x_BKD.mT


def places_of_case(rows: Tensor, height: int) -> Tensor:
    """For cases of ops: two blocks of some rows, in another order, a third of the places without one."""
    place_P = torch.arange(2 * height, device=rows.device)
    source_P = (place_P * 5) % len(rows)
    return torch.where(place_P % 3 == 1, -1, source_P)


def blocks_to_rows(x_BDK: Tensor) -> Tensor:
    """(P, D): rows in their padded places."""
    return x_BDK.mT.flatten(0, 1)


def largest_by_expert(amax_B: Tensor, expert_B: Tensor, experts: int) -> Tensor:
    """The largest magnitude of each expert from those of its blocks or rows; an expert number beyond the last counts
    nowhere."""
    # Bits of magnitudes have their order, NaN last, and a GPU has an atomic maximum of integers.
    bits_B = amax_B.view(torch.int32)
    most = bits_B.new_zeros(experts + 1)
    most = most.scatter_reduce(0, expert_B, bits_B, "amax")
    return most[:experts].view(torch.float32)
