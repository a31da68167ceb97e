"""`moefold doctor parity`: is your layout equal to one rank? Shrinks the configuration, runs both here, compares all.

Exit code 0 and "equal", or 1 and the first thing that differs, by how much and on which ranks.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from moefold.config.run import Config
from moefold.layout.spawn import run_local_ranks
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe

if TYPE_CHECKING:
    from moefold.train.parity import TraceEntry


@dataclass(frozen=True)
class ParityOptions:
    """Prove a layout equal to one rank, on local CPU ranks, at a size that fits here."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys."""
    world: int = 8
    """How many ranks to run the layout on."""
    steps: int = 3
    """How many training steps to compare."""
    precision: Literal["fp64", "fp32"] = "fp64"
    """fp64 is compared to 1e-9, fp32 to 1e-5."""
    trace: Path | None = None
    """Where ranks leave what they saw; set by the command for the ranks it starts."""


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(ParityOptions, argv, "doctor parity")
    world = check_rank_count(options.world)
    config = resolve_recipe(options.recipe, [*overrides, "--train.precision", options.precision], None)

    from moefold.train.parity import ROUTINGS, shrink_config  # torch, from here on

    small = shrink_config(config, world)
    if options.trace:
        return write_rank_traces(small, options)
    with tempfile.TemporaryDirectory(prefix="moefold-parity-") as folder:
        words = ["doctor", "parity", *argv, "--trace", folder]
        if code := run_local_ranks(words, world):
            return code
        found = [compare_with_one_rank(small, options, Path(folder), routing) for routing in ROUTINGS]
    print("equal" if all(found) else "NOT equal")
    return 0 if all(found) else 1


def write_rank_traces(config: Config, options: ParityOptions) -> int:
    from moefold.layout.process_groups import joined_world
    from moefold.train.parity import ROUTINGS, trace_run

    assert options.trace is not None
    with joined_world(config.parallel, "cpu") as world:
        for routing in ROUTINGS:
            write_observed(options.trace / f"{routing} {world.rank}", trace_run(config, world, options.steps, routing))
    return 0


def compare_with_one_rank(config: Config, options: ParityOptions, folder: Path, routing: str) -> bool:
    from moefold.layout.axes import single_rank_world
    from moefold.train.parity import TOLERANCE, first_mismatch, single_rank_config, trace_run

    whole = trace_run(single_rank_config(config), single_rank_world(), options.steps, routing)
    ranks = [read_observed(folder / f"{routing} {rank}") for rank in range(options.world)]
    difference = first_mismatch(whole, ranks, TOLERANCE[options.precision])
    print(f"{routing} routing, {len(whole)} values and tensors: {difference or 'equal'}", file=sys.stdout, flush=True)
    return difference is None


def write_observed(path: Path, seen: Sequence[TraceEntry]) -> None:
    from safetensors.torch import save_file

    save_file({str(i): s.values.contiguous() for i, s in enumerate(seen)}, os.fspath(path) + ".safetensors")
    Path(f"{path}.json").write_text(json.dumps([[s.what, s.starts] for s in seen]))


def read_observed(path: Path) -> list[TraceEntry]:
    from safetensors.torch import load_file

    from moefold.train.parity import TraceEntry

    tensors = load_file(os.fspath(path) + ".safetensors")
    names = json.loads(Path(f"{path}.json").read_text())
    return [TraceEntry(what, tuple(starts), tensors[str(i)]) for i, (what, starts) in enumerate(names)]
