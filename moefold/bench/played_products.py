"""Dense products inside exchanges on one GPU, in `moefold bench overlap --device cuda`: how much of what travels
between ranks hides inside a product.

One process plays the ranks, side by side (bench/concurrent_ranks.py); all share the bandwidth of the card's memory,
which takes the place of links. Times are those of clocks inside the kernels, of the same programs:

    exchange    what travels alone: rows that are sent, or tiles that are sent and summed or copied
    product     the product alone, with everything there, its results written to memory of the rank
    together    both in one kernel
    waited      what a program waits for rows or tiles of others, on average
    hidden      1 - waited / exchange
    gained      1 - (together - product) / exchange: what programs send, sum and copy keeps them from multiplying
    apart       torch's product and plain copies and sums, one behind the other, each rank for itself with all
                processors

Results must have the same bits twice, and be those of a product in fp32, as near as bf16 is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from statistics import mean
from typing import Generic, NamedTuple, TypeVar

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
from moefold.bench.machine import cuda_capability, free_device_memory, machine_facts, resolve_device
from moefold.bench.options import OverlapOptions
from moefold.bench.played_ranks import TurnOrder, play_ranks, played_arenas
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
from moefold.dispatch.device_arena import DeviceArena
from moefold.dispatch.tiled_products import ArenaProducts
from moefold.kernels.bound import BoundKernels
from moefold.kernels.facts import Facts
from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.routing.arrival_pieces import TileRecords

RANKS, TOKENS = 4, 4096
NEARNESS = 0.02  # of the largest value
Launch = Callable[[int], None]  # of a rank
Work = Callable[[int], list[Tensor]]  # of a rank
P = TypeVar("P", bound=ArenaProducts)


class ProjectionSizes(NamedTuple):
    """Of all ranks: width of the stream, outputs of queries, keys and values, and inputs of the projection back."""

    hidden: int
    heads: tuple[int, ...]
    joined: int


PROJECTION_SIZES = {
    "qwen3-30b": ProjectionSizes(2048, (4096, 512, 512), 4096),
    "7168 wide": ProjectionSizes(7168, (8192, 1024, 1024), 8192),
}


class PlayedSetting(NamedTuple):
    """What is played: on which device, in which type, with how many tokens of each of so many ranks."""

    device: torch.device
    dtype: torch.dtype
    tokens: int
    ranks: int = RANKS


class OverlapFigures(NamedTuple):
    """Nanoseconds."""

    exchange: float
    product: float
    together: float
    waited: float

    @property
    def hidden(self) -> float:
        return 1 - self.waited / max(self.exchange, 1)

    @property
    def gained(self) -> float:
        return 1 - (self.together - self.product) / max(self.exchange, 1)


class PlayedProducts(Generic[P]):
    """Products of all ranks over their arenas, and one launch of all at a time."""

    def __init__(self, kind: type[P], sizes: ProjectionSizes, setting: PlayedSetting, flags: int, room_numbers: int):
        self.sizes = sizes
        self.device, self.dtype, tokens, self.ranks = setting
        self.shards = (tokens,) * self.ranks
        self.order = TurnOrder(self.ranks)
        self.flags = flags
        room_bytes = room_numbers * self.dtype.itemsize
        self.arenas = played_arenas(self.ranks, room_bytes, self.device, self.order, 0, flags, signals=True)
        self.at_once = ConcurrentRanks([self.arena(rank) for rank in range(self.ranks)])
        facts = Facts(self.device.type, "bf16", cuda_capability(self.device.type), hidden=sizes.hidden)
        kernels = BoundKernels(facts)
        self.products = [kind(arena, kernels, None, flags) for arena in self.arenas]

    def drawn(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        random = torch.Generator(self.device).manual_seed(seed)
        numbers = torch.randn(*shape, generator=random, device=self.device) * scale
        return numbers.to(self.dtype)

    def arena(self, rank: int) -> DeviceArena:
        return self.arenas[rank].arena  # pyright: ignore[reportReturnType]

    def exchange(self, rank: int) -> ProductExchange:
        return self.products[rank].exchange("nothing", self.shards)

    def rows_of(self, rank: int) -> slice:
        return self.exchange(rank).rows_of(rank)

    def set_signals(self, programs: int, senders: int, apart: bool = False) -> list[TileRecords]:
        """Signals for every rank, with records."""
        lines = self.ranks * self.flags * 4
        signals = self.at_once.signals(TileRun(programs, senders, apart), [(lines, lines)] * self.ranks)
        for products, each in zip(self.products, signals, strict=True):
            products.signals = each
        return records_of(signals)

    def play(self, work: Work) -> list[list[Tensor]]:
        return play_ranks(work, self.ranks, self.order)

    def run_together(self, work: Work, flags: int) -> list[list[Tensor]]:
        """Whole exchanges of all ranks, with their results."""
        self.at_once.fill_flags(flags)
        return self.at_once.launch_together(partial(self.work_without_turns, work))

    def work_without_turns(self, work: Work, rank: int) -> list[Tensor]:
        """An exchange ends without a turn for the next rank: all run at once."""
        products = self.products[rank]
        products.arena = self.arena(rank)
        try:
            return work(rank)
        finally:
            products.arena = self.arenas[rank]

    def least_span(self, run: TileRun, repeat: int, launch: Launch, flags: int) -> float:
        """Nanoseconds from the first begin to the last end. The first of all runs compiles: no tile waits there."""
        spans: list[int] = []
        for number in range(repeat + 1):
            records = self.set_signals(run.programs, run.senders)
            self.at_once.fill_flags(flags if number else GIVEN)
            self.at_once.launch_together(launch)
            spans.append(span_of_records(records))
        return min(spans[1:])

    def measure_together(
        self, work: Work, run: TileRun, repeat: int, exchange: float, product: float
    ) -> OverlapFigures:
        self.set_signals(run.programs, run.senders)
        self.run_together(work, GIVEN)  # compiles
        figures: list[OverlapFigures] = []
        first: list[list[Tensor]] = []
        for _ in range(repeat):
            records = self.set_signals(run.programs, run.senders)
            results = self.run_together(work, 0)
            first = first or results
            require_same_bits(results, first)
            waited = mean(waits_of(record) / run.programs for record in records)
            figures.append(OverlapFigures(exchange, product, span_of_records(records), waited))
        return min(figures, key=attrgetter("together"))


def span_of_records(records: list[TileRecords]) -> int:
    begin, end = span_of([times for record in records for times in (record.tiles_M3, record.pieces_P3)])
    return end - begin


def waits_of(record: TileRecords) -> int:
    begun_M, ready_M, _ = used_lines(record.tiles_M3).unbind(1)
    return int((ready_M - begun_M).sum())


def require_same_bits(results: list[list[Tensor]], first: list[list[Tensor]]) -> None:
    for found, before in zip(results, first, strict=True):
        assert all(map(torch.equal, found, before)), "two runs have other bits"


def require_near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for each, right in zip(found, wanted, strict=True):
        off = (each.float() - right).abs().max() / right.abs().max()
        assert off < NEARNESS, f"{off:.4f} of the largest value off"


def least_time(work: Callable[[], None], repeat: int) -> float:
    """Nanoseconds."""
    work()
    times: list[float] = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * MILLISECOND)
    return min(times)


MeasurePair = Callable[[OverlapOptions, str, ProjectionSizes, PlayedSetting, int], Iterator[Row]]


def run_product_benchmark(options: OverlapOptions, measure_pair: MeasurePair) -> int:
    """A row for each number of senders of the product whose rows arrive, and one of the product whose results leave, in
    which all programs send."""
    device = resolve_device("cuda")
    programs = torch.cuda.get_device_properties(device).multi_processor_count // RANKS
    require_some_multiply(options.senders, programs)
    setting = PlayedSetting(torch.device(device), torch.bfloat16, TOKENS)
    report: Report = machine_facts(device)
    report["results"] = []
    for name, sizes in PROJECTION_SIZES.items():
        for row in measure_pair(options, name, sizes, setting, programs):
            report["results"].append(row)
            tell_progress(f"{name}, {row['product']}, {row['senders']} senders: {row['hidden']:.0%} hidden")
        free_device_memory(device)
    return show_report(report, options.json, print_product_table)


def require_some_multiply(senders: tuple[int, ...], programs: int) -> None:
    most = max(senders)
    if most >= programs:
        raise UserError(f"--senders {most}, but a rank has {programs} processors; such as 4 and 8")


def figure_row(name: str, product: str, senders: int, figures: OverlapFigures, apart: float) -> Row:
    times = {f"{key}_ms": value / MILLISECOND for key, value in figures._asdict().items()}
    shares = {"hidden": figures.hidden, "gained": figures.gained}
    about = {"layer": name, "product": product, "senders": senders}
    return {**about, **times, "apart_ms": apart / MILLISECOND, **shares}


def print_product_table(report: Report) -> None:
    title = f"projections inside exchanges, {RANKS} ranks played: {report_heading(report)}"
    table = report_table(title, "layer", "product", caption="ms by clocks inside the kernels; apart: torch")
    columns = ("apart", "together", "exchange", "product", "waited")
    add_number_columns(table, "senders", *columns, "hidden", "gained")
    for row in report["results"]:
        times = [f"{row[f'{column}_ms']:.3f}" for column in columns]
        shares = [f"{row[share]:.1%}" for share in ("hidden", "gained")]
        table.add_row(row["layer"], row["product"], str(row["senders"]), *times, *shares)
    Console().print(table)
