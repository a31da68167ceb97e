"""`moefold explain`: a model's steps with lanes, shapes, parameters and FLOPs, and the kernels a run would use.

Torch-free: it answers in a fraction of a second, on any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any, NamedTuple

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moefold.anatomy.adapters import adapter_parameters, adapters_of_all_ranks, run_flops_per_token
from moefold.anatomy.captured_steps import captured_runs
from moefold.anatomy.exchanged_products import products_in_exchanges
from moefold.anatomy.frozen_base import base_size_of_all_ranks
from moefold.anatomy.host_experts import experts_on_host
from moefold.anatomy.model_totals import active_parameters, mtp_parameters, total_parameters
from moefold.anatomy.product_formats import experts_recipe, product_formats, recipe_in_words, storage_in_words
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
from moefold.anatomy.tape_obstacles import tape_obstacles
from moefold.anatomy.update_groups import frozen_parameters, trainable_weights, update_groups
from moefold.bench.report import show_report
from moefold.config.lora_rules import has_blocks
from moefold.config.memory_regions import entries_of_expert_weights, ranges_in_words
from moefold.config.open_names import ATTENTION_NAMES, OPTIMIZER_NAMES
from moefold.config.optimizer_groups import parse_groups, refuse_idle_groups
from moefold.config.precision_recipes import RECIPE_SPECS, is_fp8
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import RULES
from moefold.config.run import BLOCK_TYPES, TRAINED, Config, ModelConfig, OptimConfig, ShardConfig
from moefold.data.dynamic_context import context_shape
from moefold.data.run_corpus import foretold_cuts
from moefold.data.trained_vocabulary import READ_CHARACTERS
from moefold.dispatch import price
from moefold.dispatch.room_sizes import head_room, projection_room, tokens_per_exchange
from moefold.kernels.catalog import CATALOG, forced_implementations, host_readers, pick_implementation
from moefold.kernels.facts import BYTES_PER_ELEMENT, Facts, expected_facts, shares_sequences
from moefold.kernels.optimizer.choices import CHOICES as OPTIMIZER_CHOICES
from moefold.kernels.quantise.choices import CHOICES as QUANTISE_CHOICES
from moefold.layout.fold import Partition, fold_into_grids, split_by_node, split_outermost
from moefold.plan.machine.known_links import first_gpu_name, known_links
from moefold.plan.machine.this_machine import this_machine
from moefold.plan.memory.host_weights import host_weights
from moefold.plan.memory.machine_fit import MachineFit, RanksHere, choices_of_run, list_parts
from moefold.plan.memory.peak_memory import bytes_of_whole_units, fullest_rank, plan_memory, stage_counts
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.plan.memory.region_savings import offloaded_layers, recomputed_layers, saved_by_regions, sent_again
from moefold.plan.memory.resident import resident_state
from moefold.plan.memory.run_setting import GIB, build_run_setting
from moefold.plan.memory.save_window import bounded_saves
from moefold.plan.time.run_context import choose_context
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import check_rank_count, read_options
from moefold.presets.recipe import resolve_recipe
from moefold.printable import human_readable

OPTIMIZER_OPS = {"add_squares", "adamw"}
STASH_OPS = {"push_rows", "pop_rows"}
# of the dispatcher symmetric
PEER_OPS = {"announce_choices", "arrange_arrivals", "push_peer_rows", "sum_rows_into", "sum_peer_rows"}
PEER_OPS |= {"spread_rows", "write_choices_into"}
TILE_OPS = ("multiply_arrivals", "return_products")  # of experts inside exchanges
PROJECTION_OPS = {"multiply_gathered", "scatter_products"}  # of projections inside exchanges
HEAD_OPS = {"project_to_heads", "project_from_heads"}  # of those to and from heads
MUON_OPS = {"muon_momentum", "newton_schulz", "muon_weights"}
RING_OPS = {"attention_block", "attention_block_backward"}  # added by a ring of context-parallel ranks
FP8_STORAGE_OPS = {"share_maxima", "cast_share", "transpose_values"}  # added by weights that are stored in FP8 alone
FP8_PRODUCT_OPS = {"fp8_product", "fp8_weight_product", "adamw_blocks"}
MICRO_OPS = {  # added by recipes that are emulated
    "mxfp8": {"quantise_mx", "dequantise_mx"},
    "nvfp4": {"quantise_nv", "round_nv", "dequantise_nv", "line_maxima", "hadamard_blocks", "scale_lines"},
}
BASE_OPS = {"dequantise_rows"}  # added by a base in blocks
EVERY_MICRO_OP = MICRO_OPS["mxfp8"] | MICRO_OPS["nvfp4"]
FP8_OPS = {*QUANTISE_CHOICES, *FP8_PRODUCT_OPS} - FP8_STORAGE_OPS - EVERY_MICRO_OP - BASE_OPS  # added by FP8 recipes
FP8_EXPERT_OPS = {  # and by experts in FP8 as one function
    "fp8_swiglu_product",
    "fp8_dswiglu_product",
    "quantise_swiglu_gradient",
    "quantise_delayed_gradient",
    "tile_weight_product",
}
MIB = 2**20
NODE_SIZE = 8  # ranks of one node, where the environment does not say
SYNC_ORDER = "gradients are summed inside nodes, then across, and weights gathered across, then inside"
CLIPPED_BY = {
    "previous": "the norm of all gradients of the step before",
    "unit": "the norm of its own gradients",
}
ROUTERS_CHOOSE = "chosen by the routers"
TAPED = (
    "a tape: the ops of the fourth step are recorded, and replayed in later ones, unless they read values on the host "
    "or are too many, as the run says then"
)
TAPED_BY_TWO = (
    f"{TAPED}; each op has one thread, and two processes share the replays, where the machine has two cores, room in "
    "/dev/shm and something to gain"
)
CAPTURED = "forward, backward, clipping and update of all microbatches, captured after some eager steps"
EAGER = "validation, samples, profiled steps, steps that record FP8 operands"
STATIC_EAGER = "all other steps, clipping, update, validation, samples, profiled steps"
Description = dict[str, Any]


@dataclass(frozen=True)
class ExplainOptions:
    """Show a model's steps, and the kernels and layout of a run of it."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """A preset, or a YAML file of configuration keys."""
    nproc: int = 1
    """The number of ranks of the run."""
    json: bool = False
    """Print JSON instead of tables."""


FORM = CommandForm("explain", ExplainOptions, config_keys=True)


KernelChoice = Mapping[str, str]  # implementation, why


class LikeLayers(NamedTuple):
    """Layers of a model with the same steps."""

    title: str
    count: int
    steps: list[StepSpec]


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(FORM, argv)
    ranks = check_rank_count(options.nproc)
    config = resolve_recipe(options.recipe, overrides, ranks)
    explanation = explain_config(config, ranks)
    return show_report(explanation, options.json, print_explanation)


# ---- the explanation, as plain data


def explain_config(config: Config, ranks: int) -> Description:
    """Everything that the command shows, as plain data."""
    model = config.model
    facts = expected_facts(config)
    config, why = choose_context(config, ranks, facts.device, min(ranks, NODE_SIZE))
    facts = expected_facts(config)
    dense_grid, expert_grid = fold_into_grids(ranks, config.parallel)
    grids = {"dense": dense_grid.sizes, "expert": expert_grid.sizes}
    layers = distinct_layers(model)
    kernels = kernel_choices(config, layers, facts)
    return {
        "name": config.name,
        "parameters": total_parameters(model),
        "active_parameters": active_parameters(model),
        "parameters_ahead": mtp_parameters(model),
        "train_flops_per_token": run_flops_per_token(config),
        "adapters": describe_adapters(config),
        "seq_len": config.data.seq_len,
        "vocabulary": describe_vocabulary(config),
        "packing": describe_packing(config),
        "cuts": foretold_cuts(config),
        "context": describe_context(config, ranks),
        "mechanism": {"name": config.parallel.context, "why": why} if why else None,
        "objective": describe_objective(config),
        "facts": asdict(facts),
        "grids": grids,
        "pipeline": pipeline_placement(config),
        "layers": [describe_layer(layer, config) for layer in layers],
        "products": describe_products(config, facts),
        "routing": routing_source(config),
        "dispatcher": dispatcher_choice(config, ranks, facts),
        "clones": price.clones_in_words(config),
        "fp8_on_the_wire": formats_sent(config),
        "beside_exchanges": work_beside_exchanges(config, kernels),
        "tiles": tiles_in_exchanges(config, kernels, facts),
        "kernels": kernels,
        "regions": describe_regions(config, kernels),
        "recompute": describe_recompute(config, ranks),
        "experts_on_host": describe_host_experts(config, ranks),
        "stash": describe_stash(config, ranks),
        "graphs": describe_graphs(config, ranks, facts, kernels),
        "optimizer": optimizer_description(config),
        "shard": describe_sharding(config, ranks),
        "memory": planned_memory(config, ranks),
        "saves": describe_saves(config, ranks),
    }


def describe_vocabulary(config: Config) -> str | None:
    """How a run comes to the vocabulary that it trains; None where it trains none."""
    if config.data.tokenizer != TRAINED:
        return None
    entries = f"at most {config.model.vocab:,} byte pairs"
    read = f"at most {READ_CHARACTERS / 1e6:.1f}M characters of the text of {config.data.source}"
    return f"{entries}, trained by the run at its start on {read}, of which none is held out"


def describe_packing(config: Config) -> str | None:
    """What a packed sequence is; None where sequences are windows."""
    data = config.data
    if data.packing == "windows":
        return None
    fit = data.packing.replace("_", "-")
    batch = f"{config.train.global_batch} bins a batch"
    if data.batch_of == "samples":
        most = f"at most {config.train.global_batch}, which times and the memory planned here assume"
        batch = f"as many as {config.train.global_batch} documents a batch fill ({most})"
    is_compared = data.format == "preferences"
    longer = "longer preferences are refused" if is_compared else "longer documents are cut"
    return f"whole documents by {fit} in bins of {data.seq_len} tokens, {batch}; {longer}; padding has no label"


def describe_context(config: Config, ranks: int) -> str | None:
    """Which ranks share a sample; None where those of the grid share every sequence."""
    if config.parallel.context_sizes == "fixed":
        return None
    parallel = config.parallel
    shape = context_shape(config, ranks // (parallel.tp * parallel.pp))
    sizes = ", ".join(map(str, shape.sizes))
    return (
        f"the samples of a batch are grouped anew on groups of {sizes} of the {shape.ranks} dp x cp ranks, by "
        f"{parallel.context}; each gets the least that fits, {shape.limit} tokens a rank; microbatches are as many as "
        f"take the least FLOPs of the slowest ranks, with {sending_in_words(config)}; "
        "the memory planned here is that of the size that needs most"
    )


def sending_in_words(config: Config) -> str:
    sending = config.parallel.context_sending
    if not sending:
        return "what groups send, as measured at the start"
    return f"sending as attention to so many keys a token: {' '.join(sending)} (parallel.context_sending)"


def describe_objective(config: Config) -> str | None:
    """What a run learns; None where that is the next token."""
    if config.train.objective == "next_token":
        return None
    copy = "a frozen copy of the first weights" if not config.lora.rank else "the base without its adapters"
    return f"dpo with beta {config.train.dpo_beta:g}; the reference is {copy}, with a forward pass of its own each step"


def describe_sharding(config: Config, ranks: int) -> Description | None:
    """Weights on the device of the first pipeline rank, between steps and of units that are whole in steps; None where
    every rank has all weights and shares are in one copy."""
    if config.shard == ShardConfig() or config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return None
    setting = build_run_setting(config, ranks, choices_of_run(config))
    first = stages_by_rank(config)[0]
    counts = stage_counts(setting, first)
    held = resident_state(setting, first, counts)
    on_host = host_weights(setting, first).on_host
    units = 0.0
    if config.shard.mode == "zero3":
        units = bytes_of_whole_units(setting, first)
    return {
        "mode": config.shard.mode,
        "copies": config.shard.replicas,
        "sync": sync_in_words(config, ranks),
        "weight_bytes": held.weights - on_host,
        "unit_bytes": units,
    }


def sync_in_words(config: Config, ranks: int) -> str | None:
    """How gradients are summed and weights gathered in two levels; None where they are in one."""
    if config.shard.sync == "flat":
        return None
    dense, expert = fold_into_grids(ranks, config.parallel)
    replicas = {"dense weights": dense.partition("dp", "cp"), "experts": expert.partition("edp")}
    by_weights = [f"{name} {levels_in_words(partition, config)}" for name, partition in replicas.items()]
    return f"{SYNC_ORDER}; {', '.join(by_weights)}"


def levels_in_words(partition: Partition, config: Config) -> str:
    shares, _ = split_outermost(partition, config.shard.replicas)
    inside, across = split_by_node(shares, NODE_SIZE)
    if not inside or not across:
        return "in one level, since their replicas lie in one node or in a node each"
    near, far = (prod(digit.size for digit in digits) for digits in (inside, across))
    return f"over {near} ranks of each of {far} nodes"


def planned_memory(config: Config, ranks: int) -> Description | None:
    """The planned memory of the fullest rank, on a machine such as this; None for attention of another package."""
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return None
    choices = choices_of_run(config)
    fullest = fullest_rank(plan_memory(config, ranks, choices))
    needed = fullest.needed if choices.device == "cuda" else fullest.total
    return {"bytes": needed, "parts": list_parts([fullest])}


def describe_saves(config: Config, ranks: int) -> Description | None:
    """Bytes of a node's files of a checkpoint, and the host memory that they take on a machine such as this; None for
    attention of another package."""
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return None
    node = min(ranks, NODE_SIZE)
    fit = bounded_saves(MachineFit(config, RanksHere(0, node, ranks), this_machine()))
    local = fit.local_ranks(0)
    return {
        "every": config.checkpoint.every,
        "file_bytes": fit.saved_bytes(local),
        "host_bytes": fit.window_bytes(local),
        "in_pieces": fit.saves_in_pieces(local),
    }


def describe_regions(config: Config, kernels: Mapping[str, KernelChoice]) -> Description:
    """The memory regions that the model has, with their places, and those that it lacks, with the reasons."""
    names = {op: choice["implementation"] for op, choice in kernels.items()}
    absent = absent_regions(config.model, names)
    if "heads" in config.parallel.tiles:
        absent["swap"] = "heads arrive inside the projection back (parallel.tiles heads)"
    present: Description = {}
    for name, region in regions_of(config.model, names).items():
        if name not in absent:
            present[name] = {"place": region.place, "meaning": region.meaning}
    return {"present": present, "absent": absent}


def describe_recompute(config: Config, ranks: int) -> Description | None:
    """What recomputing each region saves, which regions the run recomputes and offloads, and what it sends again; None
    for attention of another package."""
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        return None
    saved = saved_by_regions(config, ranks, choices_of_run(config))
    return {
        "saves": saved,
        "rebuilt": recomputed_layers(config),
        "sent_again": sent_again(config),
        "offloaded": offloaded_layers(config),
    }


def describe_host_experts(config: Config, ranks: int) -> Description | None:
    """Bytes of the first pipeline rank's experts on the host, and of those on its device at a time; None where all are
    on the device."""
    if not entries_of_expert_weights(config.memory.offload):
        return None
    wide = BYTES_PER_ELEMENT[expected_facts(config).dtype]
    layers = [experts.layer for experts in experts_on_host(config, wide)]
    setting = build_run_setting(config, ranks, choices_of_run(config))
    first = host_weights(setting, stages_by_rank(config)[0])
    return {"layers": ranges_in_words(layers), "bytes": first.on_host, "device_bytes": first.on_device}


def host_experts_line(experts: Description) -> str:
    held = f"{human_bytes(experts['bytes'])} of the first rank in host memory"
    here = f"at most {human_bytes(experts['device_bytes'])} of them on the device"
    return (
        f"experts of layers {experts['layers']} on the host: {held}, {here}; a layer's are fetched while the one "
        "before it computes, in forward and again in backward"
    )


def describe_stash(config: Config, ranks: int) -> Description | None:
    """The pool of experts' rows, and what the planner expects in it, except with attention of another package; None
    where rows lie in tensors of their own."""
    memory = config.memory
    if memory.stash == "none":
        return None
    stash: Description = {"order": memory.stash, "pool_bytes": memory.stash_gib * GIB, "planned_bytes": None}
    if config.model.attention.kind in ATTENTION_NAMES.builtin:
        stashed = [rank.stashed for rank in plan_memory(config, ranks, choices_of_run(config))]
        stash["planned_bytes"] = max(stashed)
    return stash


def describe_graphs(config: Config, ranks: int, facts: Facts, kernels: Mapping[str, KernelChoice]) -> Description:
    """What is captured, what stays eager, and what stands in the way of one graph of the whole step."""
    graphs = config.memory.graphs
    described: Description = {"graphs": graphs}
    if graphs == "whole":
        described |= {"captured": CAPTURED, "eager": EAGER}
    if graphs == "static":
        described |= {"captured": captured_steps_in_words(config.model), "eager": STATIC_EAGER}
    described["in_the_way"] = obstacles_to_whole_graph(config, ranks, facts, kernels)
    if facts.device == "cpu" and config.memory.tape:
        described["in_the_way_of_a_tape"] = tape_obstacles(config, ranks)
        described["tape_processes"] = config.memory.tape_processes
    return described


def captured_steps_in_words(model: ModelConfig) -> str:
    names: dict[str, None] = {}
    for layer in distinct_layers(model):
        names |= dict.fromkeys(captured_runs(layer.steps))
    listed = ", ".join(names)
    return f"{listed}: forward and backward of each, once for every microbatch in flight, after some eager steps"


def obstacles_to_whole_graph(
    config: Config,
    ranks: int,
    facts: Facts,
    kernels: Mapping[str, KernelChoice],
) -> list[str]:
    """Rules that `memory.graphs whole` would break on this machine, and kernels that read values on the host."""
    train = replace(config.train, device=facts.device, precision=facts.dtype)
    memory = replace(config.memory, graphs="whole")
    case = ConfigOnRanks(replace(config, train=train, memory=memory), ranks)
    rules = [rule for rule in RULES if "memory.graphs" in rule.reads]
    problems = [rule.says(case) for rule in rules if not rule.holds(case)]
    if facts.device != "cuda":  # no other kernels run there
        return problems
    chosen = {op: choice["implementation"] for op, choice in kernels.items()}
    return problems + [f"kernel {reader} reads values on the host" for reader in host_readers(chosen, has_blocks(case))]


def distinct_layers(model: ModelConfig) -> list[LikeLayers]:
    """Embedding, each kind of block, each kind of MTP layer, and head, with their counts."""
    blocks: Counter[tuple[str, tuple[StepSpec, ...]]] = Counter()
    for number in range(model.layers):
        title = "MoE layer" if is_moe_layer(model, number) else "dense layer"
        steps = tuple(block_step_specs(model, number))
        blocks[title, steps] += 1
    for depth in range(model.mtp):
        steps = tuple(mtp_step_specs(model, depth))
        blocks["layer ahead", steps] += 1
    kinds: list[LikeLayers] = []
    for (title, steps), count in blocks.items():
        kinds.append(LikeLayers(title, count, list(steps)))
    embedding = LikeLayers("embedding", 1, [embed_step(model)])
    head = LikeLayers("head", 1, [predict_step(model)])
    return [embedding, *kinds, head]


def describe_layer(layer: LikeLayers, config: Config) -> Description:
    steps = [describe_step(step, config) for step in layer.steps]
    return {"kind": layer.title, "count": layer.count, "steps": steps}


def describe_step(step: StepSpec, config: Config) -> Description:
    return {
        "step": step.name,
        "lane": step.lane,
        "static": step.static,
        "shapes": step.shapes,
        "parameters": step.parameters,
        "forward_flops_per_token": step.flops(config.data.seq_len),
        "ops": list(step.ops),
    }


def describe_products(config: Config, facts: Facts) -> Description:
    """The recipe of every product by kind of layer, and what each recipe means."""
    kinds: list[Description] = []
    for kind, count in product_formats(config).items():
        kinds.append({"count": count, **asdict(kind)})
    used = dict.fromkeys(kind["recipe"] for kind in kinds)
    has_formats = facts.multiplies_micro_formats
    recipes = {recipe: recipe_in_words(recipe, config.precision, facts.dtype, has_formats) for recipe in used}
    storage = storage_in_words(config.precision, facts.dtype)
    return {"recipes": recipes, "kinds": kinds, "storage": storage}


def pipeline_placement(config: Config) -> Description | None:
    """The stages of each pipeline rank, with the pieces that lie on them; None without a pipeline."""
    if config.parallel.pp == 1:
        return None
    layout = pipeline_layout(config)
    ranks: list[list[str]] = [[] for _ in range(config.parallel.pp)]
    for stage, rank in enumerate(rank_of_each_stage(config)):
        ranks[rank].append(f"{stage}: {layout.stages[stage]}")
    return {
        "schedule": config.pipeline.schedule,
        "layout": str(layout),
        "ranks": ranks,
    }


def routing_source(config: Config) -> str:
    """Who chooses the experts of a token, and where the choices are recorded."""
    train = config.train
    source = ROUTERS_CHOOSE
    if train.replay_routing:
        source = f"replayed from {train.replay_routing}; weights and gradients come from the routers' scores"
    if train.record_routing:
        source += f"; recorded to {train.record_routing}"
    return source


def dispatcher_choice(config: Config, ranks: int, facts: Facts) -> dict[str, str]:
    element_bytes = BYTES_PER_ELEMENT[facts.dtype]
    node_ranks = min(ranks, NODE_SIZE)
    links = known_links(facts.device, first_gpu_name())
    name, why = price.cheapest_dispatcher(config, node_ranks, element_bytes, links)
    if config.parallel.dispatcher == "auto" and config.parallel.ep > 1:
        why += "; a run measures its links"
    return {"name": name, "why": why}


FP8_WAYS = {  # what a key of the section `precision` lets ranks send in FP8
    "dispatch": "tokens to experts (e4m3, a scale for 128 values of a token)",
    "combine_gradient": "gradients of experts' sums ({}, a scale for 128 values of a token)",
    "tp_sums": "summands of attention and dense MLPs over tp (e4m3, a scale for a token; summed in fp32)",
    "tp_sum_gradients": "gradients of those sums over tp (e4m3, a scale for 128 tokens of a channel)",
}
FP8_GRADIENTS = "gradients to the ranks that update their weights (e4m3, a scale for 128 values; summed in fp32)"
COPIES_IN_FP32 = "; between copies of shares their sums are sent in fp32"


def formats_sent(config: Config) -> list[str]:
    """What ranks send in FP8 instead of the model's dtype, in words."""
    sent: list[str] = []
    for key, text in FP8_WAYS.items():
        format = getattr(config.precision, key)
        if format != "plain":
            sent.append(text.format(format))
    if config.optim.gradient_reduce == "fp8":
        others = COPIES_IN_FP32 if config.shard.replicas > 1 else ""
        sent.append(FP8_GRADIENTS + others)
    if config.precision.storage == "fp8":
        sent.append("weights to replicas (as they are stored)")
    return sent


def work_beside_exchanges(config: Config, kernels: dict[str, KernelChoice]) -> str:
    """What a microbatch computes while its own tokens are sent, in words; empty if nothing."""
    parallel = config.parallel
    if parallel.ep * parallel.etp == 1:
        return ""
    beside: list[str] = []
    if config.model.moe.shared_ffn:
        beside.append("shared experts, beside plan and dispatch in forward and beside combine in backward")
    if parallel.row_chunks > 1:
        tokens = tokens_per_exchange(config)
        beside.append(f"experts of its other row chunks ({parallel.row_chunks} of up to {tokens} tokens of a rank)")
    if "experts" in parallel.tiles:
        beside.append(tiled_experts_in_words(config, kernels))
    return "; ".join(beside)


def tiled_experts_in_words(config: Config, kernels: dict[str, KernelChoice]) -> str:
    first, second = (kernels[op]["implementation"] for op in TILE_OPS)
    how = f"of a kernel's programs {config.parallel.tile_senders} send"
    if "reference" in (first, second):
        how = "references exchange and multiply one behind the other"
    return (
        f"both products of its routed experts in forward, tile by tile (parallel.tiles): multiply_arrivals ({first}) "
        f"while tokens arrive, return_products ({second}) while results return; {how}"
    )


def tiles_in_exchanges(
    config: Config,
    kernels: Mapping[str, KernelChoice],
    facts: Facts,
) -> Mapping[str, Sequence[str]] | None:
    """Dense products whose tiles are multiplied while rows travel, by which kernels, and what goes by collectives; None
    where all does. A rank has those of projections over tp or those of heads over cp."""
    tiles = set(config.parallel.tiles)
    if tiles.isdisjoint(("projections", "heads")):
        return None
    products, apart = products_in_exchanges(config)
    used = {op: kernels[op]["implementation"] for op, *_ in products}
    inside = [f"{beside} {', '.join(names)} ({op}: {used[op]})" for op, beside, names in products]
    if "reference" in used.values():
        inside.append("references exchange and multiply one behind the other, not while rows travel")
    else:
        inside.append(f"{config.parallel.tile_senders} programs of a kernel send, all others multiply")
    find_room = head_room if "heads" in tiles else projection_room
    room = find_room(config, BYTES_PER_ELEMENT[facts.dtype])
    rows = room.rows * room.ranks
    inside.append(f"{room.arena_bytes / MIB:,.1f} MiB of rooms of a rank, for {rows} rows of {room.ranks} ranks")
    return {"inside": inside, "apart": [*apart, "passes without backward, such as validation"]}


def kernel_choices(config: Config, layers: list[LikeLayers], facts: Facts) -> dict[str, KernelChoice]:
    """The implementation of each op that the run calls, in the order of the catalog."""
    forced = forced_implementations(config.kernels.force)
    facts = replace(facts, recipe=experts_recipe(config))
    used = ops_of_run(config, layers) | fp8_ops_of_run(config, facts) | micro_ops_of_run(config)
    used |= payload_ops_of_run(config)
    choices: dict[str, KernelChoice] = {}
    for op in CATALOG:
        if op in used:
            name, why = pick_implementation(op, facts, forced.get(op))
            choices[op] = {"implementation": name, "why": why}
    return choices


def fp8_ops_of_run(config: Config, facts: Facts) -> set[str]:
    if not any(is_fp8(kind.recipe) for kind in product_formats(config)):
        return set()
    forced = forced_implementations(config.kernels.force)
    experts, _ = pick_implementation("expert_mlp", facts, forced.get("expert_mlp"))
    ops = set(FP8_OPS)
    if experts == "fp8":
        ops |= FP8_EXPERT_OPS
    if config.precision.storage == "fp8":
        ops |= FP8_STORAGE_OPS
    return ops


def payload_ops_of_run(config: Config) -> set[str]:
    """Ops of what ranks send in FP8."""
    precision = config.precision
    of_rows = (precision.dispatch, precision.combine_gradient, precision.tp_sums)
    ops: set[str] = set()
    if set(of_rows) != {"plain"} or config.optim.gradient_reduce == "fp8":
        ops |= {"rows_to_payload", "sum_payload_rows"}
    if precision.tp_sum_gradients != "plain":
        ops |= {"channels_to_payload", "payloads_to_channels"}
    return ops


def micro_ops_of_run(config: Config) -> set[str]:
    ops: set[str] = set()
    for kind in product_formats(config):
        format = RECIPE_SPECS[kind.recipe].format
        ops |= MICRO_OPS.get(format, set())
    if not config.precision.hadamard:
        ops.discard("hadamard_blocks")
    return ops


def ops_of_run(config: Config, layers: list[LikeLayers]) -> set[str]:
    ops = set(OPTIMIZER_OPS)
    if "muon" in rules_of_run(config):
        ops |= MUON_OPS
    optim = config.optim
    decoded = {optim.moments, optim.second_moment}
    if config.precision.storage == "fp8":
        decoded.add(optim.main)  # FP8 is made of it
    if decoded & BLOCK_TYPES:
        ops.add("decode_moment")
    if optim.gradients in BLOCK_TYPES:
        ops.add("add_in_blocks")
    if config.optim.qk_clip:
        ops.add("largest_logit")
    if config.memory.stash != "none":
        ops |= STASH_OPS
    if config.lora.base != "plain":
        ops |= BASE_OPS
    if config.parallel.dispatcher == "symmetric":
        ops |= PEER_OPS
    if "experts" in config.parallel.tiles:
        ops.update(TILE_OPS)
    if "projections" in config.parallel.tiles:
        ops |= PROJECTION_OPS
    if "heads" in config.parallel.tiles:
        ops |= HEAD_OPS
    for layer in layers:
        for step in layer.steps:
            ops.update(step.ops)
    if config.train.objective == "dpo":
        ops.remove("cross_entropy")
        ops.add("token_losses")
    if shares_sequences(config) and config.parallel.context in ("ring", "hierarchical"):
        ops |= RING_OPS
    return ops


def rules_of_run(config: Config) -> list[str]:
    """The optimizer's rules: the default, and those of parameter groups."""
    groups = parse_groups(config.optim.groups)
    named = [group.rule for group in groups if group.rule]
    return list(dict.fromkeys([config.optim.rule, *named]))


def optimizer_description(config: Config) -> Description:
    """Rule, rate, decay and parameters of each entry of `optim.groups`, and of what no entry matches. What a run
    refuses of them is refused."""
    optim = config.optim
    if config.model.attention.kind in ATTENTION_NAMES.builtin and optim.groups:
        names = [weight.name for weight in trainable_weights(config)]
        refuse_idle_groups(parse_groups(optim.groups), names)
    groups = [asdict(group) for group in update_groups(config)]
    frozen = frozen_parameters(config)
    described: Description = {"rule": optim.rule, "says": OPTIMIZER_NAMES.says(optim.rule)}
    return {**described, "groups": groups, "frozen": frozen, "ways": ways_of_updates(optim)}


def ways_of_updates(optim: OptimConfig) -> list[str]:
    """When units are updated, what clips them, and where states are, in words; nothing for an ordinary update."""
    ways: list[str] = []
    if optim.when == "backward":
        ways.append(
            "updates inside backward: of each unit (a layer, the embedding, the head) as soon as its gradients are "
            "complete, in the last microbatch of a step; they are freed then"
        )
    if optim.clip_by != "global":
        ways.append(f"clipping: of each unit by {CLIPPED_BY[optim.clip_by]}")
    if optim.states == "host" and optim.update == "device":
        ways.append(
            "states in host memory: moments, momentum and main weights visit the device for the update, chunk by "
            f"chunk; up to {optim.states_window_gib:g} GiB of them are fetched ahead (three chunks at least)"
        )
    if optim.update == "host":
        ways.append("updates on the host: gradients come to AdamW's states there chunk by chunk, and weights go back")
    return ways


# ---- the explanation, printed


def print_explanation(explanation: Description) -> None:
    console = Console()
    console.print(model_headline(explanation))
    if explanation["adapters"]:
        console.print(adapter_line(explanation["adapters"]))
    if explanation["vocabulary"]:
        console.print(escape(f"vocabulary: {explanation['vocabulary']}"))
    if explanation["packing"]:
        console.print(escape(f"packing: {explanation['packing']}"))
    if explanation["cuts"]:
        console.print(escape(f"samples: {explanation['cuts']}"))
    if explanation["context"]:
        console.print(escape(f"dynamic context: {explanation['context']}"))
    if explanation["objective"]:
        console.print(escape(f"objective: {explanation['objective']}"))
    mechanism = explanation["mechanism"]
    if mechanism:
        console.print(f"context (on nodes of at most {NODE_SIZE} ranks): {mechanism['name']} ({mechanism['why']})")
    for name, sizes in explanation["grids"].items():
        axes = [f"{axis} {size}" for axis, size in sizes.items()]
        console.print(f"{name} grid: {' x '.join(axes)}")
    if explanation["pipeline"]:
        print_pipeline(explanation["pipeline"], console)
    if explanation["routing"] != ROUTERS_CHOOSE:
        console.print(escape(f"experts of a token: {explanation['routing']}"))
    dispatcher = explanation["dispatcher"]
    console.print(f"dispatcher (on nodes of at most {NODE_SIZE} ranks): {dispatcher['name']} ({dispatcher['why']})")
    if explanation["clones"]:
        console.print(f"clones of hot experts: {explanation['clones']}")
    for text in explanation["fp8_on_the_wire"]:
        console.print(escape(f"sent in FP8: {text}"))
    if explanation["tiles"]:
        print_tiles(explanation["tiles"], console)
    if explanation["beside_exchanges"]:
        console.print(f"while its tokens are sent a microbatch computes: {explanation['beside_exchanges']}")
    print_optimizer(explanation["optimizer"], console)
    if explanation["shard"]:
        print_sharding(explanation["shard"], console)
    if explanation["experts_on_host"]:
        console.print(escape(host_experts_line(explanation["experts_on_host"])))
    if explanation["memory"]:
        print_memory(explanation["memory"], console)
    if explanation["saves"]:
        print_saves(explanation["saves"], console)
    if explanation["stash"]:
        print_stash(explanation["stash"], console)
    print_graphs(explanation["graphs"], console)
    console.print(step_table(explanation["layers"]))
    print_products(explanation["products"], console)
    console.print(kernel_table(explanation))
    console.print(region_table(explanation["regions"], explanation["recompute"]))


def print_optimizer(optimizer: Description, console: Console) -> None:
    """The ways of updates, and the rule and the groups, unless all parameters have the default rule."""
    for way in optimizer["ways"]:
        console.print(escape(way))
    if optimizer["rule"] == OptimConfig().rule and not any(group["pattern"] for group in optimizer["groups"]):
        return
    console.print(escape(f"optimizer: {optimizer['says']}"))
    console.print(group_table(optimizer["groups"]))
    names = [f"{name} ({count})" if count > 1 else name for name, count in optimizer["frozen"].items()]
    if names:
        console.print(escape(f"frozen: {', '.join(names)}"))


def group_table(groups: list[Description]) -> Table:
    title = "parameter groups (the first pattern that matches applies)"
    table = Table("parameters named", "rule", title=title, title_justify="left")
    for heading in ("peak rate", "weight decay", "parameters"):
        table.add_column(heading, justify="right")
    for group in groups:
        named = escape(group["pattern"] or "all others")
        count = human_readable(group["parameters"])
        if not group["rule"]:
            table.add_row(named, "frozen", "", "", count)
            continue
        decay = f"{group['decay']:g}"
        if group["decaying"] < group["parameters"]:
            decay += f" of {human_readable(group['decaying'])}"
        table.add_row(named, group["rule"], f"{group['lr']:g}", decay, count)
    return table


def print_sharding(shard: Description, console: Console) -> None:
    held = f"{shard['weight_bytes'] / MIB:,.1f} MiB of weights on the first rank"
    if shard["unit_bytes"]:
        held += f", and in steps the two largest units, {shard['unit_bytes'] / MIB:,.1f} MiB"
    copies = f", {shard['copies']} copies of all shares" if shard["copies"] > 1 else ""
    console.print(f"shards: {shard['mode']}{copies}; {held}")
    if shard["sync"]:
        console.print(f"on nodes of at most {NODE_SIZE} ranks {shard['sync']}")


def print_memory(memory: Description, console: Console) -> None:
    parts = f" ({memory['parts']})" if memory["parts"] else ""
    console.print(f"memory of the fullest rank, as planned: {memory['bytes'] / GIB:,.2f} GiB{parts}")


def print_saves(saves: Description, console: Console) -> None:
    if not saves["every"]:
        console.print("checkpoints: none (checkpoint.every 0)")
        return
    files = f"checkpoints: a node's files of one have {human_bytes(saves['file_bytes'])} at least"
    held = human_bytes(saves["host_bytes"])
    if saves["in_pieces"]:
        how = f"they are written in pieces, through {held} of its host memory, and updates wait for the writing"
    else:
        how = "its host memory holds them whole while they are written"
    console.print(f"{files}; {how}")


def print_stash(stash: Description, console: Console) -> None:
    pool = stash["pool_bytes"]
    planned = stash["planned_bytes"]
    text = f"stash of experts' rows: {stash['order']}, a pool of {pool / MIB:,.1f} MiB"
    if planned is not None:
        text += f", of which the planner expects {planned / MIB:,.1f} in use"
    if planned is not None and planned > pool:
        text += "; too little: steps would be run twice; set memory.stash_gib higher"
    else:
        text += "; a step whose rows do not fit is run again without it"
    console.print(escape(text))


def print_graphs(graphs: Description, console: Console) -> None:
    if "in_the_way_of_a_tape" in graphs:
        obstacles = "; ".join(graphs["in_the_way_of_a_tape"])
        taped = TAPED_BY_TWO if graphs["tape_processes"] > 1 else TAPED
        text = f"no tape of the step: {obstacles}" if obstacles else taped
        console.print(escape(text))
        return
    in_the_way = "; ".join(graphs["in_the_way"])
    if graphs["graphs"] == "static":
        text = f"CUDA graphs of steps: {graphs['captured']}; eager: {graphs['eager']}"
        console.print(escape(text))
        return
    if "captured" in graphs:
        text = f"one CUDA graph: {graphs['captured']}; eager: {graphs['eager']}"
    else:
        text = "CUDA graphs: none (memory.graphs whole would capture the step)"
    if in_the_way:
        text = f"CUDA graphs: {graphs['graphs']}; in the way of memory.graphs whole: {in_the_way}"
    console.print(escape(text))


def describe_adapters(config: Config) -> Description | None:
    """The adapters of a LoRA run; None where all weights are trained."""
    specs = adapters_of_all_ranks(config)
    if not specs:
        return None
    ranks = sorted({spec.rank for spec in specs})
    adapters: Description = {"products": len(specs), "ranks": ranks, "parameters": adapter_parameters(config)}
    adapters["magnitudes"] = sum(spec.has_magnitude for spec in specs)
    wide = BYTES_PER_ELEMENT[expected_facts(config).dtype]
    size = base_size_of_all_ranks(config, wide)
    if size.weights:
        adapters["base"] = {"format": config.lora.base, **size._asdict(), "plain_bytes": size.weights * wide}
    return adapters


def adapter_line(adapters: Description) -> str:
    ranks = ", ".join(map(str, adapters["ranks"]))
    parameters = human_readable(adapters["parameters"])
    where = f"rank {ranks} at {adapters['products']} products"
    if adapters["magnitudes"]:
        where += f", with magnitudes (DoRA) at {adapters['magnitudes']}"
    line = f"LoRA: adapters of {where}, {parameters} parameters; all other parameters are frozen"
    base = adapters.get("base")
    if base is None:
        return line
    size = f"{base['bytes'] / GIB:,.2f} GiB in place of {base['plain_bytes'] / GIB:,.2f}"
    return f"{line}, {human_readable(base['weights'])} of them in blocks of {base['format']}, {size}"


def model_headline(explanation: Description) -> str:
    name = escape(explanation["name"])
    facts = explanation["facts"]
    parameters = human_readable(explanation["parameters"])
    ahead = ""
    if explanation["parameters_ahead"]:
        ahead = f" (and {human_readable(explanation['parameters_ahead'])} to predict further tokens)"
    active = human_readable(explanation["active_parameters"])
    flops = human_readable(explanation["train_flops_per_token"])
    sizes = f"{parameters} parameters{ahead}, {active} active"
    work = f"{flops} FLOPs a token to train at length {explanation['seq_len']}"
    return f"[bold]{name}[/bold]: {sizes}, {work}; on {facts['device']} in {facts['dtype']}"


def print_tiles(tiles: Mapping[str, Sequence[str]], console: Console) -> None:
    for text in tiles["inside"]:
        console.print(escape(f"projections inside exchanges: {text}"))
    console.print(escape(f"by collectives: {'; '.join(tiles['apart'])}"))


def print_pipeline(pipeline: Description, console: Console) -> None:
    console.print(escape(f"pipeline: {pipeline['schedule']}, {pipeline['layout']}"))
    for rank, stages in enumerate(pipeline["ranks"]):
        console.print(escape(f"  rank {rank} holds stage {', '.join(stages)}"))


def step_table(layers: list[Description]) -> Table:
    caption = "steps (T tokens, R rows of experts)"
    table = Table("where", "step", "lane", "shapes", title=caption, title_justify="left")
    table.add_column("parameters", justify="right")
    table.add_column("FLOPs/token", justify="right")
    for layer in layers:
        title = layer["kind"]
        if layer["count"] > 1:
            title = f"{layer['count']} x {title}"
        for step in layer["steps"]:
            table.add_row(title, *step_cells(step))
            title = ""  # the layer's title stands on its first step only
        table.add_section()
    return table


def step_cells(step: Description) -> list[str]:
    lane = "[magenta]comm[/magenta]" if step["lane"] == "comm" else step["lane"]
    numbers = (step["parameters"], step["forward_flops_per_token"])
    texts = [human_readable(number) if number else "" for number in numbers]
    return [step["step"], lane, step["shapes"], *texts]


def print_products(products: Description, console: Console) -> None:
    """The number formats of products; nothing where all are plain."""
    recipes = products["recipes"]
    if all(recipe == "plain" for recipe in recipes):
        return
    console.print(product_table(products["kinds"]))
    table = Table("recipe", "forward", "data gradient", "weight gradient", title="recipes", title_justify="left")
    for recipe, formats in recipes.items():
        table.add_row(recipe, *formats.values())
    console.print(table)
    console.print(f"weights of FP8 products: {products['storage']}")


def product_table(kinds: list[Description]) -> Table:
    title = "products (linear; router, embedding and head have no recipe)"
    table = Table("where", "product", "recipe", "why", title=title, title_justify="left")
    for kind in kinds:
        where = kind["where"]
        if kind["count"] > 1:
            where = f"{kind['count']} x {where}"
        table.add_row(where, kind["product"], kind["recipe"], escape(kind["why"]))
    return table


def region_table(regions: Description, recompute: Description | None) -> Table:
    title = "memory regions; saves: bytes of a microbatch on the first pipeline rank, if the region is recomputed"
    table = Table("region", "where", "what", "saves", title=title, title_justify="left")
    saves = recompute["saves"] if recompute else {}
    rebuilt = recompute["rebuilt"] if recompute else {}
    sent = recompute["sent_again"] if recompute else {}
    offloaded = recompute["offloaded"] if recompute else {}
    for name, region in regions["present"].items():
        saved = human_bytes(saves[name]) if name in saves else ""
        again = f"; sent again: {sent[name]}" if name in sent else ""
        layers = f" (recomputed: {rebuilt[name]}{again})" if name in rebuilt else ""
        on_host = f" (offloaded: {offloaded[name]})" if name in offloaded else ""
        table.add_row(name, region["place"], region["meaning"], f"{saved}{layers}{on_host}")
    for name, reason in regions["absent"].items():
        table.add_row(name, "absent", escape(reason), "")
    return table


def human_bytes(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def kernel_table(explanation: Description) -> Table:
    table = Table("operation", "used in", "kernel", "why", title="kernels", title_justify="left")
    for op, choice in explanation["kernels"].items():
        users = steps_that_use(op, explanation["layers"])
        table.add_row(op, ", ".join(users), *choice.values())
    return table


def steps_that_use(op: str, layers: list[Description]) -> list[str]:
    """The names of the steps with this op. An op of no step belongs to a recipe, to the optimizer or to context
    parallelism."""
    users: dict[str, None] = {}  # in the order of the model
    for layer in layers:
        for step in layer["steps"]:
            if op in step["ops"]:
                users[step["step"]] = None
    if op in OPTIMIZER_CHOICES:
        return ["optimizer"]
    if op in FP8_OPS | EVERY_MICRO_OP | BASE_OPS:
        return ["products"]
    if op in FP8_EXPERT_OPS | STASH_OPS:
        return ["experts"]
    if op in PEER_OPS:
        return ["plan", "dispatch", "combine"]
    if op in FP8_STORAGE_OPS:
        return ["weights"]
    if op == "token_losses":
        return ["predict"]
    return list(users) or ["attend"]
