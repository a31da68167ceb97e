"""`moefold simulate`: a pipeline schedule on the clock, before any GPU is asked.

Needs no torch. The program it clocks is the one a run would execute.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moefold.config.errors import UserError, one_of, printable_text
from moefold.config.read import read_yaml_mapping
from moefold.observe.trace import TraceEvent, write_trace
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


@dataclass(frozen=True)
class SimulateOptions:
    """Clock a pipeline schedule. Costs are F = D = W = 1 for a rank's share of a microbatch, unless you give them."""

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
    """Clock this program, in its text form, instead of a schedule's."""
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


def run_command(argv: Sequence[str]) -> int:
    options, _ = read_options(SimulateOptions, argv, "simulate", config_keys=False)
    for path in (options.trace, options.svg, options.text):
        if path and not path.parent.is_dir():
            raise UserError(f"no folder {path.parent} to write {path.name} into; make it, or choose another")
    try:
        title, program = chosen_program(options)
        stages = last_stage_of(program) + 1
        layout = parse_layout_option(options, stages)
        tree = read_yaml_mapping(options.costs) if options.costs else {}
        costs = read_stage_costs(tree, stages, max(1, stages // len(program)), layout)
    except ScheduleError as unsound:
        raise UserError(*unsound.problems) from None
    timeline = simulate_program(program, costs)
    found = timeline_summary(program, timeline, title)
    if options.trace:
        write_trace(options.trace, timeline_events(timeline, costs))
    if options.svg:
        options.svg.write_text(draw_timeline(program, timeline, costs, title), encoding="utf-8")
    if options.text:
        options.text.write_text(program_text.write_program(program, title), encoding="utf-8")
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_timeline_table(found, Console())
    return 0


def chosen_program(options: SimulateOptions) -> tuple[str, Program]:
    """The program to clock, whole and free of deadlock, and what to call it."""
    passes = [
        PROGRAM_PASSES[one_of("pass", name.strip(), PROGRAM_PASSES)]
        for name in options.passes.split(",")
        if name.strip()
    ]
    title, program = program_from_file(options) if options.program else program_from_schedule(options)
    for rewrite in passes:
        program = rewrite(program)
    return ", ".join([title, *(["passes " + options.passes] if passes else [])]), check_program(program)


def program_from_file(options: SimulateOptions) -> tuple[str, Program]:
    assert options.program is not None
    path = options.program
    if options.schedule:
        raise UserError(f"--program {path} and --schedule {options.schedule}: expected one of the two; drop one")
    try:
        found = program_text.read_program(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {path}; expected a program, such as `moefold simulate --text FILE` writes") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; expected a program in UTF-8") from None
    return path.name, check_program(found)


def program_from_schedule(options: SimulateOptions) -> tuple[str, Program]:
    name = one_of("schedule", options.schedule or "1f1b", SCHEDULES)
    vpp = SCHEDULES[name].least_vpp if options.vpp is None else options.vpp
    pp, microbatches = options.pp, options.microbatches
    numbers = {"--pp": pp, "--vpp": vpp, "--microbatches": microbatches}
    problems = [f"{flag} {n} is not legal; expected a whole number at least 1" for flag, n in numbers.items() if n < 1]
    ops = 3 * pp * vpp * microbatches
    if not problems and ops > MOST_OPS:
        sizes = " x ".join(f"{flag} {n}" for flag, n in numbers.items())
        problems = [f"{sizes} are {ops} ops; expected at most {MOST_OPS}: lower one of the three"]
    if problems:
        raise UserError(*problems)
    return f"{name}, pp {pp}, vpp {vpp}, {microbatches} microbatches", build_program(name, pp, vpp, microbatches)


def parse_layout_option(options: SimulateOptions, stages: int) -> StageLayout | None:
    if options.layout is None:
        return None
    layout = parse_layout(options.layout)
    if len(layout.stages) != stages:
        raise UserError(
            f"--layout {printable_text(str(layout))} has {len(layout.stages)} stages; expected pp x vpp = {stages}: "
            f"change its `|`, or --pp or --vpp"
        )
    return layout


def timeline_summary(program: Program, timeline: Timeline, title: str) -> dict[str, Any]:
    """Everything the command shows, as plain data; lists are by rank."""
    paired, home = [sum(map(is_paired, slots)) for slots in program], rank_by_stage(program)
    return {
        "title": title,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "live": timeline.live,
        "bytes": timeline.bytes,
        "exposed": timeline.exposed,
        "paired": paired,
        "stages": [[stage for stage, rank in enumerate(home) if rank == at] for at in range(len(program))],
    }


def timeline_events(timeline: Timeline, costs: StageCosts) -> list[TraceEvent]:
    """The parts of every slot, as a run's trace would have them."""
    return [
        TraceEvent(span.rank, part.lane, str(part.op), part.start, part.end, dict(part.op._asdict()))
        for span in timeline.spans
        for part in lane_intervals(span, costs)
    ]


def print_timeline_table(found: dict[str, Any], console: Console) -> None:
    bubble = sum(found["bubble"]) / len(found["bubble"])
    console.print(
        f"{found['title']}: makespan {found['makespan']:.6g}, bubble {bubble:.1%}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    columns = ["rank", "stages", "bubble", "live chunks"]
    columns += ["live bytes"] if any(found["bytes"]) else []
    columns += ["exposed"] if any(each > 1e-9 for each in found["exposed"]) else []
    columns += ["paired"] if any(found["paired"]) else []
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == "stages" else "right")
    for rank in range(len(found["live"])):
        cells = {
            "rank": str(rank),
            "stages": " ".join(map(str, found["stages"][rank])),
            "bubble": f"{found['bubble'][rank]:.1%}",
            "live chunks": str(found["live"][rank]),
            "live bytes": f"{found['bytes'][rank]:.3g}",
            "exposed": f"{found['exposed'][rank]:.3g}",
            "paired": str(found["paired"][rank]),
        }
        table.add_row(*(cells[column] for column in columns))
    console.print(table)
