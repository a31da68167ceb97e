"""`moefold bench transformers`: training steps of transformers' models with moefold inside, beside transformers' own.

All contenders train the same model with the same optimizer on the same tokens, in turns; the median turn counts.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import moefold.transformers
from moefold.bench.machine import free_device_memory, machine_facts, resolve_device, synchronize_device
from moefold.bench.options import TransformersOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import STEP_GOALS, step_bench_config, transformers_model, transformers_update
from moefold.config.errors import all_of
from moefold.config.run import Config

THEIRS = {"cpu": ("eager", "batched_mm", "grouped_mm"), "cuda": ("grouped_mm",)}  # the others would not fit a GPU
OURS = ("moefold", "with layers")
CAPTION = """milliseconds of a step: forward, backward, clipping, update; the median turn.
moefold: our experts and attention. with layers: norms, rope and head too.
times: the fastest of transformers' own over it."""


def run_benchmark(options: TransformersOptions) -> int:
    report = transformers_report(options)
    return show_report(report, options.json, print_transformers_report)


def transformers_report(options: TransformersOptions) -> Report:
    device = resolve_device(options.device)
    names = all_of("model", options.model, STEP_GOALS) or list(STEP_GOALS)
    results: list[Row] = []
    for name in names:
        config = step_bench_config(name, device)
        medians = time_in_turns(config, options.turns, options.steps)
        free_device_memory(device)
        row: Row = {"model": name, "layers": config.model.layers, "milliseconds": medians}
        row["times"] = times_faster(medians)
        results.append(row)
        tell_progress(f"{name}: {row['times']:.2f} times as fast as the fastest of transformers' own")
    return machine_facts(device) | {"results": results}


def times_faster(medians: dict[str, float]) -> float:
    theirs = [value for name, value in medians.items() if name not in OURS]
    return min(theirs) / medians["with layers"]


def time_in_turns(config: Config, turns: int, steps: int) -> dict[str, float]:
    """Milliseconds of a step by contender, the median of its turns."""
    device = config.train.device
    model = transformers_model(config)
    train_on = transformers_update(model, config)
    ids_BS = random_ids(config)
    contenders = (*THEIRS[device], *OURS)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(turns):
        for name in contenders:
            use_contender(model, name)
            train_on(ids_BS)  # warm
            synchronize_device(device)
            begun = time.perf_counter()
            for _ in range(steps):
                train_on(ids_BS)
            synchronize_device(device)
            elapsed = time.perf_counter() - begun
            times[name].append(elapsed / steps * 1e3)
    moefold.transformers.disable()
    return {name: median(measured) for name, measured in times.items()}


def use_contender(model: Any, name: str) -> None:
    moefold.transformers.disable()
    if name not in OURS:
        model.set_experts_implementation(name)
        model.set_attn_implementation("sdpa")
        return
    layers = name == "with layers"
    moefold.transformers.enable(norms=layers, rope=layers, head=layers)
    model.set_experts_implementation("moefold")
    model.set_attn_implementation("moefold")


def random_ids(config: Config) -> Tensor:
    device = config.train.device
    generator = torch.Generator(device).manual_seed(0)
    shape = (config.train.global_batch, config.data.seq_len)
    return torch.randint(config.model.vocab, shape, generator=generator, device=device)


def print_transformers_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=CAPTION)
    table.add_column("model, layers", no_wrap=True)
    contenders = list(report["results"][0]["milliseconds"])
    add_number_columns(table, *contenders, "times")
    for row in report["results"]:
        cells = [f"{value:.1f}" for value in row["milliseconds"].values()]
        table.add_row(f"{row['model']}, {row['layers']}", *cells, f"{row['times']:.2f}")
    Console().print(table)
