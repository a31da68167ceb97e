"""The dispatcher with clones (ECHO): choices of hot experts are spread over their copies, and sent by the hops of
another dispatcher, which takes slots for experts.

    plan       choices of all ranks by expert -> plan of clones -> a slot for each choice -> hops of the inner one
    dispatch   tokens as the inner one sends them; the layer sends weights beside them (dispatch/clone_weights.py)
    combine    as the inner one

The plan of clones is made on the device. What the host must know of it comes with the sizes of the exchanges: a layer
waits once, as without clones.

E experts, n ranks of ep, r ranks of ep and etp, S spare slots of a rank.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather_no_grad
from moefold.dispatch.base import Dispatcher, Receipt, Routing, Rows
from moefold.dispatch.clone_rows import clones_in_home_order, count_choices, cut_into_copies, slots_of_choices
from moefold.dispatch.clone_weights import CloneFigures, CloneMap
from moefold.dispatch.echo_plan import ClonePlan, plan_clones, rows_of_ranks
from moefold.dispatch.expert_placement import ExpertPlacement
from moefold.dispatch.hop_dispatcher import HopDispatcher
from moefold.dispatch.traffic import TrafficCounter
from moefold.layout.axes import World

CloneDecision = Literal["now", "previous"]


class CloningDispatcher:
    """`inner` sends to slots, `experts` is the placement of homes. `decision`: whether clones are those for the counts
    of this microbatch, or those for the layer's microbatch before."""

    def __init__(
        self, inner: HopDispatcher, experts: ExpertPlacement, world: World, slots: int, decision: CloneDecision
    ):
        assert inner.traffic is not None, "clones need a dispatcher that counts its traffic"
        self.inner = inner
        self.traffic: TrafficCounter = inner.traffic
        self.experts = experts
        self.world = world
        self.slots = slots
        self.decision: CloneDecision = decision
        self.planned: ClonePlan | None = None  # for the microbatch before

    def for_one_layer(self) -> CloningDispatcher:
        """The same dispatcher, with a memory of its own of the microbatch before."""
        return CloningDispatcher(self.inner, self.experts, self.world, self.slots, self.decision)

    def plan(self, routing: Routing) -> Receipt:
        ids_TK = routing.ids_TK
        counts_rE = self.count_everywhere(ids_TK)
        plan = self.decide(counts_rE.sum(0))
        plan = clones_in_home_order(plan, self.experts)
        line = cut_into_copies(plan, self.experts)
        etp = self.world.etp
        ep = self.world.ep
        rank = etp.index * ep.size + ep.index
        slots_TK = slots_of_choices(ids_TK, counts_rE, rank, line)
        traffic = self.traffic.count(slots_TK, self.for_the_host(plan))
        to_slots = routing._replace(ids_TK=slots_TK)
        receipt = self.inner.plan_hops(to_slots, traffic)
        return receipt._replace(clones=self.read_clone_map(traffic.noted))

    def dispatch(self, h_TD: Tensor, receipt: Receipt) -> Rows:
        return self.inner.dispatch(h_TD, receipt)

    def combine(self, y_RD: Tensor, receipt: Receipt) -> Tensor:
        return self.inner.combine(y_RD, receipt)

    def count_everywhere(self, ids_TK: Tensor) -> Tensor:
        """Choices of each expert on all ranks that send to the same experts: by etp rank, then by ep rank."""
        counts_E = count_choices(ids_TK, self.experts.experts)
        of_ep_nE = all_gather_no_grad(counts_E[None], self.world.ep)
        return all_gather_no_grad(of_ep_nE, self.world.etp)

    def decide(self, loads_E: Tensor) -> ClonePlan:
        """The clones for these loads. One microbatch behind, copies keep the shares that they had there; the first
        microbatch has no clones."""
        fitting = plan_clones(loads_E, self.experts, self.slots)
        if self.decision == "now":
            return fitting
        before = self.planned
        self.planned = fitting
        if before is None:
            nothing_nS = torch.zeros_like(fitting.rows_nS)
            return fitting._replace(rows_nS=nothing_nS)
        return before.scaled_to(loads_E)

    def for_the_host(self, plan: ClonePlan) -> Tensor:
        """Numbers that the host needs: rows of each rank without clones, with them, and of its own experts alone; and
        the position of the expert in each spare slot, -1 for none."""
        experts = self.experts
        without_n = rows_of_ranks(plan.loads_E, experts)
        at_home_n = rows_of_ranks(plan.home_rows(), experts)
        rows_n = at_home_n + plan.rows_nS.sum(1)
        position_nS = experts.position_of(plan.clone_nS)
        position_nS = torch.where(plan.clone_nS >= 0, position_nS, -1)
        return torch.cat((without_n, rows_n, at_home_n, position_nS.flatten()))

    def read_clone_map(self, noted: list[int]) -> CloneMap:
        ranks = self.experts.rank_count
        without = noted[:ranks]
        rows = noted[ranks : 2 * ranks]
        at_home = noted[2 * ranks : 3 * ranks]
        homes: list[list[int]] = []
        for begin in range(3 * ranks, len(noted), self.slots):
            positions = noted[begin : begin + self.slots]
            homes.append([position for position in positions if position >= 0])
        figures = CloneFigures(max(rows) * ranks, max(without) * ranks, sum(rows))
        first_row = at_home[self.world.ep.index]
        return CloneMap(homes, self.experts.held, self.slots, first_row, figures)


def for_one_layer(dispatcher: Dispatcher) -> Dispatcher:
    """The dispatcher of one layer: one that remembers something has a memory for each."""
    return dispatcher.for_one_layer() if isinstance(dispatcher, CloningDispatcher) else dispatcher
