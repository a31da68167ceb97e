"""`moefold doctor parity`: a layout against one rank, at a reduced size, on local CPU ranks.

Exit code 0 and "equal", or 1 and the first difference: which tensor, by how much, on which ranks. Sums in two levels
play that the ranks are on several nodes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from moefold.config.run import Config
from moefold.layout.spawn import run_local_ranks
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe

if TYPE_CHECKING:
    from torch import Tensor

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
    """Folder for the traces of the ranks; set by the command for the ranks it starts."""


WHATEVER_IS_SET = "whatever is set, states and gradients have full precision, products are plain, nothing is clipped"
FORM = CommandForm("doctor parity", ParityOptions, config_keys=True)


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    ranks = check_rank_count(options.world)
    in_precision = [*overrides, "--train.precision", options.precision]
    config = resolve_recipe(options.recipe, in_precision, None)

    from moefold.train.parity import ROUTINGS, comparable_config, played_node_size  # torch, from here on

    small = comparable_config(config, ranks)
    if options.trace:  # this process is one of the ranks
        write_rank_traces(small, options, options.trace)
        return 0
    print(
        f"{ranks} CPU ranks in nodes of {played_node_size(small, ranks)}, a small model; {WHATEVER_IS_SET}", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="moefold-parity-") as folder:
        arguments = ["doctor", "parity", *argv, "--trace", folder]
        if code := run_local_ranks(arguments, ranks):
            return code
        compare = partial(compare_with_one_rank, small, options, Path(folder))
        verdicts = list(map(compare, ROUTINGS))
    equal = all(verdicts)
    print("equal" if equal else "NOT equal")
    return 0 if equal else 1


def write_rank_traces(config: Config, options: ParityOptions, folder: Path) -> None:
    from moefold.layout.process_groups import joined_world
    from moefold.train.parity import ROUTINGS, played_node_size, trace_run

    node_size = played_node_size(config, options.world)
    with joined_world(config.parallel, "cpu", config.shard, node_size=node_size) as world:
        for routing in ROUTINGS:
            trace = trace_run(config, world, options.steps, routing)
            write_trace_entries(folder / f"{routing} {world.rank}", trace)


def compare_with_one_rank(config: Config, options: ParityOptions, folder: Path, routing: str) -> bool:
    from moefold.layout.axes import single_rank_world
    from moefold.train.parity import TOLERANCE, first_mismatch, single_rank_config, trace_run

    on_one_rank = single_rank_config(config)
    expected = trace_run(on_one_rank, single_rank_world(), options.steps, routing)
    paths = [folder / f"{routing} {rank}" for rank in range(options.world)]
    by_rank = list(map(read_trace_entries, paths))
    tolerance = TOLERANCE[options.precision]
    difference = first_mismatch(expected, by_rank, tolerance)
    print(f"{routing} routing, {len(expected)} values and tensors: {difference or 'equal'}", flush=True)
    return difference is None


def write_trace_entries(path: Path, trace: Sequence[TraceEntry]) -> None:
    """The tensors as safetensors, by number; their names and starts as JSON, in the same order."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for number, entry in enumerate(trace):
        tensors[str(number)] = entry.values.contiguous()
    save_file(tensors, f"{path}.safetensors")
    names = [(entry.what, entry.starts) for entry in trace]
    text = json.dumps(names)
    Path(f"{path}.json").write_text(text)


def read_trace_entries(path: Path) -> list[TraceEntry]:
    from safetensors.torch import load_file

    from moefold.train.parity import TraceEntry

    tensors = load_file(f"{path}.safetensors")
    text = Path(f"{path}.json").read_text()
    trace: list[TraceEntry] = []
    entries = enumerate(json.loads(text))
    for number, (what, starts) in entries:
        values = tensors[str(number)]
        trace.append(TraceEntry(what, tuple(starts), values))
    return trace
