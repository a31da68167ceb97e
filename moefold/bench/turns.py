"""`moefold bench turns`: training steps of small models on a CPU, by moefold, with and without a tape and with one that
two processes replay, and by transformers with each of its implementations of experts, in turns.

All of them train in fp32 with fused AdamW on batches of the same size: the preset's own, as one microbatch. The median
turn counts. A contender whose first step takes far longer than the fastest before it leaves. Beside the time by the
wall stands the time of all threads, a helper's too, which tells less of what else a machine does, and the pages that a
step had to be given.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from moefold.bench.machine import machine_facts
from moefold.bench.options import TurnsOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import random_tokens, run_on_random_tokens, transformers_model, transformers_update
from moefold.bench.versions import installed_version
from moefold.config.run import Config
from moefold.memory.shared_replay import HELPERS
from moefold.presets.zoo import PRESETS
from moefold.train.step import take_next_step

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")  # of experts in transformers
WARM_UP_STEPS = 16  # the fourth is recorded; five replays are timed, and some tried by one process and by two
OURS = {
    "moefold": {"tape": False, "tape_processes": 1},
    "tape": {"tape": True, "tape_processes": 1},
    "two processes": {"tape": True, "tape_processes": 2},
}
CPU_TIME = 2  # the kind of clock that Linux has for the CPU time of a process, in the lowest bits of its number
LONGEST_FIRST_STEP = 10.0  # times the fastest first step before it
CAPTION = """median turn, a step: forward, backward, clipping, update. wall: milliseconds. cpu: milliseconds of all
threads. pages: given to the process. times: wall and cpu of transformers' fastest over this."""


class StepCost(NamedTuple):
    wall_ms: float
    cpu_ms: float
    pages: float


TakeStep = Callable[[], Any]
Contenders = dict[str, TakeStep]


def run_benchmark(options: TurnsOptions) -> int:
    report = turns_report(options)
    return show_report(report, options.json, print_turns_report)


def turns_report(options: TurnsOptions) -> Report:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads or threads_before)
    try:
        results = [row_of_model(name, options) for name in options.model]
    finally:
        torch.set_num_threads(threads_before)
    return machine_facts("cpu") | {"results": results}


def row_of_model(name: str, options: TurnsOptions) -> Row:
    config = turns_config(name)
    costs = cost_in_turns(make_contenders(config, options), options)
    row: Row = {"model": name, "threads": torch.get_num_threads(), "load": os.getloadavg()[0]}
    row["costs"] = {contender: cost._asdict() for contender, cost in costs.items()}
    row["times"] = times_faster(costs)
    tell_progress(f"{name}: {row['times']}")
    return row


def turns_config(name: str) -> Config:
    config = PRESETS[name]()
    batch = config.train.global_batch
    train = replace(config.train, device="cpu", micro_batch=batch, steps=100_000)
    return replace(config, train=train)


def make_contenders(config: Config, options: TurnsOptions) -> Contenders:
    steps = options.turns * (options.steps + 1) + WARM_UP_STEPS
    contenders: Contenders = {}
    for name, choices in OURS.items():
        memory = replace(config.memory, **choices)
        run = run_on_random_tokens(replace(config, memory=memory), steps + 1)
        contenders[name] = partial(take_next_step, run)
    if installed_version("transformers"):
        contenders |= steps_of_transformers(config)
    return contenders


def steps_of_transformers(config: Config) -> Contenders:
    model = transformers_model(config)
    train_on = transformers_update(model, config)
    context = random_tokens(config, 1)[:-1]
    ids_BS = torch.from_numpy(context.astype(np.int64)).view(config.train.global_batch, -1)

    def take_step(implementation: str) -> float:
        model.set_experts_implementation(implementation)
        return train_on(ids_BS).item()

    return {name: partial(take_step, name) for name in IMPLEMENTATIONS}


def cost_in_turns(contenders: Contenders, options: TurnsOptions) -> dict[str, StepCost]:
    contenders = warm_contenders(contenders)
    turns: dict[str, list[StepCost]] = {name: [] for name in contenders}
    for _ in range(options.turns):
        for name, take_step in contenders.items():
            take_step()  # brings back to the caches what the others drove out
            turns[name].append(cost_of_steps(take_step, options.steps))
    return {name: median_cost(costs) for name, costs in turns.items()}


def warm_contenders(contenders: Contenders) -> Contenders:
    """The contenders that stay, warm. moefold and the eager experts come first, so that there is a fastest step."""
    staying: Contenders = {}
    fastest = math.inf
    for name, take_step in contenders.items():
        first = cost_of_steps(take_step, 1).cpu_ms
        fastest = min(fastest, first)
        if first > LONGEST_FIRST_STEP * fastest:
            tell_progress(
                f"{name} leaves: its first step takes {first:,.0f} ms of CPU time, the fastest {fastest:,.0f}"
            )
            continue
        staying[name] = take_step
        for _ in range(WARM_UP_STEPS - 1):
            take_step()
    return staying


def cost_of_steps(take_step: TakeStep, steps: int) -> StepCost:
    pages = pages_given()
    cpu = cpu_seconds()
    wall = time.perf_counter()
    for _ in range(steps):
        take_step()
    wall = time.perf_counter() - wall
    cpu = cpu_seconds() - cpu
    pages = pages_given() - pages
    return StepCost(wall / steps * 1e3, cpu / steps * 1e3, pages / steps)


def cpu_seconds() -> float:
    """Of this process and of its helpers."""
    return time.process_time() + sum(map(cpu_seconds_of, HELPERS))


def cpu_seconds_of(process: int) -> float:
    """The CPU time of another process. The number of its clock has the process in the bits above the kind."""
    return time.clock_gettime(~process << 3 | CPU_TIME)


def pages_given() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def median_cost(costs: list[StepCost]) -> StepCost:
    return StepCost(*map(median, zip(*costs, strict=True)))


def times_faster(costs: dict[str, StepCost]) -> dict[str, tuple[float, float]]:
    """How often moefold's steps fit into one of transformers' fastest, by wall and by CPU time."""
    theirs = [cost for name, cost in costs.items() if name in IMPLEMENTATIONS]
    if not theirs:
        return {}
    wall = min(cost.wall_ms for cost in theirs)
    cpu = min(cost.cpu_ms for cost in theirs)
    ours = {name: cost for name, cost in costs.items() if name not in IMPLEMENTATIONS}
    return {name: (wall / cost.wall_ms, cpu / cost.cpu_ms) for name, cost in ours.items()}


def print_turns_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=CAPTION)
    table.add_column("model, contender", no_wrap=True)
    add_number_columns(table, "wall", "cpu", "pages", "times wall", "times cpu")
    for row in report["results"]:
        table.add_row(row["model"])
        table.add_row(f"threads {row['threads']}, load {row['load']:.1f}")
        for name, cost in row["costs"].items():
            times = [f"{value:.2f}" for value in row["times"].get(name, ())]
            table.add_row(f"  {name}", *cost_cells(cost), *times)
    Console().print(table)


def cost_cells(cost: Row) -> list[str]:
    return [f"{cost['wall_ms']:.1f}", f"{cost['cpu_ms']:.1f}", f"{cost['pages']:.0f}"]
