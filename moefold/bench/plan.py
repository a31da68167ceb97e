"""`moefold bench plan`: what the planner says of a step on this GPU, beside what the trainer needs and takes.

Every case is a run on one GPU: other models, depths, sequences, microbatches, and ways to keep main weights, moments
and gradients. Memory is torch's peak of allocated bytes, time that of a whole step.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moefold.bench.layer import machine_facts, report_heading
from moefold.bench.step import free_device_memory, time_moefold_steps
from moefold.config.read import with_values
from moefold.config.run import Config
from moefold.plan.answer import answer_request
from moefold.presets.zoo import PRESETS

PLAN_CAPTION = (
    """peak: GiB of device memory, planned and measured. step: milliseconds. off: planned over measured, less one."""
)
BF16_STATE = {"optim.main": "split", "optim.moments": "bf16", "optim.gradients": "bf16"}
FP32_STATE = {"optim.main": "fp32", "optim.moments": "fp32", "optim.gradients": "fp32"}


def case_overrides(
    layers: int, seq_len: int, micro_batch: int, microbatches: int, kept: dict[str, Any]
) -> dict[str, Any]:
    return {
        "model.layers": layers,
        "data.seq_len": seq_len,
        "train.micro_batch": micro_batch,
        "train.global_batch": micro_batch * microbatches,
        **kept,
    }


PLAN_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe, lean": ("olmoe-1b-7b", case_overrides(16, 4096, 4, 1, BF16_STATE)),
    "olmoe, 3 x 2": ("olmoe-1b-7b", case_overrides(8, 4096, 2, 3, FP32_STATE)),
    "olmoe, short": ("olmoe-1b-7b", case_overrides(6, 1024, 16, 1, FP32_STATE | {"optim.moments": "bf16"})),
    "qwen3-30b, lean": ("qwen3-30b-a3b", case_overrides(12, 4096, 4, 1, BF16_STATE)),
    "qwen3-30b, long": ("qwen3-30b-a3b", case_overrides(6, 16384, 1, 2, FP32_STATE)),
    "mixtral-8x22b, lean": ("mixtral-8x22b", case_overrides(2, 4096, 4, 1, BF16_STATE)),
    "mixtral-8x7b": ("mixtral-8x7b", case_overrides(3, 4096, 2, 2, FP32_STATE)),
    "deepseek-v2-lite": ("deepseek-v2-lite", case_overrides(8, 4096, 4, 1, BF16_STATE)),
    "qwen3-235b": ("qwen3-235b-a22b", case_overrides(1, 4096, 4, 2, FP32_STATE)),
    "qwen2-57b": ("qwen2-57b-a14b", case_overrides(2, 4096, 4, 1, BF16_STATE)),
}


def plan_case_config(model: str, values: dict[str, Any]) -> Config:
    problems: dict[str, str] = {}
    config = with_values(PRESETS[model](), values, problems)
    assert not problems, problems
    return replace(config, train=replace(config.train, device="cuda", steps=1000))


def planned_figures(model: str, values: dict[str, Any], gpu: str) -> dict[str, float]:
    found = answer_request({"model": model, "gpus": 1, "gpu": gpu, "precision": "bf16", "parallel.pp": 1, **values})
    return {"peak_gib": found["memory_gib"], "step_ms": 1e3 * found["step_s"]}


def plan_report(names: list[str], gpu: str, steps: int) -> dict[str, Any]:
    """Every case in turn; one that does not run is told, and the others go on."""
    results: list[dict[str, Any]] = []
    for name in names:
        model, values = PLAN_CASES[name]
        row: dict[str, Any] = {"case": name, "model": model, **values, "planned": planned_figures(model, values, gpu)}
        try:
            took = time_moefold_steps(plan_case_config(model, values), steps, None)
            row["measured"] = {"peak_gib": took.peak_gib, "step_ms": took.milliseconds}
            print(f"{name}: {row['planned']} planned, {row['measured']} measured", file=sys.stderr, flush=True)
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error).splitlines()[0]
        free_device_memory("cuda")
        results.append(row)
    return {**machine_facts("cuda"), "gpu": gpu, "results": results}


def print_plan_report(report: dict[str, Any]) -> None:
    table = Table(title=report_heading(report), title_justify="left", caption=PLAN_CAPTION)
    table.add_column("case", no_wrap=True)
    for column in ("peak", "measured", "off", "step", "measured", "off"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in report["results"]:
        said, was = row["planned"], row.get("measured")
        if was is None:
            table.add_row(row["case"], f"{said['peak_gib']:.2f}", row["failed"][:40], "", f"{said['step_ms']:.0f}")
            continue
        cells = [(said[key], was[key], said[key] / was[key] - 1) for key in ("peak_gib", "step_ms")]
        (a, b, off), (c, d, late) = cells
        table.add_row(row["case"], f"{a:.2f}", f"{b:.2f}", f"{off:+.1%}", f"{c:.0f}", f"{d:.0f}", f"{late:+.1%}")
    Console().print(table)
