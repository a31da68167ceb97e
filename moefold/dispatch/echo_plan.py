"""The plan of clones (ECHO): hot experts get copies in spare slots of cooler ranks, for the rows of one layer.

A rank may have up to 1.05 x the mean of all ranks' rows. What it has above that is its excess, and what it has below is
its room. The excess is spilled from the rank's largest experts, and spilled rows are matched with rooms like two bars
of equal parts, largest first:

    spilled rows   |  expert 7           |  expert 2      | 31 |
    rooms          |  rank 3   |  rank 0   |  rank 5   | rank 1 |

Where two parts overlap, the rank gets a clone of the expert. Each rank keeps the `slots` largest overlaps; what was cut
off is matched again with the rooms that are left. The plan is a function of the loads alone, on their device and
without a host wait: equal loads give equal plans on all ranks.

E experts, n ranks of ep, S spare slots of a rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.dispatch.expert_placement import ExpertPlacement

PERCENT_OF_MEAN = 105  # rows of a rank above which its experts are cloned: clones for less would not pay
ROUNDS = 3  # of matching; a fourth finds nothing to match


class ClonePlan(NamedTuple):
    """`clone_nS`: the expert that each spare slot clones (-1: none), and `rows_nS` the rows that this copy takes of the
    `loads_E` rows of each expert. The expert's home takes the others."""

    loads_E: Tensor
    clone_nS: Tensor
    rows_nS: Tensor

    def home_rows(self) -> Tensor:
        """Rows of each expert that its home takes."""
        is_clone_nS = self.clone_nS >= 0
        expert_nS = torch.where(is_clone_nS, self.clone_nS, 0)  # with no rows
        expert = expert_nS.flatten()
        taken = self.rows_nS.flatten()
        return self.loads_E.scatter_add(0, expert, -taken)

    def rank_rows(self, experts: ExpertPlacement) -> Tensor:
        """Rows of each rank."""
        at_home_n = rows_of_ranks(self.home_rows(), experts)
        return at_home_n + self.rows_nS.sum(1)

    def scaled_to(self, loads_E: Tensor) -> ClonePlan:
        """The same clones for other loads: every copy takes the same share of its expert's rows."""
        planned_E = self.loads_E.clamp(min=1)
        planned_nS = planned_E[self.clone_nS]
        present_nS = loads_E[self.clone_nS]
        rows_nS = self.rows_nS * present_nS // planned_nS
        return self._replace(loads_E=loads_E, rows_nS=rows_nS)


def plan_clones(loads_E: Tensor, experts: ExpertPlacement, slots: int) -> ClonePlan:
    """The clones for these rows of each expert, which are whole numbers."""
    ranks = experts.rank_count
    rows_n = rows_of_ranks(loads_E, experts)
    total = rows_n.sum()
    most = -(-total * PERCENT_OF_MEAN // (100 * ranks))
    room_n = (most - rows_n).clamp(min=0)
    excess_n = (rows_n - most).clamp(min=0)
    spilled_E = spill_largest(loads_E, excess_n, experts)
    moved_nE = loads_E.new_zeros(ranks, len(loads_E))
    for _ in range(ROUNDS):
        free_n = slots - (moved_nE > 0).sum(1)
        open_n = torch.where(free_n > 0, room_n, 0)
        matched_nE = match_largest(open_n, spilled_E)
        kept_nE = keep_largest(matched_nE, free_n)
        moved_nE = moved_nE + kept_nE
        spilled_E = spilled_E - kept_nE.sum(0)
        room_n = room_n - kept_nE.sum(1)
    rows_nE, clone_nE = moved_nE.sort(dim=1, descending=True, stable=True)
    rows_nS = rows_nE[:, :slots]
    clone_nS = torch.where(rows_nS > 0, clone_nE[:, :slots], -1)
    return ClonePlan(loads_E, clone_nS, rows_nS)


def rows_of_ranks(rows_E: Tensor, experts: ExpertPlacement) -> Tensor:
    """Rows of all experts of each rank."""
    rank_E = experts.lookup_table("ranks", rows_E.device)
    rows_n = rows_E.new_zeros(experts.rank_count)
    return rows_n.scatter_add(0, rank_E, rows_E)


def spill_largest(loads_E: Tensor, excess_n: Tensor, experts: ExpertPlacement) -> Tensor:
    """Rows of each expert that leave its rank: those of a rank's largest experts, up to its excess."""
    by_load_E = loads_E.argsort(descending=True, stable=True)
    rank_E = experts.rank_of(by_load_E)
    by_rank_E = rank_E.argsort(stable=True)
    order_E = by_load_E[by_rank_E]  # rank by rank, and the largest expert first
    load_E = loads_E[order_E]
    before_ne = before_each(load_E.view(experts.rank_count, experts.held))
    left_ne = (excess_n[:, None] - before_ne).clamp(min=0)
    spilled_E = torch.minimum(left_ne.flatten(), load_E)
    return torch.zeros_like(spilled_E).scatter(0, order_E, spilled_E)


def match_largest(room_n: Tensor, spilled_E: Tensor) -> Tensor:
    """Spilled rows of each expert for each rank: both laid out as bars, largest first, and overlaps taken."""
    room_n, rank_n = room_n.sort(descending=True, stable=True)
    spilled_E, expert_E = spilled_E.sort(descending=True, stable=True)
    begin_n1 = before_each(room_n)[:, None]
    end_n1 = begin_n1 + room_n[:, None]
    begin_E = before_each(spilled_E)
    end_E = begin_E + spilled_E
    overlap_nE = torch.minimum(end_n1, end_E) - torch.maximum(begin_n1, begin_E)
    overlap_nE = overlap_nE.clamp(min=0)
    # back from the order of sizes to that of ranks and experts
    of_rank_n = rank_n.argsort()
    of_expert_E = expert_E.argsort()
    return overlap_nE[of_rank_n][:, of_expert_E]


def keep_largest(matched_nE: Tensor, free_n: Tensor) -> Tensor:
    """The matches that a rank has free slots for, the largest ones; zero for the others."""
    order_nE = matched_nE.argsort(dim=1, descending=True, stable=True)
    place_nE = order_nE.argsort(dim=1)  # 0 for the largest of a rank
    is_kept_nE = place_nE < free_n[:, None]
    return torch.where(is_kept_nE, matched_nE, 0)


def before_each(sizes: Tensor) -> Tensor:
    """The sum of the sizes before each, along the last dim."""
    return sizes.cumsum(-1) - sizes
