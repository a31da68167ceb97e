"""`moefold bench attention`: every attention kernel at the shapes of known models and at long sequences, which of them
repeat to the bit, blocks of ring attention, and whole rings played by one process.

`kernels/attention/timings.py` ships the printed times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from moefold.bench.machine import cuda_capability, machine_facts, resolve_device
from moefold.bench.options import AttentionOptions
from moefold.bench.played_ring import played_ring_rows, played_ring_table
from moefold.bench.report import Report, Row, add_number_columns, report_table, show_report, tell_progress
from moefold.bench.ring_blocks import ring_block_rows, ring_block_table
from moefold.config.errors import all_of
from moefold.kernels.attention.autotune import candidate_names, forward_and_backward, measure_kernels, random_inputs
from moefold.kernels.attention.timings import TIMED_TOKENS
from moefold.kernels.facts import AttentionShape, Facts, facts_from_config
from moefold.layout.dtypes import DTYPES
from moefold.presets.zoo import PRESETS

ATTENTION_MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x22b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")
LONG_MODEL = "qwen3-30b-a3b"
LONG_SEQUENCES = (8_192, 32_768, 131_072)  # positions
COMPARED_RUNS = 6
RING_BLOCKS = "ring_blocks"
PLAYED_RINGS = "played_rings"
PRODUCTS_OF_HEADS = 4  # scores, twice, and gradients of q and of k
PRODUCTS_OF_VALUES = 3  # outputs, gradients of v and of probabilities


def run_benchmark(options: AttentionOptions) -> int:
    report = attention_report(options)
    return show_report(report, options.json, print_attention_report)


def attention_report(options: AttentionOptions) -> Report:
    """The times of every case, or of those asked for; on a CPU, which has no attention kernels to choose from, of small
    rings alone."""
    device = resolve_device(options.device)
    shapes = attention_cases(device) if device == "cuda" else {}
    rings = {PLAYED_RINGS: played_ring_rows}
    if device == "cuda":
        rings[RING_BLOCKS] = ring_block_rows
    every = [*shapes, *rings]
    results: list[Row] = []
    report = machine_facts(device) | {"results": results}
    for name in all_of("case", options.case, every) or every:
        if name in shapes:
            row = measured_shape(name, shapes[name], options.kernel)
            results.append(row)
            tell_progress(f"{name}: {row['milliseconds']} ms")
        else:
            report[name] = rings[name](device)
            tell_progress(f"{name}: done")
    return report


def attention_cases(device: str) -> dict[str, Facts]:
    """The distinct attention shapes, each by the first model that has it, and one of them with longer sequences."""
    cases: dict[Any, tuple[str, Facts]] = {}
    for name in ATTENTION_MODELS:
        facts = facts_of_every_kernel(name, device)
        cases.setdefault(facts.attention, (name, facts))
    facts = facts_of_every_kernel(LONG_MODEL, device)
    assert facts.attention is not None
    for positions in LONG_SEQUENCES:
        shape = facts.attention._replace(length=positions)
        long = replace(facts, attention=shape)
        cases[shape] = (f"{LONG_MODEL}, {positions}", long)
    return dict(cases.values())


def facts_of_every_kernel(model: str, device: str) -> Facts:
    """Facts for which kernels may add up in any order."""
    config = PRESETS[model]()
    capability = cuda_capability(device)
    facts = facts_from_config(config, device, "bf16", capability)
    return replace(facts, repeatable=False)


def measured_shape(name: str, facts: Facts, asked: Sequence[str] = ()) -> Row:
    """The times of every kernel, or of those asked for."""
    shape = facts.attention
    assert shape is not None
    candidates = candidate_names(facts)
    kernels = all_of("kernel", asked, candidates) or candidates
    times = measure_kernels(facts, kernels)
    repeats: dict[str, bool] = {}
    rates: dict[str, float] = {}
    for kernel in kernels:
        repeats[kernel] = is_bit_reproducible(kernel, facts)
        rates[kernel] = causal_flops(shape) / times[kernel] / 1e9
    row: Row = {"model": name, "shape": str(shape)}
    row["milliseconds"] = times
    row["teraflops"] = rates
    row["repeats"] = repeats
    return row


def causal_flops(shape: AttentionShape) -> float:
    """Of forward and backward: pairs of a query and a key that it sees, in products of both widths."""
    tokens = max(TIMED_TOKENS, shape.length)
    pairs = tokens * shape.length / 2
    widths = PRODUCTS_OF_HEADS * shape.head_dim + PRODUCTS_OF_VALUES * shape.value_dim
    return 2 * pairs * shape.heads * widths


def is_bit_reproducible(kernel: str, facts: Facts) -> bool:
    """Whether several runs give the same gradients, to the bit."""
    assert facts.attention is not None
    dtype = DTYPES[facts.dtype]
    inputs = random_inputs(facts.attention, dtype)
    run_once = forward_and_backward(kernel, *inputs)
    first = run_once()
    for _ in range(COMPARED_RUNS):
        again = run_once()
        if not equal_to_the_bit(first, again):
            return False
    return True


def equal_to_the_bit(first: Any, second: Any) -> bool:
    equal = map(torch.equal, first, second)
    return all(equal)


def print_attention_report(report: Report) -> None:
    machine = f"{report['card']}, {report['date']}, torch {report['versions']['torch']}"
    title = f"{machine}: ms for 16384 tokens or one longer sequence, forward and backward"
    table = report_table(title, "model", "shape", "kernel")
    add_number_columns(table, "ms", "TF/s")
    table.add_column("repeats to the bit")
    for row in report["results"]:
        model = row["model"]
        shape = row["shape"]
        for kernel, milliseconds in row["milliseconds"].items():
            repeats = "yes" if row["repeats"][kernel] else "no"
            rate = f"{row['teraflops'][kernel]:.0f}"
            table.add_row(model, shape, kernel, f"{milliseconds:.2f}", rate, repeats)
    console = Console()
    if report["results"]:
        console.print(table)
    if RING_BLOCKS in report:
        console.print(ring_block_table(report[RING_BLOCKS]))
    if PLAYED_RINGS in report:
        console.print(played_ring_table(report[PLAYED_RINGS]))
