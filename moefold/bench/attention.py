"""`moefold bench attention`: every way of attending at the shapes of known models, and whether two runs agree to the
bit. What it prints is what `kernels/attention/timings.py` ships."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moefold.bench.layer import machine_facts
from moefold.kernels.attention.autotune import candidate_names, forward_and_backward, measure_candidates, random_inputs
from moefold.kernels.facts import Facts, facts_from_config
from moefold.layout.dtypes import DTYPES
from moefold.presets.zoo import PRESETS

ATTENTION_MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x22b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")


def attention_report(device: str) -> dict[str, Any]:
    results = (
        [measured_shape(name, facts) for name, facts in attention_cases(device).items()] if device == "cuda" else []
    )
    return {**machine_facts(device), "results": results}


def attention_cases(device: str) -> dict[str, Facts]:
    """One for each shape, by the first model that has it."""
    capability = torch.cuda.get_device_capability()
    found: dict[Any, tuple[str, Facts]] = {}
    for name in ATTENTION_MODELS:
        facts = facts_from_config(PRESETS[name](), device, "bf16", capability)
        found.setdefault(facts.attention, (name, replace(facts, repeatable=False)))
    return dict(found.values())


def measured_shape(name: str, facts: Facts) -> dict[str, Any]:
    assert facts.attention is not None
    times = measure_candidates(facts)
    repeats = {way: is_bit_reproducible(way, facts) for way in candidate_names(facts)}
    return {"model": name, "shape": str(facts.attention), "milliseconds": times, "repeats": repeats}


def is_bit_reproducible(way: str, facts: Facts, times: int = 6) -> bool:
    """Whether all gradients come out the same, to the bit, every time."""
    assert facts.attention is not None
    both = forward_and_backward(way, *random_inputs(facts.attention, DTYPES[facts.dtype]))
    first = both()
    return all(torch.equal(a, b) for _ in range(times) for a, b in zip(first, both(), strict=True))


def print_attention_report(report: dict[str, Any]) -> None:
    title = (
        f"{report['card']}, {report['date']}, torch {report['versions']['torch']}: ms for 16384 tokens there and back"
    )
    table = Table("model", "shape", "way", title=title, title_justify="left")
    table.add_column("ms", justify="right")
    table.add_column("repeats to the bit")
    for row in report["results"]:
        for way, time in row["milliseconds"].items():
            table.add_row(row["model"], row["shape"], way, f"{time:.2f}", "yes" if row["repeats"][way] else "no")
    Console().print(table)
