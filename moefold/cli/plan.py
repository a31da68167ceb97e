"""`moefold plan`: memory, time and the best layout of a training run, before a GPU is rented. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moefold.config.read import parse_overrides
from moefold.plan.answer import TIME_WALLS, answer_request
from moefold.presets.command_options import read_options


@dataclass(frozen=True)
class PlanCommandOptions:
    """Predict memory and speed of a training run on a cluster, or find its best layout. What is left empty is as the
    recipe has it."""

    model: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys."""
    gpus: int = 8
    """How many GPUs."""
    gpu: str = "h100"
    """Which: a100, b200, b300, gb200, gb300, h100, h20, h200, h800, or a YAML file (docs/planner.md)."""
    seq: int = 0
    """Tokens of a sequence (data.seq_len)."""
    mbs: int = 0
    """Sequences of a microbatch (train.micro_batch)."""
    gbs: int = 0
    """Sequences of a step (train.global_batch); by default 8 for each GPU."""
    precision: str = ""
    """bf16, fp8, fp8-blockwise, mxfp8 or nvfp4."""
    recompute: str = ""
    """Regions made again in backward, as norm,activation."""
    offload: str = ""
    """Regions whose inputs wait in host memory."""
    dispatcher: str = ""
    """How tokens travel to experts: auto, all_gather, all_to_all, dedup, hierarchical, deepep."""
    overlap: bool = False
    """Hide experts' travel behind another microbatch's compute; a search tries both unless this is set."""
    graphs: str = ""
    """CUDA graphs: none, static, whole."""
    sharding: str = ""
    """Over replicas: none, zero or fsdp."""
    stack: str = ""
    """Whose layers: moefold or megatron; what they keep and launch differs."""
    tokens: float = 1e12
    """The budget that days and cost are told for."""
    search: bool = False
    """Find the best layouts; also done when no layout is given."""
    best: int = 10
    """How many of them."""
    explain: bool = False
    """Print the arithmetic behind the numbers."""
    json: bool = False
    """Print JSON instead of tables."""


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(PlanCommandOptions, argv, "plan")
    given = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "json"}
    asked = {name: value for name, value in given.items() if value or name == "gpus"}
    found = answer_request({**asked, **parse_overrides(overrides)})
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_plan(found, Console())
    return 0


def print_plan(found: dict[str, Any], console: Console) -> None:
    at = found["layout"]
    degrees = ", ".join(f"{name} {at[name]}" for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "edp"))
    console.print(
        f"[bold]{escape(found['name'])}[/bold] on {found['gpus']} x {found['gpu']}: {degrees}; {at['precision']}, "
        f"length {at['seq']}, {at['mbs']} x {at['microbatches']} microbatches x dp = {at['gbs']} sequences a step"
    )
    extras = [f"recompute {','.join(at['recompute'])}"] if at["recompute"] else []
    extras += ["overlap"] if at["overlap"] else []
    console.print(f"dispatcher {found['dispatcher']}; graphs {at['graphs']}" + "".join(f"; {each}" for each in extras))
    if at["pp"] > 1:
        console.print(escape(f"pipeline {at['schedule']}, {at['stages']}"))
    print_step_time(found, console)
    print_memory_table(found, console)
    if found["searched"]:
        print_layout_table(found, console)
    for line in found.get("explained", ()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_step_time(found: dict[str, Any], console: Console) -> None:
    budget = found["budget"]
    console.print(
        f"[bold]{found['step_s']:.4g} s[/bold] a step: {found['tflops_per_gpu']:.4g} TFLOP/s and "
        f"{found['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, MFU {found['mfu']:.1%} of the "
        f"{found['layout']['precision']} peak; {budget['tokens']:.3g} tokens in {budget['days']:,.1f} days, "
        f"{budget['gpu_hours']:,.0f} GPU hours, about ${budget['dollars']:,.0f}"
    )
    table = Table("where the time goes", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in found["time_by_wall"].items():
        table.add_row(TIME_WALLS[name], f"{seconds:.3f}", f"{seconds / found['step_s']:.1%}")
    console.print(table)


def print_memory_table(found: dict[str, Any], console: Console) -> None:
    largest = found["largest_rank"]
    verdict = "fits" if found["fits"] else "[bold red]does not fit[/bold red]"
    console.print(
        f"[bold]{found['memory_gib']:.1f} GiB[/bold] on the largest rank ({largest['rank']}, in {largest['at']}), "
        f"{verdict} {found['memory_limit_gib']:.0f} GiB"
    )
    ranks = found["memory_parts_by_rank"]
    table = Table("GiB by pipeline rank")
    shown = sorted({0, 1, len(ranks) // 2, len(ranks) - 1, largest["rank"]} & set(range(len(ranks))))
    for rank in shown:
        table.add_column(str(rank), justify="right")
    for part in ranks[0]:
        if any(rank[part] for rank in ranks):
            table.add_row(part, *(f"{ranks[rank][part]:.2f}" for rank in shown))
    table.add_row("total", *(f"{found['memory_by_rank'][rank]:.2f}" for rank in shown))
    console.print(table)


def print_layout_table(found: dict[str, Any], console: Console) -> None:
    table = Table("layout", "recompute", title=f"best of {found['searched']} layouts", title_justify="left")
    for column in ("s/step", "TFLOP/s", "GiB"):
        table.add_column(column, justify="right")
    for each in found["layouts"]:
        numbers = (each["step_s"], each["tflops_per_gpu"], each["memory_gib"])
        again = ",".join(each["layout"]["recompute"]) or "-"
        table.add_row(each["text"], again, *(f"{number:.4g}" for number in numbers))
    console.print(table)
    for each in found["rejected"]:
        console.print(
            f"left out {each['count']} for {each['reason']}: {each['example']}", highlight=False, markup=False
        )
