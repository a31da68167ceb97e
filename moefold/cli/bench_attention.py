"""`moefold bench attention`: every way of attending at the shapes of known models, and whether two runs agree to the
bit. What it prints is what `kernels/attention_times.py` ships."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moefold.cli.bench_layer import about
from moefold.kernels.attention_measure import both_ways, measure, random_inputs, ways
from moefold.kernels.catalog import Facts, facts_of
from moefold.kernels.registry import DTYPES
from moefold.presets.zoo import PRESETS

MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x22b", "mixtral-8x7b", "qwen3-235b-a22b", "deepseek-v3")


def bench(device: str) -> dict[str, Any]:
    results = [result_of(name, facts) for name, facts in cases(device).items()] if device == "cuda" else []
    return {**about(device), "results": results}


def cases(device: str) -> dict[str, Facts]:
    """One for each shape, by the first model that has it."""
    capability = torch.cuda.get_device_capability()
    found: dict[Any, tuple[str, Facts]] = {}
    for name in MODELS:
        facts = facts_of(PRESETS[name](), device, "bf16", capability)
        found.setdefault(facts.attention, (name, replace(facts, repeatable=False)))
    return dict(found.values())


def result_of(name: str, facts: Facts) -> dict[str, Any]:
    assert facts.attention is not None
    times = measure(facts)
    repeats = {way: repeats_itself(way, facts) for way in ways(facts)}
    return {"model": name, "shape": str(facts.attention), "milliseconds": times, "repeats": repeats}


def repeats_itself(way: str, facts: Facts, times: int = 6) -> bool:
    """Whether all gradients come out the same, to the bit, every time."""
    assert facts.attention is not None
    both = both_ways(way, *random_inputs(facts.attention, DTYPES[facts.dtype]))
    first = both()
    return all(torch.equal(a, b) for _ in range(times) for a, b in zip(first, both(), strict=True))


def show(report: dict[str, Any]) -> None:
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
