"""`moefold bench schedules`: steps of one model on one device under every kind of schedule that a pipeline rank runs.

A pair or a deferred weight gradient costs nothing by itself only if the kernels stay the same: the fused expert kernel
and the sums of gradients in place. One rank has no messages to hide, so a schedule's time here is its own overhead.
"""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import SchedulesOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.bench.step import STEP_GOALS, step_bench_config, time_moefold_steps, timing_text
from moefold.config.errors import one_of
from moefold.config.run import Config, PipelineConfig

MICROBATCHES = 4
PLAIN = "1f1b"
WAYS = {
    PLAIN: PipelineConfig(),
    "1f1b, weight gradients deferred": PipelineConfig(defer=True),
    "zero bubble (zb_h1)": PipelineConfig(schedule="zb_h1"),
    "paired": PipelineConfig(pair=True, fill=False),
    "paired, weight gradients fill gaps": PipelineConfig(pair=True),
}


def run_benchmark(options: SchedulesOptions) -> int:
    report = schedules_report(options)
    return show_report(report, options.json, print_schedules_report)


def schedules_report(options: SchedulesOptions) -> Report:
    device = resolve_device(options.device)
    model = one_of("model", options.model, STEP_GOALS)
    one_batch = step_bench_config(model, device)
    config = microbatched(one_batch)
    results: list[Row] = []
    for way, pipeline in WAYS.items():
        variant = replace(config, pipeline=pipeline)
        timing = time_moefold_steps(variant, options.steps, None)
        free_device_memory(device)
        row = {"schedule": way} | timing._asdict()
        results.append(row)
        tell_progress(f"{way}: {timing_text(timing)}")
    layers = config.model.layers
    about = {"model": model, "layers": layers, "microbatches": MICROBATCHES}
    return machine_facts(device) | about | {"results": results}


def microbatched(config: Config) -> Config:
    """Microbatches of the size of a step of `moefold bench step`, whose gradients are summed in fp32, through half of
    its layers: two microbatches and the deferred gradients must fit."""
    batch = MICROBATCHES * config.train.micro_batch
    train = replace(config.train, global_batch=batch)
    optim = replace(config.optim, gradients="fp32")
    layers = max(1, config.model.layers // 2)
    model = replace(config.model, layers=layers)
    return replace(config, train=train, optim=optim, model=model)


def print_schedules_report(report: Report) -> None:
    heading = report_heading(report)
    model = f"{report['model']}, {report['layers']} layers, {report['microbatches']} microbatches on one device"
    table = report_table(f"{heading}\n{model}", "schedule")
    add_number_columns(table, "ms", "tokens/s", "peak GiB", f"of {PLAIN}")
    results = report["results"]
    plain = results[0]["milliseconds"]
    for row in results:
        share = plain / row["milliseconds"]
        time = f"{row['milliseconds']:.1f}"
        speed = f"{row['tokens_per_s']:,.0f}"
        peak = f"{row['peak_gib']:.1f}"
        table.add_row(row["schedule"], time, speed, peak, f"{share:.3f}")
    Console().print(table)
