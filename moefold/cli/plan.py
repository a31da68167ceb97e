"""`moefold plan`: predicted memory, step time and best layout of a training run. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moefold.bench.report import show_report
from moefold.cli.plan_advice import print_beside_figures
from moefold.config.errors import UserError
from moefold.config.read import parse_overrides
from moefold.plan.answer import TIME_WALLS, answer_request
from moefold.plan.launch import write_launch_files
from moefold.plan.remedies import NothingFits
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options

Answer = dict[str, Any]  # of the planner
NOT_IN_TRAINER = "not in the trainer yet"
LAYOUT_DEGREES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "edp")


@dataclass(frozen=True)
class PlanCommandOptions:
    """Predict memory and speed of a training run on a cluster, or find its best layout. Options left empty keep the
    recipe's values."""

    model: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys."""
    gpus: int = 8
    """Number of GPUs."""
    gpu: str = "h100"
    """GPU model: a100, b200, b300, gb200, gb300, h100, h20, h200, h800, or a YAML file (docs/planner.md)."""
    seq: int = 0
    """Tokens per sequence (data.seq_len)."""
    mbs: int = 0
    """Sequences per microbatch (train.micro_batch)."""
    gbs: int = 0
    """Sequences per step (train.global_batch); by default 8 for each GPU."""
    precision: str = ""
    """bf16, fp8, fp8-blockwise, mxfp8 or nvfp4."""
    recompute: str = ""
    """Regions recomputed in backward, such as norm,activation."""
    offload: str = ""
    """Regions whose inputs are offloaded to host memory."""
    dispatcher: str = ""
    """Dispatcher of tokens to experts: auto, all_gather, all_to_all, dedup, hierarchical, deepep."""
    overlap: bool = False
    """Hide expert communication behind another microbatch's compute; a search tries both unless this is set."""
    graphs: str = ""
    """CUDA graphs: none, static, whole."""
    sharding: str = ""
    """Sharding over data-parallel replicas: none, zero or fsdp."""
    lengths: str = ""
    """Lengths of packed documents as length:share, such as 700:0.9,65536:0.1; with --data.attend document."""
    stack: str = ""
    """Layer implementation: moefold or megatron; saved activations and kernel launches differ."""
    tokens: float = 1e12
    """Token budget of the predicted days and cost."""
    search: bool = False
    """Search for the best layouts; also done when no layout is given."""
    best: int = 10
    """Number of layouts that a search shows."""
    write: Path | None = None
    """Folder for the launch files of the plan: config.yaml, torchrun.sh and run.sbatch."""
    explain: bool = False
    """Print the arithmetic behind the numbers."""
    json: bool = False
    """Print JSON instead of tables."""


FORM = CommandForm("plan", PlanCommandOptions, config_keys=True)


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    request = plan_request(options) | parse_overrides(overrides)
    answer = answer_request(request)
    if options.write and answer["launch"]:
        write_launch_files(options.write, answer["launch"])
    show_report(answer, options.json, print_plan)
    if not answer["fits"]:
        return NothingFits.exit_code
    if options.write and not answer["launch"]:
        missing = ", ".join(answer["not_in_trainer"])
        raise UserError(f"nothing was written to {options.write}: {NOT_IN_TRAINER}: {missing}; leave these choices out")
    return 0


def plan_request(options: PlanCommandOptions) -> dict[str, Any]:
    """The options that were given; the recipe fills in the others."""
    given = asdict(options)
    del given["json"], given["write"]
    return {name: value for name, value in given.items() if value or name == "gpus"}


def print_plan(answer: Answer) -> None:
    console = Console()
    layout = answer["layout"]
    console.print(layout_headline(answer))
    choices = [f"dispatcher {answer['dispatcher']}", f"graphs {layout['graphs']}"]
    if layout["cp"] > 1:
        choices.append(f"context {layout['parallel.context']}")
    if layout["recompute"]:
        cost = answer["recompute_cost"]
        saved = f"{cost['saved_gib']:.1f} GiB less, {cost['added_s']:.3g} s a step more"
        choices.append(f"recompute {','.join(layout['recompute'])} ({saved})")
    if layout["overlap"]:
        choices.append("overlap")
    console.print("; ".join(choices))
    if answer["dynamic_context"]:
        console.print(answer["dynamic_context"], highlight=False)
    if layout["pp"] > 1:
        console.print(escape(f"pipeline {layout['schedule']}, {layout['stages']}"))
    if answer["not_in_trainer"]:
        console.print(f"[yellow]{NOT_IN_TRAINER}[/yellow]: {escape(', '.join(answer['not_in_trainer']))}")
    print_step_time(answer, console)
    print_memory_table(answer, console)
    print_beside_figures(answer, console)
    if not answer["fits"]:
        print_remedies(answer, console)
    if answer["searched"]:
        print_layout_table(answer, console)
    if answer["launch"]:
        print_launch_files(answer["launch"], console)
    for line in answer.get("explained", ()):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_remedies(answer: Answer, console: Console) -> None:
    remedies = answer["remedies"] or ["another layout: add --search"]
    console.print("what fits:", highlight=False)
    for remedy in remedies:
        console.print(f"  {remedy}", highlight=False, markup=False)


def print_launch_files(files: dict[str, str], console: Console) -> None:
    """The commands of the launch files; config.yaml is long, and --write writes it."""
    console.print("to launch, after --write DIR has written config.yaml, torchrun.sh and run.sbatch into a folder:")
    command = files["torchrun.sh"].splitlines()[-1]
    for line in (command, "sbatch run.sbatch"):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def layout_headline(answer: Answer) -> str:
    layout = answer["layout"]
    degrees = ", ".join(f"{name} {layout[name]}" for name in LAYOUT_DEGREES)
    cluster = f"[bold]{escape(answer['name'])}[/bold] on {answer['gpus']} x {answer['gpu']}"
    batch = f"{layout['mbs']} x {layout['microbatches']} microbatches x dp = {layout['gbs']} sequences a step"
    return f"{cluster}: {degrees}; {layout['precision']}, length {layout['seq']}, {batch}"


def print_step_time(answer: Answer, console: Console) -> None:
    step = answer["step_s"]
    console.print(
        f"[bold]{step:.4g} s[/bold] a step: {answer['tflops_per_gpu']:.4g} TFLOP/s and "
        f"{answer['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU, MFU {answer['mfu']:.1%} of the "
        f"{answer['layout']['precision']} peak"
    )
    print_budget(answer, console)
    table = Table("where the time goes", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in answer["time_by_wall"].items():
        table.add_row(TIME_WALLS[name], f"{seconds:.3f}", f"{seconds / step:.1%}")
    console.print(table)


def print_budget(answer: Answer, console: Console) -> None:
    budget = answer["budget"]
    days = f"{budget['tokens']:.3g} tokens in {budget['days']:,.1f} days"
    cost = f"{budget['gpu_hours']:,.0f} GPU hours, about ${budget['dollars']:,.0f}"
    if answer["fits"]:
        console.print(f"{days}, {cost}")
    else:
        console.print(f"[dim]if it fitted: {days}, {cost}[/dim]", highlight=False)


def print_memory_table(answer: Answer, console: Console) -> None:
    largest = answer["largest_rank"]
    verdict = "fits" if answer["fits"] else "[bold red]does not fit[/bold red]"
    console.print(
        f"[bold]{answer['memory_gib']:.1f} GiB[/bold] on the largest rank ({largest['rank']}, in {largest['at']}), "
        f"{verdict} {answer['memory_limit_gib']:.0f} GiB"
    )
    # One row a part of memory, one column a shown pipeline rank; parts that are zero everywhere are left out.
    parts_by_rank = answer["memory_parts_by_rank"]
    table = Table("GiB by pipeline rank")
    shown = shown_ranks(len(parts_by_rank), largest["rank"])
    for rank in shown:
        table.add_column(str(rank), justify="right")
    for part in parts_by_rank[0]:
        if any(parts[part] for parts in parts_by_rank):
            sizes = [parts_by_rank[rank][part] for rank in shown]
            table.add_row(part, *gib_cells(sizes))
    by_rank = answer["memory_by_rank"]
    totals = [by_rank[rank] for rank in shown]
    table.add_row("total", *gib_cells(totals))
    console.print(table)


def shown_ranks(count: int, largest: int) -> list[int]:
    """First, second, middle, last and largest of the pipeline ranks."""
    chosen = {0, 1, count // 2, count - 1, largest}
    every_rank = set(range(count))
    return sorted(chosen & every_rank)


def gib_cells(sizes: Sequence[float]) -> list[str]:
    return [f"{size:.2f}" for size in sizes]


def print_layout_table(answer: Answer, console: Console) -> None:
    table = Table("layout", "recompute", title=f"best of {answer['searched']} layouts", title_justify="left")
    for column in ("s/step", "TFLOP/s", "GiB"):
        table.add_column(column, justify="right")
    for layout in answer["layouts"]:
        numbers = (layout["step_s"], layout["tflops_per_gpu"], layout["memory_gib"])
        cells = [f"{number:.4g}" for number in numbers]
        recompute = ",".join(layout["layout"]["recompute"]) or "-"
        table.add_row(layout["text"], recompute, *cells)
    console.print(table)
    for rejected in answer["rejected"]:
        line = f"left out {rejected['count']} for {rejected['reason']}: {rejected['example']}"
        console.print(line, highlight=False, markup=False)
