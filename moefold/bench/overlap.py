"""`moefold bench overlap`: how much of the experts' communication hides behind compute, on two CPU ranks. With
`--device cuda`: inside products, on one GPU, of experts (bench/tile_overlap.py) or of projections around attention
(bench/projection_overlap.py, bench/head_overlap.py).

Each all-to-all of rows is slowed, as on a slow network: it takes a given time for all rows of a microbatch, and a part
of it for a part of them. With `--experts-ms` the model is narrow and its experts are slowed too, so that they compute
for a known time. The variants of a step are measured in one run: one microbatch after the other; the same with shared
experts, which compute beside the all-to-all of their own microbatch; in row chunks, of which one computes while another
is sent; a forward paired with a backward; two forwards, and two backwards, paired; and a forward with a backward whose
weight gradients are split off to fill gaps. All send the same rows. Exposed time is the part of all-to-alls of rows in
which the compute lane waits or runs them itself.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from rich.console import Console

from moefold.bench.clock import wall_clock_seconds
from moefold.bench.head_overlap import run_head_benchmark
from moefold.bench.options import OverlapOptions
from moefold.bench.projection_overlap import run_projection_benchmark
from moefold.bench.report import add_number_columns, report_table, show_report
from moefold.bench.tile_overlap import run_tile_benchmark
from moefold.comm import collectives
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.layout.axes import World
from moefold.layout.process_groups import joined_world
from moefold.layout.spawn import run_local_ranks
from moefold.model.steps import PassKey, PassKind, Step
from moefold.observe.trace import SpanRecorder, TraceEvent, write_trace
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import assemble_run
from moefold.train.parity import random_corpus
from moefold.train.step import take_next_step

RANKS = 2
BASELINE = "one after the other"


class OverlapWay(NamedTuple):
    """A variant: how the microbatches run, the width of shared experts, and the row chunks."""

    pipeline: PipelineConfig
    shared_ffn: int = 0
    row_chunks: int = 1

    def changed(self, config: Config) -> Config:
        model = config.model
        moe = replace(model.moe, shared_ffn=self.shared_ffn)
        model = replace(model, moe=moe)
        parallel = replace(config.parallel, row_chunks=self.row_chunks)
        return replace(config, model=model, parallel=parallel, pipeline=self.pipeline)


OVERLAP_WAYS = {
    BASELINE: OverlapWay(PipelineConfig()),
    "one after the other, with shared experts": OverlapWay(PipelineConfig(), shared_ffn=512),
    "one after the other, 4 row chunks": OverlapWay(PipelineConfig(), row_chunks=4),
    "one after the other, 4 row chunks, with shared experts": OverlapWay(
        PipelineConfig(), shared_ffn=512, row_chunks=4
    ),
    "paired": OverlapWay(PipelineConfig(pair=True, fill=False)),
    "two forwards, two backwards paired": OverlapWay(PipelineConfig(pair=True, pairs="alike", fill=False)),
    "paired, weight gradients fill gaps": OverlapWay(PipelineConfig(pair=True)),
}
RUN_ON_GPU = {"experts": run_tile_benchmark, "projections": run_projection_benchmark, "heads": run_head_benchmark}
EXPERT_STEPS = ("shared", "experts")
Seconds = dict[str, float]  # step, experts and exposed; in a summary also hidden, a share
RankFigures = dict[str, Any]  # a rank's `ways` (seconds by variant) and `events` (of the last variant)
Measured = tuple[Seconds, list[TraceEvent]]


def run_benchmark(options: OverlapOptions) -> int:
    if options.found:  # this process is one of the ranks
        measure_every_way(options, options.found)
        return 0
    if options.device == "cuda":
        return RUN_ON_GPU[options.products](options)
    with tempfile.TemporaryDirectory(prefix="moefold-overlap-") as folder:
        arguments = rank_arguments(options, folder)
        if code := run_local_ranks(arguments, RANKS):
            return code
        read = partial(read_rank_figures, Path(folder))
        figures = list(map(read, range(RANKS)))
    summary = overlap_summary(figures)
    print_table = partial(print_overlap_table, options)
    show_report(summary, options.json, print_table)
    if options.trace:
        written = chain.from_iterable(rank["events"] for rank in figures)
        events = [TraceEvent(**event) for event in written]
        write_trace(options.trace, events)
    return 0


def rank_arguments(options: OverlapOptions, folder: str) -> list[str]:
    arguments = ["bench", "overlap"]
    arguments += ["--delay-ms", str(options.delay_ms)]
    arguments += ["--experts-ms", str(options.experts_ms)]
    arguments += ["--microbatches", str(options.microbatches)]
    arguments += ["--found", folder]
    return arguments


def read_rank_figures(folder: Path, rank: int) -> RankFigures:
    path = folder / f"{rank}.json"
    return json.loads(path.read_text())


def overlap_summary(figures: list[RankFigures]) -> dict[str, Seconds]:
    """Seconds of a step by variant, the mean over ranks; experts: those of shared and routed experts; hidden: share of
    the baseline's exposed time."""
    ways = [rank["ways"] for rank in figures]

    def mean_over_ranks(way: str, key: str) -> float:
        return mean(seconds[way][key] for seconds in ways)

    baseline = mean_over_ranks(BASELINE, "exposed")
    summary: dict[str, Seconds] = {}
    for way in OVERLAP_WAYS:
        step = mean_over_ranks(way, "step")
        exposed = mean_over_ranks(way, "exposed")
        experts = mean_over_ranks(way, "experts")
        hidden = 1 - exposed / max(baseline, 1e-9)
        summary[way] = {"step": step, "experts": experts, "exposed": exposed, "hidden": hidden}
    return summary


def print_overlap_table(options: OverlapOptions, summary: dict[str, Seconds]) -> None:
    title = f"{options.microbatches} microbatches, {options.delay_ms:g} ms an exchange, 2 CPU ranks; ms of one step"
    table = report_table(title, "way")
    add_number_columns(table, "step", "experts", "exposed", "hidden")
    for way, figures in summary.items():
        step = f"{1e3 * figures['step']:.0f}"
        experts = f"{1e3 * figures['experts']:.0f}"
        exposed = f"{1e3 * figures['exposed']:.0f}"
        hidden = f"{figures['hidden']:.1%}"
        table.add_row(way, step, experts, exposed, hidden)
    Console().print(table)


def overlap_config(microbatches: int, is_narrow: bool = False) -> Config:
    """A small run on two ranks. The experts of the wide one take longer than an all-to-all; the narrow one leaves the
    processors to what slows it."""
    config = PRESETS["tiny"]()
    batch = RANKS * microbatches
    cpu = replace(config.train, device="cpu", precision="fp32")
    train = replace(cpu, global_batch=batch, micro_batch=1)
    parallel = ParallelConfig(ep=RANKS, dispatcher="all_to_all")
    width, length = (32, 64) if is_narrow else (256, 512)
    model = replace(config.model, layers=2, hidden=width)
    data = replace(config.data, seq_len=length)
    on_two_ranks = replace(config, train=train, parallel=parallel)
    return replace(on_two_ranks, model=model, data=data)


def measure_every_way(options: OverlapOptions, folder: Path) -> None:
    """The figures of this rank, written to `folder`."""
    torch.set_num_threads(1)
    experts = options.experts_ms / 1e3
    config = overlap_config(options.microbatches, is_narrow=experts > 0)
    delay = options.delay_ms / 1e3
    rows = config.data.seq_len * config.model.moe.top_k  # a microbatch is one sequence of a rank
    ways: dict[str, Seconds] = {}
    events: list[TraceEvent] = []
    with joined_world(config.parallel, "cpu") as world, slowed_all_to_all(delay, rows) as exchanges:
        for name, way in OVERLAP_WAYS.items():
            variant = way.changed(config)
            ways[name], events = measure_overlap(variant, world, exchanges, experts)
    figures: RankFigures = {"ways": ways, "events": from_zero(events)}
    path = folder / f"{world.rank}.json"
    path.write_text(json.dumps(figures))


def from_zero(events: list[TraceEvent]) -> list[dict[str, Any]]:
    """The events as objects of JSON; the first begins at 0."""
    origin = events[0].start if events else 0.0
    shifted = [event.shifted(-origin) for event in events]
    return list(map(asdict, shifted))


def measure_overlap(config: Config, world: World, exchanges: SpanRecorder, experts: float = 0.0) -> Measured:
    """Seconds of a step, of experts and of exposed all-to-all, after one step to warm up. `experts`: least seconds of a
    layer's experts in a pass of a microbatch."""
    corpus = random_corpus(config)
    run = assemble_run(config, world, Path("."), corpus)
    take_next_step(run)  # warm-up
    slowed = SlowedExperts(config, experts)
    exchanges.events.clear()
    spans = run.executor.spans
    spans.start_recording()
    with run.executor.observed_by(slowed):
        seconds = wall_clock_seconds(partial(take_next_step, run))
    events = sorted(spans.events, key=attrgetter("start"))
    waits: list[TraceEvent] = []
    work: list[TraceEvent] = []
    for event in events:
        is_wait = event.lane == "waiting"
        (waits if is_wait else work).append(event)
    exposed = 0
    for exchange in exchanges.events:
        exposed += exposed_seconds(exchange, waits)
    return {"step": seconds, "experts": slowed.spent, "exposed": exposed}, work


class SlowedExperts:
    """An observer that makes a layer's shared and routed experts take at least so many `seconds` together in each pass,
    half of it each where there are both; a row chunk takes its share. `spent`: seconds of all of them."""

    def __init__(self, config: Config, seconds: float):
        has_both = config.model.moe.shared_ffn > 0
        self.seconds = seconds / 2 if has_both else seconds
        self.spent = 0.0
        self.begun: dict[tuple[int, PassKind, PassKey], float] = {}

    def before(self, step: Step, kind: PassKind, key: PassKey) -> None:
        if step.spec.name in EXPERT_STEPS:
            of_pass = id(step), kind, key
            self.begun[of_pass] = time.time()

    def after(self, step: Step, kind: PassKind, key: PassKey) -> None:
        spec = step.spec
        if spec.name in EXPERT_STEPS:
            of_pass = id(step), kind, key
            begun = self.begun.pop(of_pass)
            end = begun + spec.share * self.seconds
            left = end - time.time()
            time.sleep(max(0.0, left))
            ended = time.time()
            self.spent += ended - begun


def exposed_seconds(exchange: TraceEvent, waits: Sequence[TraceEvent]) -> float:
    """Seconds of an all-to-all that no compute hides: all on the compute lane, beside it those that this lane waits."""
    if exchange.lane == "compute":
        return exchange.end - exchange.start
    exposed = 0.0
    for wait in waits:
        start = max(wait.start, exchange.start)
        end = min(wait.end, exchange.end)
        exposed += max(0.0, end - start)
    return exposed


@contextmanager
def slowed_all_to_all(seconds: float, whole: int = 0) -> Iterator[SpanRecorder]:
    """Makes every all-to-all of rows take at least `seconds`, or with `whole` as much of it as it sends or receives of
    so many rows; records each on the lane that runs it."""
    quick = collectives.all_to_all_no_grad
    main_thread = threading.main_thread()
    spans = SpanRecorder(0, recording=True)

    def slow_all_to_all(x: Any, send: Any, receive: Any, axis: Any, what: str = "rows") -> Any:
        begun = time.time()
        result = quick(x, send, receive, axis, what)
        if what != "rows":
            return result
        elapsed = time.time() - begun
        share = max(len(x), len(result)) / whole if whole else 1.0
        left = share * seconds - elapsed
        time.sleep(max(0.0, left))
        on_main = threading.current_thread() is main_thread
        lane = "compute" if on_main else "comm"
        event = TraceEvent(0, lane, "exchange", begun, time.time())
        spans.events.append(event)
        return result

    collectives.all_to_all_no_grad = slow_all_to_all
    try:
        yield spans
    finally:
        collectives.all_to_all_no_grad = quick
