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

from moefold.cli import bench_save, calibrate, overlap
from moefold.cli.options import read
from moefold.config.refused import Refused, choose
from moefold.kernels.catalog import CATALOG


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


def run(argv: Sequence[str]) -> int:
    for name, command in {"overlap": overlap, "save": bench_save, "calibrate": calibrate}.items():
        if argv[:1] == [name]:
            return command.run(argv[1:])
    options, _ = read(BenchOptions, argv, "bench", config_keys=False)
    ops = [choose("operation", options.op, CATALOG)] if options.op else list(CATALOG)
    for name, number in (("repeat", options.repeat), ("steps", options.steps)):
        if number is not None and number < 1:
            raise Refused(f"--{name} {number} is not legal; expected a whole number at least 1, such as 20")

    import torch  # only now: refusals above appear at once

    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise Refused("--device cuda, but torch sees no CUDA device here; expected cpu or auto")
    dtype = options.dtype if options.dtype != "auto" else "bf16" if device == "cuda" else "fp32"
    if options.what in OTHERS:
        report, show_report = OTHERS[options.what](options, device, dtype)
        print(json.dumps(report, indent=1)) if options.json else show_report(report)
        return 0
    results = [row for op in ops for row in time_op(op, device, dtype, options.repeat)]
    if options.json:
        print(json.dumps({"device": device, "dtype": dtype, "results": results}, indent=1))
    else:
        show(results, device, dtype)
    return 0


def run_layers(options: BenchOptions, device: str, dtype: str) -> Shown:
    from moefold.cli import bench_layer
    from moefold.kernels.registry import DTYPES

    names = [choose("layer", name, bench_layer.LAYERS) for name in options.layer] or list(bench_layer.LAYERS)
    return bench_layer.bench(names, device, DTYPES[dtype], options.repeat), bench_layer.show


def run_steps(options: BenchOptions, device: str, _: str) -> Shown:
    from moefold.cli import bench_step

    names = [choose("model", name, bench_step.MODELS) for name in options.model] or list(bench_step.MODELS)
    return bench_step.bench(names, device, options.steps or 10, options.out), bench_step.show


def run_attention(_: BenchOptions, device: str, __: str) -> Shown:
    from moefold.cli import bench_attention

    return bench_attention.bench(device), bench_attention.show


def run_plan(options: BenchOptions, device: str, _: str) -> Shown:
    from moefold.cli import bench_plan

    if device != "cuda":
        raise Refused("moefold bench plan compares runs on a GPU, and torch sees none here; expected a CUDA device")
    return bench_plan.bench(list(bench_plan.CASES), options.gpu, options.steps or 5), bench_plan.show


def run_curves(options: BenchOptions, device: str, _: str) -> Shown:
    from moefold.cli import bench_curves

    report = bench_curves.bench(device, options.steps or 200)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "curves.svg").write_text(bench_curves.drawn(report))
    return report, bench_curves.show


Shown = tuple[dict[str, Any], Callable[[dict[str, Any]], None]]  # what was found, and how it is shown
OTHERS: dict[str, Callable[[BenchOptions, str, str], Shown]] = {
    "layer": run_layers,
    "step": run_steps,
    "attention": run_attention,
    "curves": run_curves,
    "plan": run_plan,
}


def time_op(name: str, device: str, dtype: str, repeat: int) -> list[dict[str, Any]]:
    import torch

    from moefold.kernels.bind import OPS
    from moefold.kernels.registry import DTYPES

    op = OPS[name]
    capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
    rows: list[dict[str, Any]] = []
    assert op.make_cases is not None
    for case in op.make_cases(device, DTYPES[dtype]):
        facts = case.facts(device, dtype, capability)
        runnable = ["reference", *(c.name for c in CATALOG[name] if c.when(facts))]
        for which in runnable:
            forward, both = time_case(op.implementations[which], case.inputs, op.mutates, device, repeat)
            timed = {"forward_us": forward * 1e6, "both_us": both * 1e6}
            rows.append({"op": name, "case": case.name, "implementation": which, **timed})
    return rows


def time_case(
    fn: Callable[..., Any], inputs: tuple[Any, ...], mutates: bool, device: str, repeat: int
) -> tuple[float, float]:
    """Median seconds of forward alone, and of forward with backward (the same, for an op that only mutates)."""
    import torch

    leaves = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    floats = [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]

    def forward() -> Any:
        with torch.no_grad():
            return fn(*leaves)

    def both() -> None:
        for x in floats:
            x.grad = None
        out = fn(*leaves)
        first = out[0] if isinstance(out, tuple) else out
        first.backward(torch.ones_like(first))

    alone = clock(forward, device, repeat)
    if mutates:
        return alone, alone
    for x in floats:
        x.requires_grad_()
    return alone, clock(both, device, repeat)


def clock(work: Callable[[], Any], device: str, repeat: int) -> float:
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


def show(results: list[dict[str, Any]], device: str, dtype: str) -> None:
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
