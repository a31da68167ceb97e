"""`moefold bench optimizer`: Newton-Schulz beside grouped products, and updates of AdamW beside copies.

Newton-Schulz of many matrices of one shape is compared with the time of its plain operations (`newton_schulz_flops`) at
the rate of the fastest grouped product of that shape. An update of AdamW is compared with a copy by bytes read and
written. The momentum of Muon, its update and the clipping are not part of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.bench.clock import Work, median_seconds
from moefold.bench.machine import cuda_capability, free_device_memory, machine_facts, resolve_device
from moefold.bench.options import OptimizerOptions
from moefold.bench.report import (
    Report,
    Row,
    add_number_columns,
    report_heading,
    report_table,
    show_report,
    tell_progress,
)
from moefold.kernels.catalog import CATALOG
from moefold.kernels.choice import hopper_bf16_runs
from moefold.kernels.experts.grouped_gemm import grouped_gemm
from moefold.kernels.facts import Facts
from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients
from moefold.kernels.optimizer.state_blocks import block_dtypes, encode_blocks

STEPS = 5
ADAMW = AdamWOptions(0.9, 0.95, 1e-8, 0.1)
HEAT_CALLS = 100
MOMENTS = ("int8", "fp8")
CAPTION = """Newton-Schulz: over the time of its plain operations at the rate of the grouped product.
AdamW, bf16 weights without main weights: bytes a second over those of the copy."""
Seconds = Callable[[Work], float]


class Sizes(NamedTuple):
    matrices: int
    rows: int
    columns: int
    grouped: int  # matrices of the grouped product
    elements: int  # of an update, and bytes of a copy
    heat_seconds: float  # of products before the first measurement


SIZES = {
    # gate, up and down of 128 experts in 12 layers of Qwen3-30B
    "cuda": Sizes(
        matrices=12 * 128 * 3,
        rows=768,
        columns=2048,
        grouped=128,
        elements=2**30,
        heat_seconds=3.0,
    ),
    "cpu": Sizes(
        matrices=6,
        rows=48,
        columns=128,
        grouped=4,
        elements=2**16,
        heat_seconds=0.0,
    ),
}


class MeasuredUpdate(NamedTuple):
    """An update, the bytes that it reads and writes, and those kept from step to step."""

    work: Work
    moved: int
    kept: int


def run_benchmark(options: OptimizerOptions) -> int:
    report = optimizer_report(options)
    return show_report(report, options.json, print_optimizer_report)


def optimizer_report(options: OptimizerOptions) -> Report:
    device = resolve_device(options.device)
    seconds = partial(median_seconds, device=device, repeat=options.repeat)
    sizes = SIZES[device]
    capability = cuda_capability(device)
    facts = Facts(device, "bf16", capability)
    rows = newton_schulz_rows(facts, sizes, seconds)
    free_device_memory(device)
    rows += adamw_rows(facts, sizes, seconds)
    report = machine_facts(device)
    return report | {"sizes": sizes._asdict(), "results": rows}


def runnable(op: str, facts: Facts) -> list[str]:
    """Fast implementations that may run here, or else the reference."""
    choices = CATALOG[op]
    names = [choice.name for choice in choices if choice.when(facts)]
    return names or ["reference"]


def timed_row(what: str, kernel: str, seconds: float, rate: float, over: float | None) -> Row:
    return {
        "what": what,
        "kernel": kernel,
        "milliseconds": seconds * 1e3,
        "tera_per_second": rate / 1e12,
        "over": over,
    }


# ---- Newton-Schulz


def newton_schulz_rows(facts: Facts, sizes: Sizes, seconds: Seconds) -> list[Row]:
    rows = list(grouped_product_rows(facts, sizes, seconds))
    best = max(row["tera_per_second"] for row in rows)
    matrix = (sizes.rows, sizes.columns)
    x_NRC = random_bf16(facts.device, sizes.matrices, *matrix)
    coefficients = newton_schulz_coefficients("quintic", STEPS)
    flops_of_each = newton_schulz_flops(*matrix, STEPS)
    flops = sizes.matrices * flops_of_each
    at_best = flops / (best * 1e12)
    for name in runnable("newton_schulz", facts):
        tell_progress(f"Newton-Schulz, {name}")
        orthogonalise = newton_schulz.implementations[name]
        work = partial(orthogonalise, x_NRC, coefficients)
        took = seconds(work)
        rate = flops / took
        over = took / at_best
        row = timed_row("Newton-Schulz", name, took, rate, over)
        rows.append(row)
    return rows


def grouped_product_rows(facts: Facts, sizes: Sizes, seconds: Seconds) -> Iterator[Row]:
    """X W^T of as many rows as a matrix has, for each matrix W; again and again, as long as Newton-Schulz takes, and
    first for some seconds: a card at the limit of its power is slower than one that has just begun."""
    tell_progress("grouped products")
    names = runnable("grouped_gemm", facts)
    device = facts.device
    experts = sizes.grouped
    rows = experts * sizes.rows
    w_END = random_bf16(device, experts, sizes.rows, sizes.columns)
    x_RD = random_bf16(device, rows, sizes.columns)
    numbers_E = torch.arange(1, experts + 1, dtype=torch.int32, device=device)
    ends_E = numbers_E * sizes.rows
    inputs = (x_RD, w_END, ends_E)
    flops = 2 * x_RD.numel() * sizes.rows
    times = STEPS * sizes.matrices // experts
    products: dict[str, Work] = {}
    for name in names:
        implementation = grouped_gemm.implementations[name]
        products[name] = partial(implementation, *inputs)
    if hopper_bf16_runs(facts):
        products["of the expert kernel"] = expert_product(*inputs)
    first = products[names[0]]
    heat_device(first, sizes.heat_seconds, seconds)
    for name, product in products.items():
        work = partial(repeat_work, product, times)
        took = seconds(work) / times
        rate = flops / took
        yield timed_row("grouped product", name, took, rate, None)


def heat_device(work: Work, wanted: float, seconds: Seconds) -> None:
    calls = partial(repeat_work, work, HEAT_CALLS)
    end = time.monotonic() + wanted
    while time.monotonic() < end:
        seconds(calls)


def repeat_work(work: Work, times: int) -> None:
    for _ in range(times):
        work()


def expert_product(x_RD: Tensor, w_END: Tensor, ends_E: Tensor) -> Work:
    from moefold.kernels.experts import grouped_gemm_launch as launch

    plan = launch.RowTilePlan.of(ends_E, len(x_RD))
    return partial(launch.down_projection, x_RD, w_END, plan)


# ---- AdamW


def adamw_rows(facts: Facts, sizes: Sizes, seconds: Seconds) -> Iterator[Row]:
    tell_progress("updates of AdamW")
    n = sizes.elements
    device = facts.device
    source = torch.ones(n, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    took = seconds(copy)
    copied = 2 * n / took
    yield timed_row("copy", "torch", took, copied, None)
    for moments in MOMENTS:
        what = f"AdamW, {moments} moments"
        with_moments = replace(facts, moments=moments, main="none")
        for name in runnable("adamw", with_moments):
            update, moved, kept = adamw_update(name, moments, n, device)
            took = seconds(update)
            rate = moved / took
            over = rate / copied
            row = timed_row(what, name, took, rate, over)
            row["bytes_per_parameter"] = kept / n
            yield row


def adamw_update(kernel: str, moments: str, n: int, device: str) -> MeasuredUpdate:
    """An update of n bf16 weights."""
    weights = random_bf16(device, n)
    gradient = random_bf16(device, n)
    dtypes = block_dtypes(moments)
    assert dtypes is not None, f"{moments} has no blocks"
    m_dtype, v_dtype = dtypes
    mean = encode_blocks(gradient, m_dtype, is_second=False)
    square = encode_blocks(gradient.square(), v_dtype, is_second=True)
    now = adamw_scalars(3, 1e-4, ADAMW)
    wide = torch.float64
    scale = torch.ones((), dtype=wide, device=device)
    scalars = torch.tensor(now, dtype=wide, device=device)
    update = partial(
        adamw.implementations[kernel],
        weights,
        gradient,
        mean.codes,
        square.codes,
        None,
        scale,
        scalars,
        ADAMW,
        m_scales=mean.scales,
        v_scales=square.scales,
    )
    held = (weights, *mean, *square)
    kept = sum(x.nbytes for x in held)
    moved = 2 * kept + gradient.nbytes
    return MeasuredUpdate(update, moved, kept)


def random_bf16(device: str, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def print_optimizer_report(report: Report) -> None:
    sizes = Sizes(**report["sizes"])
    title = f"{report_heading(report)}: {sizes.matrices} matrices of {sizes.rows} x {sizes.columns}, {STEPS} steps"
    table = report_table(title, "what", "kernel", caption=CAPTION)
    add_number_columns(table, "ms", "TF/s, TB/s", "over", "bytes a parameter")
    for row in report["results"]:
        milliseconds = f"{row['milliseconds']:.2f}"
        rate = f"{row['tera_per_second']:.4g}"
        over = number_text(row["over"])
        kept = number_text(row.get("bytes_per_parameter"))
        table.add_row(row["what"], row["kernel"], milliseconds, rate, over, kept)
    console = Console()
    console.print(table)


def number_text(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"
