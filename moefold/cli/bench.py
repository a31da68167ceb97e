"""`moefold bench kernels`: every implementation of every op on the cases that also test it, the reference beside it.
Every other subject has a file of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from moefold.bench import calibrate, overlap, save
from moefold.config.errors import UserError, one_of
from moefold.kernels.catalog import CATALOG
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class BenchOptions:
    """Time this machine. `kernels` times every operation's implementations, forward and backward; `layer` times the MoE
    layers of known models and `step` whole training steps, with transformers' beside them where it is installed;
    `attention` compares the ways of attending; `curves` shows whether fast kernels learn as references do; `overlap`
    how much of the travel to experts hides behind compute; `save` times checkpoints; `calibrate` measures this machine
    for `moefold plan`, and `plan` shows how near its answers come on this GPU."""

    what: tyro.conf.Positional[
        Literal["kernels", "layer", "step", "attention", "curves", "overlap", "save", "calibrate", "plan"]
    ] = "kernels"
    layer: tuple[str, ...] = ()
    """Only these layers."""
    model: tuple[str, ...] = ()
    """step: only these models."""
    steps: int | None = None
    """step, curves: how many steps are timed (10), or compared (200)."""
    out: Path | None = None
    """step: a folder for the profile and trace of one step of each model, and for the figures as they come. curves: a
    folder for the plot."""
    gpu: str = "h200"
    """plan: the GPU this is, as `moefold plan --gpu` takes it."""
    op: str | None = None
    """Only this operation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    repeat: int = 20
    """Timed repetitions; the median is shown."""
    json: bool = False
    """Print JSON instead of a table."""


def run_command(argv: Sequence[str]) -> int:
    for name, command in {"overlap": overlap, "save": save, "calibrate": calibrate}.items():
        if argv[:1] == [name]:
            return command.run_command(argv[1:])
    options, _ = read_options(BenchOptions, argv, "bench", config_keys=False)
    ops = [one_of("operation", options.op, CATALOG)] if options.op else list(CATALOG)
    for name, number in (("repeat", options.repeat), ("steps", options.steps)):
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} is not legal; expected a whole number at least 1, such as 20")

    import torch  # only now: refusals above appear at once

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here; expected cpu or auto")
    dtype = options.dtype if options.dtype != "auto" else "bf16" if device == "cuda" else "fp32"
    if options.what in SUBJECTS:
        report, show_report = SUBJECTS[options.what](options, device, dtype)
        print(json.dumps(report, indent=1)) if options.json else show_report(report)
        return 0
    results = [row for op in ops for row in time_implementations(op, device, dtype, options.repeat)]
    if options.json:
        print(json.dumps({"device": device, "dtype": dtype, "results": results}, indent=1))
    else:
        print_kernel_table(results, device, dtype)
    return 0


def run_layer_bench(options: BenchOptions, device: str, dtype: str) -> ReportWithPrinter:
    from moefold.bench import layer
    from moefold.layout.dtypes import DTYPES

    names = [one_of("layer", name, layer.LAYER_SHAPES) for name in options.layer] or list(layer.LAYER_SHAPES)
    return layer.layer_report(names, device, DTYPES[dtype], options.repeat), layer.print_layer_report


def run_step_bench(options: BenchOptions, device: str, _: str) -> ReportWithPrinter:
    from moefold.bench import step

    names = [one_of("model", name, step.STEP_GOALS) for name in options.model] or list(step.STEP_GOALS)
    return step.step_report(names, device, options.steps or 10, options.out), step.print_step_report


def run_attention_bench(_: BenchOptions, device: str, __: str) -> ReportWithPrinter:
    from moefold.bench import attention

    return attention.attention_report(device), attention.print_attention_report


def run_plan_bench(options: BenchOptions, device: str, _: str) -> ReportWithPrinter:
    from moefold.bench import plan

    if device != "cuda":
        raise UserError("moefold bench plan compares runs on a GPU, and torch sees none here; expected a CUDA device")
    return plan.plan_report(list(plan.PLAN_CASES), options.gpu, options.steps or 5), plan.print_plan_report


def run_curves_bench(options: BenchOptions, device: str, _: str) -> ReportWithPrinter:
    from moefold.bench import curves

    report = curves.curves_report(device, options.steps or 200)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "curves.svg").write_text(curves.curves_as_svg(report))
    return report, curves.print_curves_report


ReportWithPrinter = tuple[dict[str, Any], Callable[[dict[str, Any]], None]]  # what was found, and how it is shown
SUBJECTS: dict[str, Callable[[BenchOptions, str, str], ReportWithPrinter]] = {
    "layer": run_layer_bench,
    "step": run_step_bench,
    "attention": run_attention_bench,
    "curves": run_curves_bench,
    "plan": run_plan_bench,
}


def time_implementations(name: str, device: str, dtype: str, repeat: int) -> list[dict[str, Any]]:
    import torch

    from moefold.kernels.registry import import_every_op
    from moefold.layout.dtypes import DTYPES

    op = import_every_op()[name]
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    rows: list[dict[str, Any]] = []
    for case in op.cases(device, DTYPES[dtype]):
        facts = case.facts(device, dtype, capability)
        runnable = ["reference", *(c.name for c in CATALOG[name] if c.when(facts))]
        for which in runnable:
            forward, both = time_kernel_case(op.implementations[which], case.inputs, op.mutates, device, repeat)
            timed = {"forward_us": forward * 1e6, "both_us": both * 1e6}
            rows.append({"op": name, "case": case.name, "implementation": which, **timed})
    return rows


def time_kernel_case(
    fn: Callable[..., Any], inputs: tuple[Any, ...], mutates: bool, device: str, repeat: int
) -> tuple[float, float]:
    """Median seconds of forward alone, and of forward with backward (the same, for an op that only mutates)."""
    import torch

    leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def forward_only() -> Any:
        with torch.no_grad():
            return fn(*leaves)

    def forward_backward() -> None:
        for x in floats:
            x.grad = None
        out = fn(*leaves)
        first = out[0] if isinstance(out, tuple) else out
        first.backward(torch.ones_like(first))

    alone = median_seconds(forward_only, device, repeat)
    if mutates:
        return alone, alone
    for x in floats:
        x.requires_grad_()
    return alone, median_seconds(forward_backward, device, repeat)


def median_seconds(work: Callable[[], Any], device: str, repeat: int) -> float:
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    for _ in range(repeat + 3):
        wait()
        begun = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - begun)
    return median(times[3:])


def print_kernel_table(results: list[dict[str, Any]], device: str, dtype: str) -> None:
    title = f"kernels on {device} in {dtype}, microseconds"
    table = Table("operation", "case", "kernel", title=title, title_justify="left")
    for column in ("forward", "+ backward", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    reference, op = 1.0, ""
    for row in results:
        if row["implementation"] == "reference":
            reference = row["both_us"]
        if row["op"] != op:
            table.add_section()
        times = (f"{row['forward_us']:.1f}", f"{row['both_us']:.1f}", f"{reference / row['both_us']:.2f}")
        table.add_row(row["op"] if row["op"] != op else "", row["case"], row["implementation"], *times)
        op = row["op"]
    Console().print(table)
