"""An MoE layer whose ranks one process plays: their dispatchers, routings and tokens, and the time of what they do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.announced_choices import blocks_of_tokens
from moefold.bench.machine import (
    cuda_capability,
    resolve_dtype,
)
from moefold.bench.options import DispatchOptions
from moefold.bench.played_ranks import PlayedArena, TurnOrder, play_ranks, played_arenas
from moefold.dispatch.base import Receipt, Routing, RowPolicy
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.room_sizes import AnnouncedSizes, ArenaRows, room_bytes, row_bytes_at_most
from moefold.dispatch.symmetric import ArenaDispatcher
from moefold.dispatch.tiled_experts import ExpertWeights
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.layout.dtypes import DTYPES
from moefold.observe.profile import profile_device

KEPT_ROOMS = 4  # results of earlier repetitions may not be freed yet


class LayerSizes(NamedTuple):
    hidden: int
    ffn: int


LAYER_SIZES = {"qwen3-30b": LayerSizes(2048, 768), "7168 x 2048": LayerSizes(7168, 2048)}


class DispatchCase(NamedTuple):
    ranks: int
    hidden: int
    zipf: float


class PhaseFigures(NamedTuple):
    """Of one rank, on average."""

    seconds: float
    launches: float


class PlayedLayer:
    """Dispatchers of all ranks, and what they send."""

    def __init__(self, options: DispatchOptions, case: DispatchCase, device: str):
        self.case = case
        self.device = torch.device(device)
        precision = resolve_dtype(options.dtype, device)
        self.dtype = DTYPES[precision]
        facts = Facts(device, precision, cuda_capability(device), hidden=case.hidden)
        self.kernels = BoundKernels(facts)
        self.order = TurnOrder(case.ranks)
        self.dispatchers = self.build_dispatchers(options)
        self.routings = [self.draw_routing(options, rank) for rank in range(case.ranks)]
        drawn = torch.randn(options.tokens, case.hidden, device=self.device)
        self.h_TD = drawn.to(self.dtype)
        self.y_RD = self.h_TD[:0]

    def build_dispatchers(self, options: DispatchOptions) -> list[ArenaDispatcher]:
        ranks = self.case.ranks
        experts = contiguous_placement(options.experts, ranks)
        rows = ArenaRows(options.tokens, options.tokens * ranks)
        row_bytes = row_bytes_at_most(self.case.hidden, self.dtype.itemsize, options.top_k)
        announced = AnnouncedSizes(ranks, options.tokens, options.top_k, options.experts, ranks)
        size = room_bytes(rows, announced, row_bytes)
        dispatchers: list[ArenaDispatcher] = []
        pieces = blocks_of_tokens(options.tokens)
        for rank, arena in enumerate(self.make_arenas(size, pieces)):
            policy = RowPolicy(experts, rank)
            dispatchers.append(ArenaDispatcher(arena, policy, self.kernels, 1, rows))
        return dispatchers

    def make_arenas(self, size: int, pieces: int) -> list[PlayedArena]:
        return played_arenas(self.case.ranks, size, self.device, self.order, KEPT_ROOMS, pieces)

    def draw_routing(self, options: DispatchOptions, rank: int) -> Routing:
        """Choices without repetition; experts are liked by Zipf's law in an order that all ranks share."""
        random = torch.Generator().manual_seed(0)
        place_E = torch.randperm(options.experts, generator=random) + 1
        liking_E = place_E.double() ** -self.case.zipf
        random.manual_seed(rank + 1)
        liking_TE = liking_E.expand(options.tokens, -1)
        ids_TK = torch.multinomial(liking_TE, options.top_k, generator=random)
        weights_TK = torch.rand(ids_TK.shape, generator=random)
        weights_TK = weights_TK.to(self.device)
        ids_TK = ids_TK.to(self.device)
        return Routing(weights_TK, ids_TK)

    def play(self, work: Callable[[int], Any]) -> list[Any]:
        return play_ranks(work, self.case.ranks, self.order)

    def dispatch(self, rank: int) -> tuple[Receipt, Tensor]:
        """The receipt, and the tokens that arrive."""
        dispatcher = self.dispatchers[rank]
        receipt = dispatcher.plan(self.routings[rank])
        rows = dispatcher.dispatch(self.h_TD, receipt)
        return receipt, rows.source_ND

    def combine(self, receipts: list[Receipt], rank: int) -> Tensor:
        receipt = receipts[rank]
        y_RD = self.expert_rows(receipt.order.index_R.shape[0])
        return self.dispatchers[rank].combine(y_RD, receipt)

    def there_and_back(self, rank: int) -> Tensor:
        """Every token times the number of its rows."""
        receipt, source_ND = self.dispatch(rank)
        return self.dispatchers[rank].give_back(source_ND, receipt)

    def expert_rows(self, rows: int) -> Tensor:
        """Results of experts, the same memory for all ranks."""
        if self.y_RD.shape[0] != rows:
            width = self.case.hidden
            self.y_RD = torch.ones(rows, width, dtype=self.dtype, device=self.device)
        return self.y_RD

    def rows_of_tokens(self) -> list[Tensor]:
        """For each rank, how many rows each token has."""
        counts: list[Tensor] = []
        held = self.dispatchers[0].row_policy.held
        for routing in self.routings:
            rank_TK = routing.ids_TK // held
            every_rank = torch.arange(self.case.ranks, device=self.device)
            goes_Tn = (rank_TK[:, :, None] == every_rank).any(1)
            counts.append(goes_Tn.sum(1))
        return counts


def draw_expert_weights(layer: PlayedLayer, ffn: int, rank: int) -> ExpertWeights:
    held = layer.dispatchers[rank].row_policy.held
    width = layer.case.hidden
    random = torch.Generator(layer.device).manual_seed(rank)
    like: dict[str, Any] = {"generator": random, "device": layer.device, "dtype": layer.dtype}
    gate_up = torch.randn(held, 2, ffn, width, **like)
    down = torch.randn(held, width, ffn, **like)
    return ExpertWeights(gate_up.mul_(width**-0.5), down.mul_(ffn**-0.5))


def measure_phase(layer: PlayedLayer, work: Callable[[int], Any], repeat: int) -> PhaseFigures:
    """The least time of kernels of several repetitions, and the launches of one."""
    seconds: list[float] = []
    launches = 0
    layer.play(work)
    for _ in range(repeat):
        with profile_device(layer.device) as read_profile:
            layer.play(work)
        profile = read_profile()
        seconds.append(profile.busy_seconds)
        launches = len(profile.kernels_run)
    ranks = layer.case.ranks
    return PhaseFigures(min(seconds) / ranks, launches / ranks)
