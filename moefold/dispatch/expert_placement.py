"""Placement of experts: the rank of the expert-parallel axis and the slot in its weights, for each expert.

    8 experts, 4 ranks, contiguous      expert  0 1 2 3 4 5 6 7
                                        rank    0 0 1 1 2 2 3 3
                                        slot    0 1 0 1 0 1 0 1

Dispatchers look up ranks and slots in this map and do no arithmetic on expert ids. So experts can be moved between
ranks (for load balance, or after a rank has failed) with another map and the weights in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

ExpertPlace = tuple[int, int]  # rank and slot
TableKey = tuple[str, torch.device, int]  # name of a lookup table, device and rank


@dataclass(frozen=True)
class ExpertPlacement:
    """Map of expert id to (rank, slot). Every rank holds the same number of experts. The result for an id of -1 (no
    choice) is undefined and masked by callers; `slot_on_rank` returns no slot for it."""

    ranks: tuple[int, ...]
    slots: tuple[int, ...]

    def __post_init__(self):
        places = sorted(self.places)
        every_rank = range(self.rank_count)
        every_slot = range(self.held)
        expected = list(product(every_rank, every_slot))
        if places != expected:
            raise ValueError(
                f"experts are placed at (rank, slot) {places}; expected each of {self.rank_count} ranks to hold one "
                f"expert in each of {self.held} slots"
            )

    @property
    def places(self) -> list[ExpertPlace]:
        pairs = zip(self.ranks, self.slots, strict=True)
        return list(pairs)

    @property
    def experts(self) -> int:
        return len(self.ranks)

    @cached_property
    def rank_count(self) -> int:
        return max(self.ranks) + 1

    @property
    def held(self) -> int:
        """Experts on each rank."""
        return self.experts // self.rank_count

    def rank_of(self, ids: Tensor) -> Tensor:
        ranks = self.lookup_table("ranks", ids.device)
        return ranks[ids]

    def slot_on_rank(self, ids: Tensor, rank: int) -> Tensor:
        """The slot of each expert on `rank`; `held`, one past the last slot, for other ranks' experts and for -1."""
        slots = self.lookup_table("slots", ids.device, rank)
        return slots[ids]

    def position_of(self, ids: Tensor) -> Tensor:
        """Position of an expert in an order rank by rank: rank x held + slot."""
        positions = self.lookup_table("positions", ids.device)
        return positions[ids]

    def expert_at(self, positions: Tensor) -> Tensor:
        """The inverse of `position_of`."""
        experts = self.lookup_table("experts", positions.device)
        return experts[positions]

    def lookup_table(self, name: str, device: torch.device, rank: int = 0) -> Tensor:
        """A lookup table on a device, uploaded once."""
        key = name, device, rank
        table = self.uploaded_tables.get(key)
        if table is None:
            values = self.table_values(name, rank)
            table = torch.tensor(values, dtype=torch.int64, device=device)
            self.uploaded_tables[key] = table
        return table

    def table_values(self, name: str, rank: int) -> list[int]:
        if name == "ranks":
            return list(self.ranks)
        if name == "positions":
            return list(self.positions)
        if name == "experts":
            experts: list[int] = []
            for holder in range(self.rank_count):
                experts += self.experts_of_rank(holder)
            return experts
        no_slot = self.held
        slots: list[int] = []
        for holder, slot in self.places:
            is_here = holder == rank
            slots.append(slot if is_here else no_slot)
        slots.append(no_slot)  # what an id of -1 finds
        return slots

    @cached_property
    def uploaded_tables(self) -> dict[TableKey, Tensor]:
        return {}

    @property
    def positions(self) -> tuple[int, ...]:
        held = self.held
        return tuple(rank * held + slot for rank, slot in self.places)

    def experts_of_rank(self, rank: int) -> list[int]:
        """Ids of the experts that a rank holds, by slot: the order of its weights."""
        holders = enumerate(self.ranks)
        mine = [expert for expert, holder in holders if holder == rank]
        return sorted(mine, key=self.slots.__getitem__)


def contiguous_placement(experts: int, ranks: int = 1) -> ExpertPlacement:
    """The default: rank r holds experts r x held up to (r + 1) x held, in order."""
    held = experts // ranks
    places = [divmod(expert, held) for expert in range(experts)]
    return placement_of_pairs(places)


def permuted_placement(order: Sequence[int], ranks: int = 1) -> ExpertPlacement:
    """`order` lists expert ids rank by rank, slot by slot."""
    experts = len(order)
    held = experts // ranks
    places: dict[int, ExpertPlace] = {}
    for position, expert in enumerate(order):
        places[expert] = divmod(position, held)
    in_order = [places[expert] for expert in range(experts)]
    return placement_of_pairs(in_order)


def placement_of_pairs(places: Sequence[ExpertPlace]) -> ExpertPlacement:
    ranks = tuple(rank for rank, _ in places)
    slots = tuple(slot for _, slot in places)
    return ExpertPlacement(ranks, slots)
