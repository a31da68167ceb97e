"""Choices go to copies of their experts, as many to each as the plan says."""

import pytest
import torch
from torch import Tensor

from moefold.dispatch.clone_rows import clones_in_home_order, count_choices, cut_into_copies, slots_of_choices
from moefold.dispatch.echo_plan import ClonePlan, plan_clones
from moefold.dispatch.expert_placement import ExpertPlacement, contiguous_placement, permuted_placement

EXPERTS, RANKS, SLOTS, TOKENS, K = 12, 4, 2, 40, 3
HELD = EXPERTS // RANKS
ORDER = [7, 0, 3, 11, 2, 5, 1, 10, 4, 9, 6, 8]
PLACEMENTS = [contiguous_placement(EXPERTS, RANKS), permuted_placement(ORDER, RANKS)]


def skewed_choices(rank: int) -> Tensor:
    """Of each rank other numbers of tokens; some choices are missing."""
    generator = torch.Generator().manual_seed(rank)
    share = 1 / torch.arange(1, EXPERTS + 1).double() ** 1.5
    ids = torch.multinomial(share, (TOKENS - 7 * rank) * K, replacement=True, generator=generator)
    ids[::5] = -1
    return ids.view(-1, K)


def expert_of_slots(plan: ClonePlan, placement: ExpertPlacement) -> list[int]:
    """The expert in each slot, rank by rank."""
    experts: list[int] = []
    for rank in range(RANKS):
        experts += placement.experts_of_rank(rank) + plan.clone_nS[rank].tolist()
    return experts


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["contiguous", "permuted"])
def test_every_choice_goes_to_a_copy_of_its_expert_and_every_copy_gets_its_rows(placement: ExpertPlacement):
    ids = [skewed_choices(rank) for rank in range(RANKS)]
    counts_rE = torch.stack([count_choices(each, EXPERTS) for each in ids])
    plan = plan_clones(counts_rE.sum(0), placement, SLOTS)
    assert (plan.rows_nS > 0).sum() >= 2
    plan = clones_in_home_order(plan, placement)
    line = cut_into_copies(plan, placement)
    expert_of = expert_of_slots(plan, placement)
    rows = [0] * len(expert_of)
    for rank, of_rank in enumerate(ids):
        slots = slots_of_choices(of_rank, counts_rE, rank, line)
        assert slots.shape == of_rank.shape
        for expert, slot in zip(of_rank.flatten().tolist(), slots.flatten().tolist(), strict=True):
            if expert < 0:
                assert slot == -1
            else:
                assert expert_of[slot] == expert
                rows[slot] += 1
    of_clones = [rows[rank * (HELD + SLOTS) + HELD :][:SLOTS] for rank in range(RANKS)]
    assert of_clones == plan.rows_nS.tolist()


def test_spare_slots_are_in_the_order_in_which_weights_arrive():
    """By home rank, then by the slot there; slots without rows are empty and come last."""
    placement = PLACEMENTS[1]
    loads_E = torch.full((EXPERTS,), 10)
    clone_nS = torch.tensor([[4, 3, 11], [-1, 8, 7], [5, 2, 0], [1, 6, -1]])
    rows_nS = torch.tensor([[1, 0, 2], [0, 1, 3], [1, 1, 1], [0, 0, 0]])
    found = clones_in_home_order(ClonePlan(loads_E, clone_nS, rows_nS), placement)
    assert found.clone_nS.tolist() == [[11, 4, -1], [7, 8, -1], [0, 2, 5], [-1, -1, -1]]
    assert found.rows_nS.tolist() == [[2, 1, 0], [3, 1, 0], [1, 1, 1], [0, 0, 0]]
