"""Rows of clones: which copy of an expert, its home or a clone, computes each choice.

A rank has `held` experts of its own in its first slots and clones in the spare slots behind them. Slots of all ranks
are numbered rank by rank; dispatchers take these numbers for experts:

    4 experts, 2 ranks, 1 spare slot    number  0 1 2   3 4 5
                                        expert  0 1 3   2 3 -      rank 0 clones expert 3

All choices of a layer stand in one line: by expert, then by the rank of their token, then by token. An expert's part of
the line is cut into the rows of its copies, the home first.

T tokens, K choices of a token, E experts, n ranks of ep, S spare slots of a rank, C copies: E homes and n x S slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.dispatch.base import Rows, rows_between
from moefold.dispatch.echo_plan import ClonePlan, before_each
from moefold.dispatch.expert_placement import ExpertPlacement, contiguous_placement


def placement_with_slots(experts: ExpertPlacement, slots: int) -> ExpertPlacement:
    """The placement of all slots, numbered rank by rank."""
    ranks = experts.rank_count
    each = experts.held + slots
    return contiguous_placement(ranks * each, ranks)


class CopyLine(NamedTuple):
    """The line of all choices, cut: choices before `end_C[c]` and behind the copy before go to slot `slot_C[c]`.
    `begin_E`: where an expert's part begins."""

    end_C: Tensor
    slot_C: Tensor
    begin_E: Tensor

    def slots_at(self, place: Tensor) -> Tensor:
        """The slots of the choices at these places of the line."""
        copy = torch.searchsorted(self.end_C, place, right=True)
        last = len(self.slot_C) - 1
        return self.slot_C[copy.clamp(max=last)]  # a missing choice may lie behind the end


def clones_in_home_order(plan: ClonePlan, experts: ExpertPlacement) -> ClonePlan:
    """The same clones in other slots: each rank's by the positions of their homes, and without clones of no rows."""
    is_used_nS = plan.rows_nS > 0
    position_nS = experts.position_of(plan.clone_nS)
    behind_all = len(plan.loads_E)
    key_nS = torch.where(is_used_nS, position_nS, behind_all)
    order_nS = key_nS.argsort(dim=1, stable=True)
    used_nS = torch.where(is_used_nS, plan.clone_nS, -1)
    clone_nS = used_nS.gather(1, order_nS)
    rows_nS = plan.rows_nS.gather(1, order_nS)
    return plan._replace(clone_nS=clone_nS, rows_nS=rows_nS)


def cut_into_copies(plan: ClonePlan, experts: ExpertPlacement) -> CopyLine:
    """The line of all choices for a plan."""
    device = plan.loads_E.device
    ranks, slots = plan.clone_nS.shape
    held = experts.held
    # slots of homes: rank x (held + S) + slot
    expert_E = torch.arange(experts.experts, device=device)
    position_E = experts.position_of(expert_E)
    spare_before_E = experts.rank_of(expert_E) * slots
    home_E = position_E + spare_before_E
    # slots of clones
    first_n = torch.arange(ranks, device=device) * (held + slots) + held
    spare_S = torch.arange(slots, device=device)
    spare_nS = first_n[:, None] + spare_S
    # all copies, those of an expert side by side, its home first
    expert_C = torch.cat((expert_E, plan.clone_nS.flatten()))
    rows_C = torch.cat((plan.home_rows(), plan.rows_nS.flatten()))
    slot_C = torch.cat((home_E, spare_nS.flatten()))
    order_C = expert_C.argsort(stable=True)
    sorted_rows_C = rows_C[order_C]
    begin_E = before_each(plan.loads_E)
    return CopyLine(sorted_rows_C.cumsum(0), slot_C[order_C], begin_E)


def count_choices(ids_TK: Tensor, experts: int) -> Tensor:
    """Choices of each expert."""
    ids = ids_TK.flatten()
    is_choice = ids >= 0
    counts_E = ids.new_zeros(experts)
    one = is_choice.long()
    return counts_E.scatter_add(0, ids.clamp(min=0), one)


def slots_of_choices(ids_TK: Tensor, counts_rE: Tensor, rank: int, line: CopyLine) -> Tensor:
    """The slot of each choice, -1 for a missing one. `counts_rE`: choices of all ranks whose tokens are in the line, of
    which this is `rank`."""
    ids = ids_TK.flatten()
    own_E = counts_rE[rank]
    earlier_E = counts_rE[:rank].sum(0)
    # From the place among this rank's sorted choices to that in the line.
    shift_E = line.begin_E + earlier_E - before_each(own_E)
    last = len(own_E)
    key = torch.where(ids >= 0, ids, last)
    order = key.argsort(stable=True)
    place = torch.arange(len(ids), device=ids.device)
    shift = shift_E[ids[order]]
    slot = line.slots_at(place + shift)
    slots = torch.empty_like(ids).scatter(0, order, slot)
    slots = torch.where(ids >= 0, slots, -1)
    return slots.view(ids_TK.shape)


def split_rows(rows: Rows, first_clone_row: int, spare_slots: int) -> tuple[Rows, Rows]:
    """The rows of this rank's own experts, and those of its clones."""
    order = rows.order
    held = len(order.ends_e) - spare_slots
    every_row = len(order.index_R)
    own = rows_between(order, 0, first_clone_row)
    own = own._replace(ends_e=own.ends_e[:held])
    cloned = rows_between(order, first_clone_row, every_row)
    cloned = cloned._replace(ends_e=cloned.ends_e[held:])
    return rows._replace(order=own), rows._replace(order=cloned)
