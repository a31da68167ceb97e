"""`moefold explain`: a model step by step, with lanes, shapes, parameters, FLOPs and the kernels a run would use.

Needs no torch, so it answers at once and on any machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moefold.anatomy.model_totals import active_parameters, mtp_parameters, total_parameters, train_flops_per_token
from moefold.anatomy.regions import absent_regions, regions_of
from moefold.anatomy.stage_contents import pipeline_layout, rank_of_each_stage
from moefold.anatomy.step_specs import (
    StepSpec,
    block_step_specs,
    embed_step,
    is_moe_layer,
    mtp_step_specs,
    predict_step,
)
from moefold.config.run import Config, ModelConfig
from moefold.dispatch import price
from moefold.kernels.catalog import CATALOG, forced_implementations, pick_implementation
from moefold.kernels.facts import BYTES_PER_ELEMENT, Facts, expected_facts
from moefold.layout.fold import fold_into_grids
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe

OPTIMIZER_OPS = {"add_squares", "adamw"}
RING_OPS = ("attention_block", "attention_block_backward")  # what a ring of context-parallel ranks uses in addition


@dataclass(frozen=True)
class ExplainOptions:
    """Show what a model is made of and what a run would do with it."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys."""
    nproc: int = 1
    """On how many ranks it would run."""
    json: bool = False
    """Print JSON instead of tables."""


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(ExplainOptions, argv, "explain")
    config = resolve_recipe(options.recipe, overrides, check_rank_count(options.nproc))
    found = explain_config(config, options.nproc)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_explanation(found, Console())
    return 0


def explain_config(config: Config, world: int) -> dict[str, Any]:
    """Everything the command shows, as plain data."""
    model, facts = config.model, expected_facts(config)
    forced = forced_implementations(config.kernels.force)
    goes_round = config.parallel.cp > 1 and config.parallel.context in ("ring", "hierarchical")
    dense_grid, expert_grid = fold_into_grids(world, config.parallel)
    layers = [("embedding", 1, [embed_step(model)]), *distinct_layers(model), ("head", 1, [predict_step(model)])]
    used = {op for _, _, steps in layers for step in steps for op in step.ops} | OPTIMIZER_OPS
    used |= set(RING_OPS) if goes_round else set()
    kernels = {op: kernel_choice(op, facts, forced) for op in CATALOG if op in used}
    return {
        "name": config.name,
        "parameters": total_parameters(model),
        "active_parameters": active_parameters(model),
        "parameters_ahead": mtp_parameters(model),
        "train_flops_per_token": train_flops_per_token(model, config.data.seq_len),
        "seq_len": config.data.seq_len,
        "facts": asdict(facts),
        "grids": {"dense": dense_grid.sizes, "expert": expert_grid.sizes},
        "pipeline": pipeline_placement(config) if config.parallel.pp > 1 else None,
        "layers": [
            {"kind": kind, "count": count, "steps": [describe_step(step, config) for step in steps]}
            for kind, count, steps in layers
        ],
        "dispatcher": dict(
            zip(
                ("name", "why"),
                price.cheapest_dispatcher(config, min(world, 8), BYTES_PER_ELEMENT[facts.dtype]),
                strict=True,
            )
        ),
        "kernels": kernels,
        "regions": describe_regions(model, kernels),
    }


def describe_regions(model: ModelConfig, kernels: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The memory regions that the model has, with their places, and those that it lacks, with the reasons."""
    names = {op: choice["implementation"] for op, choice in kernels.items()}
    present = regions_of(model, names)
    return {
        "present": {name: {"place": region.place, "meaning": region.meaning} for name, region in present.items()},
        "absent": absent_regions(model, names),
    }


def pipeline_placement(config: Config) -> dict[str, Any]:
    """Which stages each pipeline rank holds, and what lies on them."""
    layout, homes = pipeline_layout(config), rank_of_each_stage(config)
    ranks = [[number for number, home in enumerate(homes) if home == rank] for rank in range(config.parallel.pp)]
    return {
        "schedule": config.pipeline.schedule,
        "layout": str(layout),
        "ranks": [[f"{number}: {layout.stages[number]}" for number in mine] for mine in ranks],
    }


def distinct_layers(model: ModelConfig) -> list[tuple[str, int, list[StepSpec]]]:
    """Each kind of layer once, with how many there are: blocks, then those that look further ahead."""
    every = [
        ("MoE layer" if is_moe_layer(model, n) else "dense layer", block_step_specs(model, n))
        for n in range(model.layers)
    ]
    every += [("layer ahead", mtp_step_specs(model, depth)) for depth in range(model.mtp)]
    counts = Counter((kind, tuple(steps)) for kind, steps in every)
    return [(kind, count, list(steps)) for (kind, steps), count in counts.items()]


def describe_step(step: StepSpec, config: Config) -> dict[str, Any]:
    return {
        "step": step.name,
        "lane": step.lane,
        "static": step.static,
        "shapes": step.shapes,
        "parameters": step.parameters,
        "forward_flops_per_token": step.flops(config.data.seq_len),
        "ops": list(step.ops),
    }


def kernel_choice(op: str, facts: Facts, forced: dict[str, str]) -> dict[str, str]:
    name, why = pick_implementation(op, facts, forced.get(op))
    return {"implementation": name, "why": why}


def print_explanation(found: dict[str, Any], console: Console) -> None:
    facts = found["facts"]
    console.print(
        f"[bold]{escape(found['name'])}[/bold]: {human_readable(found['parameters'])} parameters"
        f"{mtp_parameters_note(found['parameters_ahead'])}, "
        f"{human_readable(found['active_parameters'])} active, {human_readable(found['train_flops_per_token'])} FLOPs a token to train "
        f"at length {found['seq_len']}; on {facts['device']} in {facts['dtype']}"
    )
    for name, sizes in found["grids"].items():
        console.print(f"{name} grid: " + " x ".join(f"{axis} {size}" for axis, size in sizes.items()))
    if found["pipeline"]:
        console.print(escape(f"pipeline: {found['pipeline']['schedule']}, {found['pipeline']['layout']}"))
        for rank, stages in enumerate(found["pipeline"]["ranks"]):
            console.print(escape(f"  rank {rank} holds stage {', '.join(stages)}"))
    console.print(
        f"dispatcher (on nodes of at most 8 ranks): {found['dispatcher']['name']} ({found['dispatcher']['why']})"
    )
    table = Table(title="steps (T tokens, R rows of experts)", title_justify="left")
    for column, justify in (("where", "left"), ("step", "left"), ("lane", "left"), ("shapes", "left")):
        table.add_column(column, justify=justify)  # pyright: ignore[reportArgumentType]
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs/token", justify="right")
    for layer in found["layers"]:
        where = f"{layer['count']} x {layer['kind']}" if layer["count"] > 1 else layer["kind"]
        for step in layer["steps"]:
            lane = "[magenta]comm[/magenta]" if step["lane"] == "comm" else step["lane"]
            numbers = (step["parameters"], step["forward_flops_per_token"])
            table.add_row(where, step["step"], lane, step["shapes"], *(human_readable(n) if n else "" for n in numbers))
            where = ""
        table.add_section()
    console.print(table)
    kernels = Table("operation", "used in", "kernel", "why", title="kernels", title_justify="left")
    for op, chosen in found["kernels"].items():
        users = [s["step"] for layer in found["layers"] for s in layer["steps"] if op in s["ops"]]
        users = list(dict.fromkeys(users)) or ["optimizer" if op in OPTIMIZER_OPS else "attend"]
        kernels.add_row(op, ", ".join(users), chosen["implementation"], chosen["why"])
    console.print(kernels)
    console.print(region_table(found["regions"]))


def region_table(regions: dict[str, Any]) -> Table:
    table = Table("region", "where", "what", title="memory regions", title_justify="left")
    for name, region in regions["present"].items():
        table.add_row(name, region["place"], region["meaning"])
    for name, reason in regions["absent"].items():
        table.add_row(name, "absent", escape(reason))
    return table


def mtp_parameters_note(ahead: int) -> str:
    return f" (and {human_readable(ahead)} to predict further tokens)" if ahead else ""


def human_readable(number: float) -> str:
    """46702792704 -> 46.7 G."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"
