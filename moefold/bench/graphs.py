"""`moefold bench graphs`: training steps as one CUDA graph, or with graphs of static steps, beside eager steps and
the time that the device is busy.

One run of each model and kind of graph serves all rows: batches are cut to the tokens of a row, and graphs are captured
anew for each.
Busy is the union of the kernels' intervals in an eager step, by torch's profiler: no launch takes part in it, so a step
cannot be shorter unless its kernels overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product

import torch
from rich.console import Console

from moefold.bench.clock import busy_milliseconds
from moefold.bench.machine import GIB, free_device_memory, machine_facts, resolve_device
from moefold.bench.options import GraphsOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import run_on_random_tokens, step_bench_config
from moefold.config.errors import UserError, all_of
from moefold.config.run import Config
from moefold.data.loader import Batch
from moefold.memory.graphs import WARM_UP_STEPS, make_step_graph
from moefold.train.assemble import Run
from moefold.train.host_duties import collect_garbage_manually
from moefold.train.step import train_step

MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b")
KINDS = ("whole", "static")
LONGEST = 4096
CAPTION = """milliseconds of whole steps: forward, backward, clipping, update. busy: kernels of an eager step.
over busy: graph / busy, and what it should be at most. times: eager / graph, and what it should be at least.
static: graphs of attention, routers, dense MLPs and shared experts; the rest is launched by the host."""
TakeStep = Callable[[], object]


@dataclass(frozen=True)
class GraphCase:
    """Microbatches of one sequence, and what a graph of the whole step should reach on an H200: step over busy time at
    most, or eager over graph at least, by model."""

    tokens: int
    microbatches: int = 1
    most_over_busy: float | None = None
    least_times: Mapping[str, float] = field(default_factory=dict[str, float])


CASES = (
    GraphCase(512, most_over_busy=1.10),
    GraphCase(2048, most_over_busy=1.05),
    GraphCase(4096, most_over_busy=1.05),
    GraphCase(2048, 8, least_times={"olmoe-1b-7b": 1.9, "qwen3-30b-a3b": 1.4}),
)
MOST_MICROBATCHES = max(case.microbatches for case in CASES)


@dataclass(frozen=True)
class GraphTiming:
    """Milliseconds of a step, and GiB of device memory at most."""

    eager: float
    busy: float
    graph: float
    peak_gib: float

    @property
    def over_busy(self) -> float:
        return self.graph / self.busy

    @property
    def times(self) -> float:
        return self.eager / self.graph


def run_benchmark(options: GraphsOptions) -> int:
    report = graphs_report(options)
    return show_report(report, options.json, print_graphs_report)


def graphs_report(options: GraphsOptions) -> Report:
    """Each row is printed when it is measured."""
    if resolve_device("auto") != "cuda":
        raise UserError("bench graphs: torch sees no CUDA device here; expected one, since CUDA graphs are measured")
    names = all_of("model", options.model, MODELS)
    kinds = all_of("kind of graphs", options.graphs, KINDS)
    cases = chosen_cases(options.tokens)
    results: list[Row] = []
    for name, kind in product(names or MODELS, kinds or KINDS):
        config = graphs_config(name, kind)
        run = run_on_random_tokens(config, 100)
        for case in cases:
            timing = time_case(run, case, options.steps)
            row = row_of(name, kind, case, timing)
            results.append(row)
            tell_progress(row_text(row))
        run.gradients.remove_hooks()
        del run
        free_device_memory("cuda")
    return machine_facts("cuda") | {"results": results}


def chosen_cases(tokens: tuple[int, ...]) -> list[GraphCase]:
    known = {case.tokens for case in CASES}
    for count in tokens:
        if count not in known:
            listed = ", ".join(map(str, sorted(known)))
            raise UserError(f"--tokens {count} is measured by no row; expected some of {listed}")
    wanted = tokens or known
    return [case for case in CASES if case.tokens in wanted]


def graphs_config(name: str, kind: str) -> Config:
    """The model of `moefold bench step`, with microbatches of one sequence whose gradients are summed in fp32."""
    config = step_bench_config(name, "cuda")
    train = replace(config.train, global_batch=MOST_MICROBATCHES, micro_batch=1)
    optim = replace(config.optim, gradients="fp32")
    data = replace(config.data, seq_len=LONGEST)
    memory = replace(config.memory, graphs=kind)
    return replace(config, train=train, optim=optim, data=data, memory=memory)


def time_case(run: Run, case: GraphCase, steps: int) -> GraphTiming:
    def take_step() -> object:
        whole = run.loader.next_batch()
        batch = cut_batch(whole, case)
        return train_step(run, batch)

    graphs = run.static_graphs
    run.graph = None
    run.static_graphs = None
    with collect_garbage_manually():
        eager = milliseconds_of_steps(take_step, steps)
        busy = busy_milliseconds(take_step, run.world.device)
        run.graph = make_step_graph(run.config, run.world)
        run.static_graphs = graphs
        torch.cuda.reset_peak_memory_stats()
        graph = milliseconds_of_steps(take_step, steps)
    peak = torch.cuda.max_memory_allocated()
    run.graph = None
    return GraphTiming(eager, busy, graph, peak / GIB)


def cut_batch(batch: Batch, case: GraphCase) -> Batch:
    part = slice(case.microbatches), slice(case.tokens)
    tokens_BS = batch.tokens_BS[part].contiguous()
    labels_BS = batch.labels_BS[part].contiguous()
    return replace(batch, tokens_BS=tokens_BS, labels_BS=labels_BS)


def milliseconds_of_steps(take_step: TakeStep, steps: int) -> float:
    """The mean of steps in a row, behind those that compile, tune and capture."""
    for _ in range(WARM_UP_STEPS + 2):
        take_step()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        take_step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    return seconds / steps * 1e3


def row_of(name: str, kind: str, case: GraphCase, timing: GraphTiming) -> Row:
    row: Row = {"model": name, "graphs": kind, "tokens": case.tokens}
    row["microbatches"] = case.microbatches
    row |= asdict(timing)
    row["over_busy"] = timing.over_busy
    row["times"] = timing.times
    has_goals = kind == "whole"
    row["most_over_busy"] = case.most_over_busy if has_goals else None
    row["least_times"] = case.least_times.get(name) if has_goals else None
    return row


def row_text(row: Row) -> str:
    what = f"{title_of(row)} tokens"
    figures = f"eager {row['eager']:.1f} ms, busy {row['busy']:.1f}, graph {row['graph']:.1f}"
    ratios = f"{row['over_busy']:.3f} over busy, {row['times']:.2f} times"
    return f"{what}: {figures}, {ratios}, peak {row['peak_gib']:.1f} GiB"


def title_of(row: Row) -> str:
    return f"{row['model']}, {row['graphs']}, {row['microbatches']} x {row['tokens']}"


def print_graphs_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=CAPTION)
    table.add_column("model, graphs, microbatches x tokens", no_wrap=True)
    add_number_columns(table, "eager", "busy", "graph", "over busy", "most", "times", "least", "GiB")
    for row in report["results"]:
        title = title_of(row)
        cells = [f"{row[name]:.1f}" for name in ("eager", "busy", "graph")]
        cells.append(f"{row['over_busy']:.3f}")
        cells.append(goal_text(row["most_over_busy"]))
        cells.append(f"{row['times']:.2f}")
        cells.append(goal_text(row["least_times"]))
        cells.append(f"{row['peak_gib']:.1f}")
        table.add_row(title, *cells)
    Console().print(table)


def goal_text(goal: float | None) -> str:
    return "" if goal is None else f"{goal:.2f}"
