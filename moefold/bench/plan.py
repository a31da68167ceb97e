"""`moefold bench plan`: the planner's memory and step time against measured steps of the trainer, on one GPU.

The cases vary model, depth, sequence length, microbatches, and the data types of main weights, moments and gradients.
Memory is torch's peak of allocated bytes; time is that of a whole step.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moefold.bench.machine import free_device_memory, machine_facts, resolve_device
from moefold.bench.options import PlanBenchOptions
from moefold.bench.report import Report, Row, add_number_columns, report_heading, show_report
from moefold.bench.step import time_moefold_steps
from moefold.config.errors import UserError
from moefold.config.read import with_values
from moefold.config.run import Config
from moefold.plan.answer import answer_request
from moefold.presets.zoo import PRESETS

PLAN_CAPTION = (
    "peak: GiB of device memory, planned and measured. step: milliseconds. off: planned over measured, less one."
)
BF16_STATE = {"optim.main": "split", "optim.moments": "bf16", "optim.gradients": "bf16"}
FP32_STATE = {"optim.main": "fp32", "optim.moments": "fp32", "optim.gradients": "fp32"}
FP32_STATE_BF16_MOMENTS = FP32_STATE | {"optim.moments": "bf16"}


Overrides = dict[str, Any]  # configuration keys
PlanCase = tuple[str, Overrides]  # model, keys
Figures = dict[str, float]  # peak_gib and step_ms


def plan_case(model: str, layers: int, seq_len: int, micro_batch: int, microbatches: int, state: Overrides) -> PlanCase:
    shape = {
        "model.layers": layers,
        "data.seq_len": seq_len,
        "train.micro_batch": micro_batch,
        "train.global_batch": micro_batch * microbatches,
    }
    return model, shape | state


PLAN_CASES = {
    "olmoe, lean": plan_case("olmoe-1b-7b", 16, 4096, 4, 1, BF16_STATE),
    "olmoe, 3 x 2": plan_case("olmoe-1b-7b", 8, 4096, 2, 3, FP32_STATE),
    "olmoe, short": plan_case("olmoe-1b-7b", 6, 1024, 16, 1, FP32_STATE_BF16_MOMENTS),
    "qwen3-30b, lean": plan_case("qwen3-30b-a3b", 12, 4096, 4, 1, BF16_STATE),
    "qwen3-30b, long": plan_case("qwen3-30b-a3b", 6, 16384, 1, 2, FP32_STATE),
    "mixtral-8x22b, lean": plan_case("mixtral-8x22b", 2, 4096, 4, 1, BF16_STATE),
    "mixtral-8x7b": plan_case("mixtral-8x7b", 3, 4096, 2, 2, FP32_STATE),
    "deepseek-v2-lite": plan_case("deepseek-v2-lite", 8, 4096, 4, 1, BF16_STATE),
    "qwen3-235b": plan_case("qwen3-235b-a22b", 1, 4096, 4, 2, FP32_STATE),
    "qwen2-57b": plan_case("qwen2-57b-a14b", 2, 4096, 4, 1, BF16_STATE),
}


def run_benchmark(options: PlanBenchOptions) -> int:
    if resolve_device(options.device) != "cuda":
        raise UserError("moefold bench plan compares runs on a GPU, and torch sees none here; expected a CUDA device")
    report = plan_report(options)
    return show_report(report, options.json, print_plan_report)


def plan_case_config(model: str, values: Overrides) -> Config:
    problems: dict[str, str] = {}
    preset = PRESETS[model]()
    config = with_values(preset, values, problems)
    assert not problems, problems
    train = replace(config.train, device="cuda", steps=1000)
    return replace(config, train=train)


def planned_figures(model: str, values: Overrides, gpu: str) -> Figures:
    one_gpu = {"gpus": 1, "gpu": gpu, "precision": "bf16", "parallel.pp": 1}
    request = one_gpu | values | {"model": model}
    answer = answer_request(request)
    milliseconds = 1e3 * answer["step_s"]
    return {"peak_gib": answer["memory_gib"], "step_ms": milliseconds}


def measured_figures(model: str, values: Overrides, steps: int) -> Figures:
    config = plan_case_config(model, values)
    timing = time_moefold_steps(config, steps, None)
    return {"peak_gib": timing.peak_gib, "step_ms": timing.milliseconds}


def plan_report(options: PlanBenchOptions) -> Report:
    """Every case in turn. A case that runs out of memory is reported as failed, and the next one follows."""
    results: list[Row] = []
    for name, (model, values) in PLAN_CASES.items():
        planned = planned_figures(model, values, options.gpu)
        row: Row = {"case": name, "model": model, **values}
        row["planned"] = planned
        results.append(row)
        try:
            measured = measured_figures(model, values, options.steps)
            row["measured"] = measured
            print(f"{name}: {planned} planned, {measured} measured", file=sys.stderr, flush=True)
        except torch.OutOfMemoryError as error:
            first_line, *_ = str(error).splitlines()
            row["failed"] = first_line
        free_device_memory("cuda")
    facts = machine_facts("cuda")
    return {**facts, "gpu": options.gpu, "results": results}


def print_plan_report(report: Report) -> None:
    heading = report_heading(report)
    table = Table(title=heading, title_justify="left", caption=PLAN_CAPTION)
    table.add_column("case", no_wrap=True)
    columns = ("measured", "off")
    add_number_columns(table, "peak", *columns, "step", *columns)
    for row in report["results"]:
        cells = compared_cells(row) if "measured" in row else failed_cells(row)
        table.add_row(row["case"], *cells)
    Console().print(table)


def compared_cells(row: Row) -> list[str]:
    cells: list[str] = []
    digits = {"peak_gib": 2, "step_ms": 0}
    for key, places in digits.items():
        planned = row["planned"][key]
        measured = row["measured"][key]
        error = planned / measured - 1
        cells += [f"{planned:.{places}f}", f"{measured:.{places}f}", f"{error:+.1%}"]
    return cells


def failed_cells(row: Row) -> list[str]:
    planned = row["planned"]
    reason = row["failed"][:40]
    return [f"{planned['peak_gib']:.2f}", reason, "", f"{planned['step_ms']:.0f}"]
