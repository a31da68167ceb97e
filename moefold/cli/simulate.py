"""`moefold simulate`: times of a pipeline schedule, simulated without a GPU. Needs no torch.

The simulated program is the one that a run would execute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from moefold.bench.report import show_report
from moefold.config.errors import UserError, one_of, printable_text
from moefold.config.read import read_yaml_mapping
from moefold.observe.trace import TraceEvent, write_trace
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options
from moefold.schedule import program_text
from moefold.schedule.draw_svg import draw_timeline
from moefold.schedule.passes import PROGRAM_PASSES
from moefold.schedule.program import Program, check_program, is_paired, last_stage_of, rank_by_stage
from moefold.schedule.schedule_catalog import SCHEDULES, build_program
from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.simulate_program import Timeline, lane_intervals, simulate_program
from moefold.schedule.stage_costs import StageCosts, read_stage_costs
from moefold.schedule.stage_layout import StageLayout, parse_layout

MOST_OPS = 1_000_000
Summary = dict[str, Any]  # of a timeline


@dataclass(frozen=True)
class SimulateOptions:
    """Simulate a pipeline schedule. Costs are F = D = W = 1 for a rank's share of a microbatch, unless given."""

    schedule: str | None = None
    """gpipe, 1f1b (the default), interleaved, zb_h1, zb_v or dualpipe_v."""
    pp: int = 4
    """Pipeline ranks."""
    vpp: int | None = None
    """Stages a rank holds; by default the fewest the schedule takes."""
    microbatches: int = 8
    """Microbatches of one step."""
    passes: str = ""
    """Rewrite the program: pair (forwards with backwards), defer (weight gradients), or both, as pair,defer."""
    program: Path | None = None
    """Simulate this program, in its text form, instead of a schedule's."""
    costs: Path | None = None
    """A YAML file of seconds and bytes by kind of op; docs/schedules.md shows one."""
    layout: str | None = None
    """The pieces of each stage, such as "Ed*3|(tt|)*29m|L", for costs given by piece."""
    trace: Path | None = None
    """Write a trace for https://ui.perfetto.dev."""
    svg: Path | None = None
    """Write a drawing."""
    text: Path | None = None
    """Write the program in its text form."""
    json: bool = False
    """Print JSON instead of a table."""


FORM = CommandForm("simulate", SimulateOptions)


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(FORM, argv)
    refuse_missing_folders(options)
    try:
        title, program = chosen_program(options)
        costs = chosen_costs(options, program)
    except ScheduleError as unsound:
        raise UserError(*unsound.problems) from None
    timeline = simulate_program(program, costs)
    # Files first, then the table or JSON on standard output.
    if options.trace:
        events = timeline_events(timeline, costs)
        write_trace(options.trace, events)
    if options.svg:
        svg = draw_timeline(program, timeline, costs, title)
        options.svg.write_text(svg, encoding="utf-8")
    if options.text:
        text = program_text.write_program(program, title)
        options.text.write_text(text, encoding="utf-8")
    summary = timeline_summary(program, timeline, title)
    return show_report(summary, options.json, print_timeline_table)


def refuse_missing_folders(options: SimulateOptions) -> None:
    for path in (options.trace, options.svg, options.text):
        if path and not path.parent.is_dir():
            raise UserError(f"no folder {path.parent} to write {path.name} into; make it, or choose another")


def chosen_program(options: SimulateOptions) -> tuple[str, Program]:
    """The program to simulate, complete and free of deadlock, and its title."""
    wanted = [name.strip() for name in options.passes.split(",")]
    named = [one_of("pass", name, PROGRAM_PASSES) for name in wanted if name]
    passes = [PROGRAM_PASSES[name] for name in named]
    read_program = program_from_file if options.program else program_from_schedule
    title, program = read_program(options)
    for rewrite in passes:
        program = rewrite(program)
    if passes:
        title = f"{title}, passes {options.passes}"
    return title, check_program(program)


def program_from_file(options: SimulateOptions) -> tuple[str, Program]:
    assert options.program is not None
    path = options.program
    if options.schedule:
        raise UserError(f"--program {path} and --schedule {options.schedule}: expected one of the two; drop one")
    try:
        text = path.read_text(encoding="utf-8")
        program = program_text.read_program(text)
    except FileNotFoundError:
        raise UserError(f"no file {path}; expected a program, such as `moefold simulate --text FILE` writes") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; expected a program in UTF-8") from None
    return path.name, check_program(program)


def program_from_schedule(options: SimulateOptions) -> tuple[str, Program]:
    name = one_of("schedule", options.schedule or "1f1b", SCHEDULES)
    vpp = options.vpp
    if vpp is None:
        vpp = SCHEDULES[name].least_vpp
    pp, microbatches = options.pp, options.microbatches
    refuse_illegal_sizes({"--pp": pp, "--vpp": vpp, "--microbatches": microbatches})
    title = f"{name}, pp {pp}, vpp {vpp}, {microbatches} microbatches"
    return title, build_program(name, pp, vpp, microbatches)


def refuse_illegal_sizes(sizes: dict[str, int]) -> None:
    shown = {f"{flag} {size}": size for flag, size in sizes.items()}
    small = [option for option, size in shown.items() if size < 1]
    if small:
        raise UserError(*(f"{option} is not legal; expected a whole number at least 1" for option in small))
    ops = 3 * math.prod(sizes.values())  # forward, data gradient, weight gradient
    if ops > MOST_OPS:
        product = " x ".join(shown)
        raise UserError(f"{product} are {ops} ops; expected at most {MOST_OPS}: lower one of the three")


def chosen_costs(options: SimulateOptions, program: Program) -> StageCosts:
    stages = last_stage_of(program) + 1
    layout = parse_layout_option(options, stages)
    tree = read_yaml_mapping(options.costs) if options.costs else {}
    stages_per_rank = max(1, stages // len(program))
    return read_stage_costs(tree, stages, stages_per_rank, layout)


def parse_layout_option(options: SimulateOptions, stages: int) -> StageLayout | None:
    if options.layout is None:
        return None
    layout = parse_layout(options.layout)
    count = len(layout.stages)
    if count != stages:
        text = printable_text(str(layout))
        fix = "change its `|`, or --pp or --vpp"
        raise UserError(f"--layout {text} has {count} stages; expected pp x vpp = {stages}: {fix}")
    return layout


def timeline_summary(program: Program, timeline: Timeline, title: str) -> Summary:
    """Everything that the command shows, as plain data; lists are by rank."""
    stages: list[list[int]] = [[] for _ in program]
    for stage, rank in enumerate(rank_by_stage(program)):
        stages[rank].append(stage)
    return {
        "title": title,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "live": timeline.live,
        "bytes": timeline.bytes,
        "exposed": timeline.exposed,
        "paired": [sum(map(is_paired, slots)) for slots in program],
        "stages": stages,
    }


def timeline_events(timeline: Timeline, costs: StageCosts) -> list[TraceEvent]:
    """The parts of every slot, as events of a trace."""
    events: list[TraceEvent] = []
    for span in timeline.spans:
        for part in lane_intervals(span, costs):
            details = dict(part.op._asdict())
            name = str(part.op)
            lane = part.lane
            event = TraceEvent(span.rank, lane, name, part.start, part.end, details)
            events.append(event)
    return events


def print_timeline_table(summary: Summary) -> None:
    bubble = mean(summary["bubble"])
    headline = f"{summary['title']}: makespan {summary['makespan']:.6g}, bubble {bubble:.1%}"
    console = Console()
    console.print(headline, highlight=False, markup=False, soft_wrap=True)
    columns = shown_columns(summary)
    table = Table()
    for column in columns:
        justify = "left" if column == "stages" else "right"
        table.add_column(column, justify=justify)
    for rank in range(len(summary["live"])):
        cells = rank_cells(summary, rank)
        table.add_row(*(cells[column] for column in columns))
    console.print(table)


def shown_columns(summary: Summary) -> list[str]:
    """The columns that hold anything but zeros."""
    columns = ["rank", "stages", "bubble", "live chunks"]
    if any(summary["bytes"]):
        columns.append("live bytes")
    if any(seconds > 1e-9 for seconds in summary["exposed"]):
        columns.append("exposed")
    if any(summary["paired"]):
        columns.append("paired")
    return columns


def rank_cells(summary: Summary, rank: int) -> dict[str, str]:
    return {
        "rank": str(rank),
        "stages": " ".join(map(str, summary["stages"][rank])),
        "bubble": f"{summary['bubble'][rank]:.1%}",
        "live chunks": str(summary["live"][rank]),
        "live bytes": f"{summary['bytes'][rank]:.3g}",
        "exposed": f"{summary['exposed'][rank]:.3g}",
        "paired": str(summary["paired"][rank]),
    }
