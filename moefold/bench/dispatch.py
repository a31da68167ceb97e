"""`moefold bench dispatch`: the symmetric dispatcher on one device, with all ranks played by one process.

Bytes are those that have to move: each token read once and each of its rows written once, or for combine read and
written the other way round, and of a plan the choices, which are read, and the maps of rows, which are written; they
and the bytes of a copy are counted as read plus written. Time is that of the kernels of all ranks, one behind the
other.

    dispatch     plan and dispatch: choices and router weights of all ranks, maps of rows, tokens
    row sums     of experts' rows by arrived token, on their rank, the first part of combine
    combine      its rest: these sums, read and summed in fp32 by the ranks of the tokens
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from moefold.anatomy.announced_choices import blocks_of_tokens
from moefold.bench.clock import copy_bandwidth
from moefold.bench.machine import (
    cuda_capability,
    free_device_memory,
    machine_facts,
    resolve_device,
    resolve_dtype,
    synchronize_device,
)
from moefold.bench.options import DispatchOptions
from moefold.bench.played_ranks import PlayedArena, TurnOrder, play_ranks, played_arenas, stay_on_first_core
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.dispatch.base import Receipt, Routing, RowPolicy
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.room_sizes import AnnouncedSizes, ArenaRows, room_bytes, row_bytes_at_most
from moefold.dispatch.symmetric import ArenaDispatcher
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.routing.expert_rows import sum_rows
from moefold.layout.dtypes import DTYPES
from moefold.observe.profile import profile_device

COPIED_BYTES = 2**30  # of the copy that bandwidth is measured by, on a GPU
COPIED_BYTES_ON_CPU = 2**24
COLD_FORWARDS = 4  # of a thread, before its time is taken
KEPT_ROOMS = 4  # results of earlier repetitions may not be freed yet
BYTES_OF_A_CHOICE = 8 + 4 + 3 * 4  # read: its expert and weight; written: source, slot and weight of its row


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


def run_benchmark(options: DispatchOptions) -> int:
    device = resolve_device(options.device)
    bandwidth = copy_bandwidth(device, options.repeat)
    report: Report = machine_facts(device)
    report["copy_gb_s"] = bandwidth / 1e9
    report["results"] = []
    for ranks in options.ranks:
        for hidden in options.hidden:
            for zipf in options.zipf:
                case = DispatchCase(ranks, hidden, zipf)
                row = measure_case(options, case, device, bandwidth)
                report["results"].append(row)
                free_device_memory(device)
    return show_report(report, options.json, print_dispatch_table)


def measure_case(options: DispatchOptions, case: DispatchCase, device: str, bandwidth: float) -> Row:
    layer = PlayedLayer(options, case, device)
    rows = require_right_results(layer)
    sent = layer.play(layer.dispatch)
    receipts: list[Receipt] = [receipt for receipt, _ in sent]
    dispatch = measure_phase(layer, layer.dispatch, options.repeat)
    both = measure_phase(layer, partial(layer.combine, receipts), options.repeat)
    summing = measure_phase(layer, partial(sum_expert_rows, layer, receipts), options.repeat)
    combine_seconds = max(both.seconds - summing.seconds, 1e-9)
    row_bytes = case.hidden * layer.dtype.itemsize
    moved = (options.tokens + rows) * row_bytes
    maps = options.tokens * options.top_k * BYTES_OF_A_CHOICE
    row: Row = case._asdict()
    row["tokens"] = options.tokens
    row["rows"] = rows
    row["mb"] = moved / 1e6
    row["dispatch_ms"] = dispatch.seconds * 1e3
    row["dispatch_share"] = (moved + maps) / dispatch.seconds / bandwidth
    row["combine_ms"] = combine_seconds * 1e3
    row["combine_share"] = moved / combine_seconds / bandwidth
    row["row_sums_ms"] = summing.seconds * 1e3
    row["launches"] = dispatch.launches + both.launches
    row["host_us"] = host_seconds(layer, receipts, options.repeat) * 1e6
    tell_progress(f"{case.ranks} ranks, width {case.hidden}, Zipf {case.zipf:g}: {row['dispatch_ms']:.3f} ms")
    return row


def require_right_results(layer: PlayedLayer) -> float:
    """Check tokens that are sent and come back; the rows that a rank sends, on average."""
    rows = 0
    results = layer.play(layer.there_and_back)
    counts = layer.rows_of_tokens()
    pairs = zip(results, counts, strict=True)
    for rank, (result, counts_T) in enumerate(pairs):
        expected = layer.h_TD.double() * counts_T[:, None]
        off = (result.double() - expected).abs().max()
        limit = 0.01 * expected.abs().max()
        assert bool(off <= limit), f"tokens of rank {rank} came back wrong, off by {float(off):g}"
        rows += int(counts_T.sum())
    return rows / layer.case.ranks


def sum_expert_rows(layer: PlayedLayer, receipts: list[Receipt], rank: int) -> Tensor:
    order = receipts[rank].order
    y_RD = layer.expert_rows(len(order.index_R))
    return layer.kernels[sum_rows](y_RD, order.index_R, order.slots_NK, order.holes)


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


def host_seconds(layer: PlayedLayer, receipts: list[Receipt], repeat: int) -> float:
    """Of one rank: plan, dispatch and combine, on a thread that has run them before, in its own turns alone. The device
    has nothing to do when a forward begins, so that no launch waits for room in its queue. All threads are on one core:
    a rank of its own finds in its caches what its last forward has left there."""
    order = layer.order

    def forwards(rank: int) -> list[float]:
        seconds: list[float] = []
        stay_on_first_core()
        for _ in range(COLD_FORWARDS + repeat):
            synchronize_device(layer.device.type)
            begun = order.seconds_so_far(rank)
            layer.dispatch(rank)
            layer.combine(receipts, rank)
            seconds.append(order.seconds_so_far(rank) - begun)
        return seconds[COLD_FORWARDS:]

    of_ranks = layer.play(forwards)
    return median([mean(each) for each in zip(*of_ranks, strict=True)])


def print_dispatch_table(report: Report) -> None:
    title = f"the symmetric dispatcher, ranks played: {report_heading(report)}"
    caption = f"shares are of the bandwidth of a copy, {report['copy_gb_s']:.0f} GB/s read plus written"
    table = report_table(title, caption=caption)
    add_number_columns(table, "ranks", "width", "Zipf", "MB", "dispatch ms", "share", "combine ms", "share")
    add_number_columns(table, "row sums ms", "launches", "host us")
    for row in report["results"]:
        case = [
            str(row["ranks"]),
            str(row["hidden"]),
            f"{row['zipf']:g}",
            f"{row['mb']:.1f}",
        ]
        dispatch = [f"{row['dispatch_ms']:.3f}", f"{row['dispatch_share']:.1%}"]
        combine = [f"{row['combine_ms']:.3f}", f"{row['combine_share']:.1%}"]
        rest = [f"{row['row_sums_ms']:.3f}", f"{row['launches']:.0f}", f"{row['host_us']:.0f}"]
        table.add_row(*case, *dispatch, *combine, *rest)
    Console().print(table)
