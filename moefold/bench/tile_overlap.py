"""`moefold bench overlap --device cuda`: how much of what travels hides inside the two products of experts, on one GPU.

One process plays the ranks, side by side: each has its share of the processors and a stream, and its kernel sends to
the others, waits for their pieces and multiplies, as on a GPU of its own. All share the bandwidth of the card's memory,
which takes the place of links. A pause keeps the streams until all kernels have been launched. Times are those of
clocks inside the kernels:

    first product     exposed: what its programs wait for pieces, on average
    second product    exposed: what its programs sum and send behind the end of the rank's last tile, on average
    hidden            1 - exposed / sending
    apart             sending and multiplying one behind the other, each rank for itself, both with all processors

What is sent takes as long as from the first piece's begin to the last one's end; in the second product, as long as the
programs sum and send for other ranks, without their waits, on average. Programs that have no tile left sum too, and so
few senders leave most sums to the end. Results must have the same bits in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from statistics import mean
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from moefold.bench.concurrent_ranks import (
    GIVEN,
    MILLISECOND,
    ConcurrentRanks,
    TileRun,
    records_of,
    span_of,
    used_lines,
)
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device, synchronize_device
from moefold.bench.options import DispatchOptions, OverlapOptions
from moefold.bench.played_layer import LAYER_SIZES, DispatchCase, LayerSizes, PlayedLayer, draw_expert_weights
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.config.errors import UserError
from moefold.dispatch.base import Receipt
from moefold.dispatch.device_arena import DeviceArena
from moefold.dispatch.symmetric import ArenaDispatcher
from moefold.dispatch.tiled_experts import TiledExperts, way_of
from moefold.kernels.bound import BoundKernels
from moefold.kernels.routing.arrival_pieces import TileRecords

LEAST_COLUMNS = 128  # of a tile
LEAST_TILE_ROWS = 128
RANKS = 4
Work = Callable[[int], Tensor]  # of a rank
ReadFigures = Callable[[list[TileRecords]], "ProductFigures"]


class ProductFigures(NamedTuple):
    """Nanoseconds: of all, of what is sent, and of what of it is exposed."""

    whole: float
    sending: float
    exposed: float

    @property
    def hidden(self) -> float:
        return 1 - self.exposed / max(self.sending, 1)


def first_figures(records: list[TileRecords], programs: int) -> ProductFigures:
    """Of the product whose rows arrive; `programs` of each rank."""
    begin, end = span_of([record.pieces_P3 for record in records])
    waited: list[float] = []
    ends: list[int] = []
    for record in records:
        begun_M, ready_M, ended_M = used_lines(record.tiles_M3).unbind(1)
        waits_M = ready_M - begun_M
        waited.append(int(waits_M.sum()) / programs)
        ends.append(int(ended_M.max()))
    return ProductFigures(max(end, *ends) - begin, end - begin, mean(waited))


def second_figures(records: list[TileRecords], programs: int) -> ProductFigures:
    """Of the product whose results are summed and sent; `programs` of each rank. A rank's own pieces, which come last,
    are not sent."""
    sending: list[float] = []
    exposed: list[float] = []
    own = len(records[0].pieces_P3) // len(records)
    for record in records:
        sent_P3 = used_lines(record.pieces_P3[:-own])
        _, ready_P, ended_P = sent_P3.unbind(1)
        last_tile = used_lines(record.tiles_M3)[:, 2].max()
        sums_P = ended_P - ready_P
        late_P = ended_P - ready_P.clamp(min=last_tile)
        sending.append(int(sums_P.sum()) / programs)
        exposed.append(int(late_P.clamp(min=0).sum()) / programs)
    first, _ = span_of([record.tiles_M3 for record in records])
    _, last = span_of([record.pieces_P3 for record in records])
    return ProductFigures(last - first, mean(sending), mean(exposed))


def with_tiles(dispatcher: ArenaDispatcher, kernels: BoundKernels) -> TiledExperts:
    return TiledExperts(dispatcher.arena, dispatcher.row_policy, kernels, dispatcher.etp, dispatcher.rows)


class PlayedTiles:
    """The middle of a layer on all ranks: tokens, plans, weights, and one product at a time."""

    def __init__(self, layer: PlayedLayer, ffn: int):
        self.layer = layer
        self.ffn = ffn
        self.device = layer.device
        self.experts = [with_tiles(dispatcher, layer.kernels) for dispatcher in layer.dispatchers]
        self.weights = [draw_expert_weights(layer, ffn, rank) for rank in range(layer.case.ranks)]
        self.plans: list[Receipt] = layer.play(self.plan)

    def plan(self, rank: int) -> Receipt:
        return self.experts[rank].plan(self.layer.routings[rank])

    def multiply(self, rank: int) -> Tensor:
        """The activation, without rows that no expert has."""
        way = way_of(self.plans[rank])
        arrived = self.experts[rank].multiply(self.layer.h_TD, self.weights[rank].gate_up_E2FD, way)
        return arrived.a_RF

    def give_back(self, activations: list[Tensor], rank: int) -> Tensor:
        way = way_of(self.plans[rank])
        return self.experts[rank].return_results(activations[rank], self.weights[rank].down_EDF, way)

    def defined_rows(self, rank: int, result: Tensor) -> int:
        """Rows of a result without those that no expert has."""
        order = self.plans[rank].order
        return int(order.ends_e[-1]) if len(result) == len(order.index_R) else len(result)

    @cached_property
    def at_once(self) -> ConcurrentRanks:
        return ConcurrentRanks([self.arena(rank) for rank in range(len(self.experts))])

    def arena(self, rank: int) -> DeviceArena:
        return self.experts[rank].arena.arena  # pyright: ignore[reportAttributeAccessIssue]

    def set_signals(self, run: TileRun) -> list[TileRecords]:
        """Signals for every rank, with records."""
        lines = [(self.most_tiles(rank), len(way_of(plan).pieces.ends_P)) for rank, plan in enumerate(self.plans)]
        signals = self.at_once.signals(run, lines)
        for experts, each in zip(self.experts, signals, strict=True):
            experts.signals = each
        return records_of(signals)

    def most_tiles(self, rank: int) -> int:
        rows = len(self.plans[rank].order.index_R)
        held = self.layer.dispatchers[rank].row_policy.held
        tile_rows = rows // LEAST_TILE_ROWS + held
        widest = max(self.ffn, self.layer.case.hidden)
        return tile_rows * -(-widest // LEAST_COLUMNS)

    def run_apart(self, work: Work, run: TileRun) -> tuple[list[Tensor], list[TileRecords]]:
        """One rank behind the other in each part of the exchange."""
        records = self.set_signals(run)
        results = self.layer.play(work)
        synchronize_device(self.device.type)
        return results, records

    def run_together(self, work: Work, run: TileRun) -> tuple[list[Tensor], list[TileRecords]]:
        """All ranks at once, each on its stream."""
        records = self.set_signals(run)

        def work_at_once(rank: int) -> Tensor:
            with self.without_turns(rank):
                return work(rank)

        results = self.at_once.launch_together(work_at_once)
        return results, records

    @contextmanager
    def without_turns(self, rank: int) -> Iterator[None]:
        """An exchange ends without a turn for the next rank: all run at once."""
        experts = self.experts[rank]
        before = experts.end_exchange
        experts.end_exchange = self.arena(rank).exchange
        try:
            yield
        finally:
            experts.end_exchange = before

    def warm_up(self, work: Work, run: TileRun) -> None:
        """Compile and load what runs together, one rank behind the other: with all flags given none waits."""
        self.at_once.fill_flags(GIVEN)
        self.set_signals(run)
        for rank in range(len(self.experts)):
            with self.without_turns(rank):
                work(rank)
            synchronize_device(self.device.type)
        self.at_once.fill_flags(0)


def run_tile_benchmark(options: OverlapOptions) -> int:
    device = resolve_device("cuda")
    report: Report = machine_facts(device)
    report["results"] = []
    for name, sizes in LAYER_SIZES.items():
        report["results"] += measure_layer(options, name, sizes, device)
        free_device_memory(device)
    return show_report(report, options.json, print_tile_table)


def measure_layer(options: OverlapOptions, name: str, sizes: LayerSizes, device: str) -> list[Row]:
    of_layer = DispatchOptions(ranks=(RANKS,), hidden=(sizes.hidden,))
    case = DispatchCase(RANKS, sizes.hidden, options.zipf)
    played = PlayedTiles(PlayedLayer(of_layer, case, device), sizes.ffn)
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    share = processors // RANKS
    rows: list[Row] = []
    for senders in options.senders:
        if senders >= share:
            raise UserError(f"--senders {senders}, but a rank has {share} of {processors} processors; such as 4 and 8")
        together = TileRun(share, senders, apart=False)
        apart = TileRun(processors, processors - 1, apart=True)
        for product, figures in measure_products(played, together, apart, options.repeat):
            rows.append({"layer": name, "senders": senders, "product": product, **figures})
            tell_progress(f"{name}, {product} product, {senders} senders: {figures['hidden']:.0%} hidden")
    return rows


def measure_products(played: PlayedTiles, together: TileRun, apart: TileRun, repeat: int) -> Iterator[tuple[str, Row]]:
    """For the first product and the second: figures of the repetition of least time."""
    activations, apart_seconds = measure_apart(played, played.multiply, apart)
    first = partial(first_figures, programs=together.programs)
    yield "first", measure_together(played, played.multiply, together, repeat, activations, first, apart_seconds)
    give_back = partial(played.give_back, activations)
    results, apart_seconds = measure_apart(played, give_back, apart)
    second = partial(second_figures, programs=together.programs)
    yield "second", measure_together(played, give_back, together, repeat, results, second, apart_seconds)


def measure_apart(played: PlayedTiles, work: Work, run: TileRun) -> tuple[list[Tensor], float]:
    """Results of all ranks, and nanoseconds of all parts, of the second of two runs: the first compiles."""
    played.run_apart(work, run)
    results, records = played.run_apart(work, run)
    total = 0
    for record in records:
        for times in (record.pieces_P3, record.tiles_M3):
            begin, end = span_of([times])
            total += end - begin
    return results, total


def measure_together(
    played: PlayedTiles,
    work: Work,
    run: TileRun,
    repeat: int,
    expected: list[Tensor],
    read_figures: ReadFigures,
    apart: float,
) -> Row:
    played.warm_up(work, run)
    best: ProductFigures | None = None
    for _ in range(repeat):
        results, records = played.run_together(work, run)
        require_same_bits(played, results, expected)
        figures = read_figures(records)
        if best is None or figures.whole < best.whole:
            best = figures
    assert best is not None, "at least one repetition"
    return {
        "together_ms": best.whole / MILLISECOND,
        "apart_ms": apart / MILLISECOND,
        "sending_ms": best.sending / MILLISECOND,
        "exposed_ms": best.exposed / MILLISECOND,
        "hidden": best.hidden,
    }


def require_same_bits(played: PlayedTiles, results: list[Tensor], expected: list[Tensor]) -> None:
    """Results do not depend on what arrives first. Rows behind the last expert's are undefined."""
    for rank, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        rows = played.defined_rows(rank, wanted)
        assert torch.equal(found[:rows], wanted[:rows]), f"rank {rank} has other bits than with all rows there"


def print_tile_table(report: Report) -> None:
    title = f"tiles inside exchanges, {RANKS} ranks played: {report_heading(report)}"
    table = report_table(title, "layer", "product", caption="ms by clocks inside the kernels")
    add_number_columns(table, "senders", "apart", "together", "sending", "exposed", "hidden")
    for row in report["results"]:
        times = [f"{row[name]:.3f}" for name in ("apart_ms", "together_ms", "sending_ms", "exposed_ms")]
        table.add_row(row["layer"], row["product"], str(row["senders"]), *times, f"{row['hidden']:.1%}")
    Console().print(table)
