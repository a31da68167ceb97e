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
    padded place of each row, P for rows without an expert. `expert_B`: the expert of each block."""

    ends_E: Tensor
    expert_R: Tensor
    place_R: Tensor
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
    place_R = torch.where(has_expert_R, place_R, blocks * height)
    # the expert of each block
    number_B = torch.arange(blocks, device=ends.device)
    row_B = number_B * height
    expert_B = torch.searchsorted(padded_ends_E, row_B, right=True)
    expert_B = expert_B.clamp(max=last_expert)
    padded_ends_E = padded_ends_E.int()
    return RowBlocks(padded_ends_E, expert_R, place_R, expert_B)


def expert_of_rows(ends_E: Tensor, rows: int) -> Tensor:
    """The expert of each row; E for rows behind the last end."""
    ends = ends_E.long()
    row_R = torch.arange(rows, device=ends.device)
    return torch.searchsorted(ends, row_R, right=True)


def rows_to_blocks(x_RD: Tensor, blocks: RowBlocks, height: int) -> Tensor:
    """(B, D, K): each block transposed, so that the values of a column lie together."""
    padded = len(blocks.expert_B) * height
    width = x_RD.shape[1]
    x_PD = x_RD.new_zeros(padded + 1, width)  # rows without an expert go to the last row
    x_PD[blocks.place_R] = x_RD
    x_PD = x_PD[:padded]
    x_BKD = in_blocks(x_PD, 0, height)
    return x_BKD.mT


def blocks_to_rows(x_BDK: Tensor) -> Tensor:
    """(P, D): rows in their padded places."""
    return x_BDK.mT.flatten(0, 1)


def largest_by_expert(amax_B: Tensor, expert_B: Tensor, experts: int) -> Tensor:
    """The largest magnitude of each expert from those of its blocks or rows; an expert number beyond the last counts
    nowhere."""
    most = amax_B.new_zeros(experts + 1)
    most = most.scatter_reduce(0, expert_B, amax_B, "amax")
    return most[:experts]
