"""`moefold bench plan`: the planner's memory and step time against measured steps of the trainer, on one GPU.

The cases vary model, depth, sequence length, microbatches, and the data types of main weights, moments and gradients.
Memory is torch's peak of allocated bytes; time is that of a whole step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.console import Console

from moefold.bench.machine import first_line_of, free_device_memory, machine_facts, resolve_device
from moefold.bench.options import PlanBenchOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
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
Figures = dict[str, float]  # peak_gib and step_ms


class PlanCase(NamedTuple):
    model: str
    layers: int
    state: Overrides
    seq_len: int = 4096
    micro_batch: int = 4
    microbatches: int = 1

    def overrides(self) -> Overrides:
        shape = {
            "model.layers": self.layers,
            "data.seq_len": self.seq_len,
            "train.micro_batch": self.micro_batch,
            "train.global_batch": self.micro_batch * self.microbatches,
        }
        return shape | self.state


PLAN_CASES = {
    "olmoe, lean": PlanCase("olmoe-1b-7b", 16, BF16_STATE),
    "olmoe, 3 x 2": PlanCase("olmoe-1b-7b", 8, FP32_STATE, micro_batch=2, microbatches=3),
    "olmoe, short": PlanCase("olmoe-1b-7b", 6, FP32_STATE_BF16_MOMENTS, seq_len=1024, micro_batch=16),
    "qwen3-30b, lean": PlanCase("qwen3-30b-a3b", 12, BF16_STATE),
    "qwen3-30b, long": PlanCase("qwen3-30b-a3b", 6, FP32_STATE, seq_len=16384, micro_batch=1, microbatches=2),
    "mixtral-8x22b, lean": PlanCase("mixtral-8x22b", 2, BF16_STATE),
    "mixtral-8x7b": PlanCase("mixtral-8x7b", 3, FP32_STATE, micro_batch=2, microbatches=2),
    "deepseek-v2-lite": PlanCase("deepseek-v2-lite", 8, BF16_STATE),
    "qwen3-235b": PlanCase("qwen3-235b-a22b", 1, FP32_STATE, microbatches=2),
    "qwen2-57b": PlanCase("qwen2-57b-a14b", 2, BF16_STATE),
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
    one_gpu = {"gpus": 1, "gpu": gpu, "model": model}
    layout = {"precision": "bf16", "parallel.pp": 1}
    answer = answer_request(one_gpu | layout | values)
    milliseconds = 1e3 * answer["step_s"]
    return {"peak_gib": answer["memory_gib"], "step_ms": milliseconds}


def measured_figures(model: str, values: Overrides, steps: int) -> Figures:
    config = plan_case_config(model, values)
    timing = time_moefold_steps(config, steps, None)
    return {"peak_gib": timing.peak_gib, "step_ms": timing.milliseconds}


def plan_report(options: PlanBenchOptions) -> Report:
    """Every case in turn. A case that runs out of memory is reported as failed, and the next one follows."""
    results: list[Row] = []
    for name, case in PLAN_CASES.items():
        model = case.model
        values = case.overrides()
        planned = planned_figures(model, values, options.gpu)
        row: Row = {"case": name, "model": model, **values}
        row["planned"] = planned
        results.append(row)
        try:
            measured = measured_figures(model, values, options.steps)
            row["measured"] = measured
            tell_progress(f"{name}: {planned} planned, {measured} measured")
        except torch.OutOfMemoryError as error:
            row["failed"] = first_line_of(error)
        free_device_memory("cuda")
    facts = machine_facts("cuda")
    return {**facts, "gpu": options.gpu, "results": results}


def print_plan_report(report: Report) -> None:
    heading = report_heading(report)
    table = report_table(heading, caption=PLAN_CAPTION)
    table.add_column("case", no_wrap=True)
    columns = ("measured", "off")
    add_number_columns(table, "peak", *columns, "step", *columns)
    for row in report["results"]:
        describe = compared_cells if "measured" in row else failed_cells
        table.add_row(row["case"], *describe(row))
    Console().print(table)


def compared_cells(row: Row) -> list[str]:
    cells: list[str] = []
    digits = {"peak_gib": 2, "step_ms": 0}
    for key, places in digits.items():
        planned = row["planned"][key]
        measured = row["measured"][key]
        error = planned / measured - 1
        cells.append(f"{planned:.{places}f}")
        cells.append(f"{measured:.{places}f}")
        cells.append(f"{error:+.1%}")
    return cells


def failed_cells(row: Row) -> list[str]:
    planned = row["planned"]
    peak = f"{planned['peak_gib']:.2f}"
    step = f"{planned['step_ms']:.0f}"
    reason = row["failed"][:40]
    return [peak, reason, "", step]
