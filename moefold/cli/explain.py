"""`moefold explain`: a model's steps with lanes, shapes, parameters and FLOPs, and the kernels a run would use.

Torch-free: it answers in a fraction of a second, on any machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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
from moefold.kernels.facts import BYTES_PER_ELEMENT
from moefold.kernels.facts import Facts
from moefold.kernels.facts import expected_facts
from moefold.layout.fold import fold_into_grids
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe

OPTIMIZER_OPS = {"add_squares", "adamw"}
RING_OPS = {"attention_block", "attention_block_backward"}  # added by a ring of context-parallel ranks
NODE_SIZE = 8  # ranks of one node, where the environment does not say
NUMBER_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class ExplainOptions:
    """Show a model's steps, and the kernels and layout of a run of it."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys."""
    nproc: int = 1
    """The number of ranks of the run."""
    json: bool = False
    """Print JSON instead of tables."""


class LayerKind(NamedTuple):
    """Layers of a model with the same steps."""

    title: str
    count: int
    steps: list[StepSpec]


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(ExplainOptions, argv, "explain")
    ranks = check_rank_count(options.nproc)
    config = resolve_recipe(options.recipe, overrides, ranks)
    explanation = explain_config(config, ranks)
    if options.json:
        print(json.dumps(explanation, indent=1))
    else:
        print_explanation(explanation, Console())
    return 0


# ---- the explanation, as plain data


def explain_config(config: Config, ranks: int) -> dict[str, Any]:
    """Everything that the command shows, as plain data."""
    model, facts = config.model, expected_facts(config)
    dense_grid, expert_grid = fold_into_grids(ranks, config.parallel)
    layers = distinct_layers(model)
    kernels = kernel_choices(config, layers, facts)
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
        "layers": [describe_layer(layer, config) for layer in layers],
        "dispatcher": dispatcher_choice(config, ranks, facts),
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


def distinct_layers(model: ModelConfig) -> list[LayerKind]:
    """Embedding, each kind of block, each kind of MTP layer, and head, with their counts."""
    blocks: Counter[tuple[str, tuple[StepSpec, ...]]] = Counter()
    for number in range(model.layers):
        title = "MoE layer" if is_moe_layer(model, number) else "dense layer"
        blocks[title, tuple(block_step_specs(model, number))] += 1
    for depth in range(model.mtp):
        blocks["layer ahead", tuple(mtp_step_specs(model, depth))] += 1
    kinds = [LayerKind(title, count, list(steps)) for (title, steps), count in blocks.items()]
    embedding = LayerKind("embedding", 1, [embed_step(model)])
    head = LayerKind("head", 1, [predict_step(model)])
    return [embedding, *kinds, head]


def describe_layer(layer: LayerKind, config: Config) -> dict[str, Any]:
    steps = [describe_step(step, config) for step in layer.steps]
    return {"kind": layer.title, "count": layer.count, "steps": steps}


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


def pipeline_placement(config: Config) -> dict[str, Any]:
    """The stages of each pipeline rank, with the pieces that lie on them."""
    layout = pipeline_layout(config)
    ranks: list[list[str]] = [[] for _ in range(config.parallel.pp)]
    for stage, rank in enumerate(rank_of_each_stage(config)):
        ranks[rank].append(f"{stage}: {layout.stages[stage]}")
    return {"schedule": config.pipeline.schedule, "layout": str(layout), "ranks": ranks}


def dispatcher_choice(config: Config, ranks: int, facts: Facts) -> dict[str, str]:
    element_bytes = BYTES_PER_ELEMENT[facts.dtype]
    name, why = price.cheapest_dispatcher(config, min(ranks, NODE_SIZE), element_bytes)
    return {"name": name, "why": why}


def kernel_choices(config: Config, layers: list[LayerKind], facts: Facts) -> dict[str, dict[str, str]]:
    """The implementation of each op that the run calls, in the order of the catalog."""
    forced = forced_implementations(config.kernels.force)
    used = ops_of_run(config, layers)
    return {op: kernel_choice(op, facts, forced) for op in CATALOG if op in used}


def ops_of_run(config: Config, layers: list[LayerKind]) -> set[str]:
    ops = set(OPTIMIZER_OPS)
    for layer in layers:
        for step in layer.steps:
            ops.update(step.ops)
    if config.parallel.cp > 1 and config.parallel.context in ("ring", "hierarchical"):
        ops |= RING_OPS
    return ops


def kernel_choice(op: str, facts: Facts, forced: dict[str, str]) -> dict[str, str]:
    name, why = pick_implementation(op, facts, forced.get(op))
    return {"implementation": name, "why": why}


# ---- the explanation, printed


def print_explanation(explanation: dict[str, Any], console: Console) -> None:
    console.print(model_headline(explanation))
    for name, sizes in explanation["grids"].items():
        axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        console.print(f"{name} grid: {axes}")
    if explanation["pipeline"]:
        print_pipeline(explanation["pipeline"], console)
    dispatcher = explanation["dispatcher"]
    console.print(f"dispatcher (on nodes of at most {NODE_SIZE} ranks): {dispatcher['name']} ({dispatcher['why']})")
    console.print(step_table(explanation["layers"]))
    console.print(kernel_table(explanation))
    console.print(region_table(explanation["regions"]))


def model_headline(explanation: dict[str, Any]) -> str:
    name, facts = escape(explanation["name"]), explanation["facts"]
    parameters = human_readable(explanation["parameters"])
    ahead = mtp_parameters_note(explanation["parameters_ahead"])
    active = human_readable(explanation["active_parameters"])
    flops = human_readable(explanation["train_flops_per_token"])
    sizes = f"{parameters} parameters{ahead}, {active} active"
    work = f"{flops} FLOPs a token to train at length {explanation['seq_len']}"
    return f"[bold]{name}[/bold]: {sizes}, {work}; on {facts['device']} in {facts['dtype']}"


def print_pipeline(pipeline: dict[str, Any], console: Console) -> None:
    console.print(escape(f"pipeline: {pipeline['schedule']}, {pipeline['layout']}"))
    for rank, stages in enumerate(pipeline["ranks"]):
        console.print(escape(f"  rank {rank} holds stage {', '.join(stages)}"))


def step_table(layers: list[dict[str, Any]]) -> Table:
    table = Table("where", "step", "lane", "shapes", title="steps (T tokens, R rows of experts)", title_justify="left")
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs/token", justify="right")
    for layer in layers:
        title = f"{layer['count']} x {layer['kind']}" if layer["count"] > 1 else layer["kind"]
        for step in layer["steps"]:
            table.add_row(title, *step_cells(step))
            title = ""  # the layer's title stands on its first step only
        table.add_section()
    return table


def step_cells(step: dict[str, Any]) -> list[str]:
    lane = "[magenta]comm[/magenta]" if step["lane"] == "comm" else step["lane"]
    parameters, flops = step["parameters"], step["forward_flops_per_token"]
    numbers = [human_readable(number) if number else "" for number in (parameters, flops)]
    return [step["step"], lane, step["shapes"], *numbers]


def region_table(regions: dict[str, Any]) -> Table:
    table = Table("region", "where", "what", title="memory regions", title_justify="left")
    for name, region in regions["present"].items():
        table.add_row(name, region["place"], region["meaning"])
    for name, reason in regions["absent"].items():
        table.add_row(name, "absent", escape(reason))
    return table


def kernel_table(explanation: dict[str, Any]) -> Table:
    table = Table("operation", "used in", "kernel", "why", title="kernels", title_justify="left")
    for op, choice in explanation["kernels"].items():
        users = steps_that_use(op, explanation["layers"])
        table.add_row(op, ", ".join(users), choice["implementation"], choice["why"])
    return table


def steps_that_use(op: str, layers: list[dict[str, Any]]) -> list[str]:
    """The names of the steps with this op. An op of no step belongs to the optimizer or to context parallelism."""
    users = [step["step"] for layer in layers for step in layer["steps"] if op in step["ops"]]
    if not users:
        return ["optimizer" if op in OPTIMIZER_OPS else "attend"]
    return list(dict.fromkeys(users))


def mtp_parameters_note(parameters: int) -> str:
    return f" (and {human_readable(parameters)} to predict further tokens)" if parameters else ""


def human_readable(number: float) -> str:
    """46702792704 -> 46.7 G."""
    for size, letter in NUMBER_SUFFIXES:
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"
