"""`moefold bench attention`: every attention kernel at the shapes of known models and at long sequences, which of them
repeat to the bit, blocks of ring attention, and whole rings played by one process.

`kernels/attention/timings.py` ships the printed times.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from moefold.bench.machine import cuda_capability, machine_facts, resolve_device
from moefold.bench.options import AttentionOptions
from moefold.bench.played_ring import played_ring_rows, played_ring_table
from moefold.bench.report import Report, Row, report_table, show_report
from moefold.bench.ring_blocks import ring_block_rows, ring_block_table
from moefold.kernels.attention.autotune import candidate_names, forward_and_backward, measure_candidates, random_inputs
from moefold.kernels.facts import Facts, facts_from_config
from moefold.layout.dtypes import DTYPES
from moefold.presets.zoo import PRESETS

ATTENTION_MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x22b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")
LONG_MODEL = "qwen3-30b-a3b"
LONG_SEQUENCES = (8_192, 32_768, 131_072)  # positions
COMPARED_RUNS = 6


def run_benchmark(options: AttentionOptions) -> int:
    device = resolve_device(options.device)
    report = attention_report(device)
    return show_report(report, options.json, print_attention_report)


def attention_report(device: str) -> Report:
    """The times of every shape; on a CPU, which has no attention kernels to choose from, of small rings alone."""
    results: list[Row] = []
    blocks: list[Row] = []
    if device == "cuda":
        for name, facts in attention_cases(device).items():
            row = measured_shape(name, facts)
            results.append(row)
        blocks = ring_block_rows(device)
    rings = played_ring_rows(device)
    return machine_facts(device) | {"results": results, "ring_blocks": blocks, "played_rings": rings}


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


def measured_shape(name: str, facts: Facts) -> Row:
    assert facts.attention is not None
    times = measure_candidates(facts)
    repeats: dict[str, bool] = {}
    for kernel in candidate_names(facts):
        repeats[kernel] = is_bit_reproducible(kernel, facts)
    shape = str(facts.attention)
    row: Row = {"model": name, "shape": shape}
    row["milliseconds"] = times
    row["repeats"] = repeats
    return row


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
    table.add_column("ms", justify="right")
    table.add_column("repeats to the bit")
    for row in report["results"]:
        model = row["model"]
        shape = row["shape"]
        for kernel, milliseconds in row["milliseconds"].items():
            repeats = "yes" if row["repeats"][kernel] else "no"
            table.add_row(model, shape, kernel, f"{milliseconds:.2f}", repeats)
    console = Console()
    console.print(table)
    blocks = report["ring_blocks"]
    if blocks:
        console.print(ring_block_table(blocks))
    console.print(played_ring_table(report["played_rings"]))
