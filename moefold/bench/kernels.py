"""`moefold bench kernels`: every implementation of every op, on the cases that also test it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from moefold.bench.clock import Work, median_seconds
from moefold.bench.machine import cuda_capability, resolve_device, resolve_dtype
from moefold.bench.options import KernelsOptions
from moefold.bench.report import Report, Row, add_number_columns, report_table, show_report
from moefold.kernels.catalog import CATALOG
from moefold.kernels.registry import KernelCase, float_tensors, import_every_op, map_tensors
from moefold.layout.dtypes import DTYPES

KernelCall = Callable[..., Any]
Clock = Callable[[Work], float]


def run_benchmark(options: KernelsOptions) -> int:
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, device)
    names = list(CATALOG)
    if options.op:
        names = [options.op]
    results: list[Row] = []
    for name in names:
        results += time_implementations(name, device, dtype, options.repeat)
    report = {"device": device, "dtype": dtype, "results": results}
    return show_report(report, options.json, print_kernel_table)


def time_implementations(name: str, device: str, dtype: str, repeat: int) -> list[Row]:
    ops = import_every_op()
    op = ops[name]
    rows: list[Row] = []
    for case in op.cases(device, DTYPES[dtype]):
        runnable = runnable_implementations(name, case, device, dtype)
        for implementation in runnable:
            call = op.implementations[implementation]
            clock = partial(median_seconds, device=device, repeat=repeat)
            forward, both = time_kernel_case(call, case.inputs, op.differentiable, clock)
            row: Row = {"op": name, "case": case.name}
            row["implementation"] = implementation
            row["forward_us"] = forward * 1e6
            row["both_us"] = both * 1e6
            rows.append(row)
    return rows


def runnable_implementations(name: str, case: KernelCase, device: str, dtype: str) -> list[str]:
    """The reference, then the implementations whose condition holds for this case."""
    capability = cuda_capability(device)
    facts = case.facts(device, dtype, capability)
    choices = CATALOG[name]
    fast = [choice.name for choice in choices if choice.when(facts)]
    return ["reference", *fast]


def time_kernel_case(call: KernelCall, inputs: Any, differentiable: bool, clock: Clock) -> tuple[float, float]:
    """Median seconds of the forward pass, and of forward and backward. Not every op has a backward."""
    leaves = map_tensors(inputs, detached_copy)
    floats = float_tensors(leaves)

    def forward_only() -> Any:
        with torch.no_grad():
            return call(*leaves)

    def forward_backward() -> None:
        for leaf in floats:
            leaf.grad = None
        out = call(*leaves)
        first = out[0] if isinstance(out, tuple) else out
        ones = torch.ones_like(first)
        first.backward(ones)

    # Inputs require gradients only after the forward timing.
    forward = clock(forward_only)
    if not differentiable:
        return forward, forward
    for leaf in floats:
        leaf.requires_grad_()
    both = clock(forward_backward)
    return forward, both


def detached_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def print_kernel_table(report: Report) -> None:
    title = f"kernels on {report['device']} in {report['dtype']}, microseconds"
    table = report_table(title, "operation", "case", "kernel")
    add_number_columns(table, "forward", "+ backward", "speed-up")
    reference = 1.0
    op = ""
    for row in report["results"]:
        forward = row["forward_us"]
        both = row["both_us"]
        if row["implementation"] == "reference":
            reference = both
        # The operation's name stands on its first row only.
        title = ""
        if row["op"] != op:
            op = row["op"]
            title = op
            table.add_section()
        times = f"{forward:.1f}", f"{both:.1f}", f"{reference / both:.2f}"
        table.add_row(title, row["case"], row["implementation"], *times)
    Console().print(table)
