"""Rules of the section `memory`: readable entries, regions whose collectives all ranks issue in one order, and options
that one graph of the whole step does not have."""

from __future__ import annotations

from contextlib import suppress

from moefold.config.errors import UserError
from moefold.config.memory_regions import (
    REGIONS,
    RegionLayers,
    entries_of_expert_weights,
    offload_problems,
    parse_recompute,
    recompute_problems,
)
from moefold.config.optimizer_groups import parse_groups
from moefold.config.precision_rules import recipes_in_use
from moefold.config.rule import ConfigOnRanks, RuleList

RECOMPUTE = "memory.recompute"
OFFLOAD = "memory.offload"
GRAPHS = "memory.graphs"
EXPERT_TILE = 128

MEMORY_RULES = RuleList()


def layer_count(c: ConfigOnRanks) -> int:
    return c.model.layers + c.model.mtp


def entry_problems(c: ConfigOnRanks) -> str:
    return recompute_problems(c.memory.recompute, layer_count(c))


@MEMORY_RULES.rule(
    "recomputed regions can be read",
    (RECOMPUTE, "model.layers", "model.mtp"),
    says=entry_problems,
    fix='set memory.recompute to ""',
)
def recomputed_regions_can_be_read(c: ConfigOnRanks) -> bool:
    return not entry_problems(c)


def offloaded_entry_problems(c: ConfigOnRanks) -> str:
    memory = c.memory
    recompute = () if entry_problems(c) else memory.recompute
    return offload_problems(memory.offload, recompute, layer_count(c))


@MEMORY_RULES.rule(
    "offloaded regions can be read",
    (OFFLOAD, RECOMPUTE, "model.layers", "model.mtp"),
    says=offloaded_entry_problems,
    fix='set memory.offload to ""',
)
def offloaded_regions_can_be_read(c: ConfigOnRanks) -> bool:
    return not offloaded_entry_problems(c)


# Expert weights on the host.


def has_host_experts(c: ConfigOnRanks) -> bool:
    return bool(entries_of_expert_weights(c.memory.offload))


def freezes_some_weights(c: ConfigOnRanks) -> bool:
    with suppress(UserError):  # reported by a rule of the optimizer
        return any(group.frozen for group in parse_groups(c.optim.groups))
    return True


@MEMORY_RULES.rule(
    "expert weights on the host are frozen",
    (OFFLOAD, "lora.rank", "optim.groups"),
    why="expert_weights are fetched from the host and never written back: experts must be frozen, by adapters beside "
    "them or by optim.groups",
    fix="set lora.rank to 16, or freeze experts with optim.groups",
)
def host_experts_are_frozen(c: ConfigOnRanks) -> bool:
    return not has_host_experts(c) or c.lora.rank > 0 or freezes_some_weights(c)


@MEMORY_RULES.rule(
    "expert weights on the host have no clones",
    (OFFLOAD, "parallel.clone_slots"),
    why="clones of experts are sent from device memory before their layer's weights are fetched",
    fix="set parallel.clone_slots to 0",
)
def host_experts_have_no_clones(c: ConfigOnRanks) -> bool:
    return not has_host_experts(c) or c.parallel.clone_slots == 0


@MEMORY_RULES.rule(
    "expert weights on the host are those of one model",
    (OFFLOAD, "train.objective", "lora.rank"),
    why="without adapters the reference of dpo is a second model, whose experts nobody fetches",
    fix="set lora.rank to 16",
)
def host_experts_are_of_one_model(c: ConfigOnRanks) -> bool:
    return not has_host_experts(c) or c.train.objective != "dpo" or c.lora.rank > 0


@MEMORY_RULES.rule(
    "expert chunks are whole tiles",
    ("memory.expert_chunk",),
    why=f"kernels and padding of experts' rows work in tiles of up to {EXPERT_TILE} rows",
    fix="set memory.expert_chunk to 0",
)
def expert_chunks_are_whole_tiles(c: ConfigOnRanks) -> bool:
    return c.memory.expert_chunk % EXPERT_TILE == 0


def recomputed_regions(c: ConfigOnRanks) -> RegionLayers:
    with suppress(UserError):  # reported by the rule above
        return parse_recompute(c.memory.recompute, layer_count(c))
    return {}


def recomputed_exchanges(c: ConfigOnRanks) -> RegionLayers:
    """The recomputed regions that send tokens to experts, with their layers."""
    regions = recomputed_regions(c)
    return {name: layers for name, layers in regions.items() if REGIONS[name].spans_exchange}


def dispatches_again(c: ConfigOnRanks) -> bool:
    """Whether the backward of combine sends tokens to experts again."""
    is_sent = c.parallel.ep * c.parallel.etp > 1
    return is_sent and "dispatch" in recomputed_regions(c)


@MEMORY_RULES.rule(
    "recomputed exchanges of paired slots have one order",
    (RECOMPUTE, "pipeline.pair", "parallel.tp", "parallel.cp"),
    why="in a paired slot, exchanges of other layers run beside a recomputed region that has exchanges and collectives "
    "over tp or cp of its own; ranks could issue them in different orders (a region named for all layers has none "
    "beside it)",
    fix="set pipeline.pair to false, or parallel.tp and cp to 1",
)
def recomputed_exchanges_have_one_order(c: ConfigOnRanks) -> bool:
    alone = c.parallel.tp * c.parallel.cp == 1
    exchanges = recomputed_exchanges(c)
    if not c.pipeline.pair or alone or not exchanges:
        return True
    return None in exchanges.values()


# One graph of the whole step: what it would have to read from the host is refused here, by the option that asks for it.


def has_whole_graph(c: ConfigOnRanks) -> bool:
    return c.memory.graphs == "whole"


def axes_led_by_the_host(c: ConfigOnRanks) -> list[str]:
    """Axes, as settings, over which the host sizes or launches messages: experts too, unless the dispatcher asks no
    host."""
    parallel = c.parallel
    names = ["cp", "pp"]
    if parallel.dispatcher != "symmetric":
        names += ["ep", "etp"]
    sizes = {name: getattr(parallel, name) for name in names}
    return [f"parallel.{name} = {size}" for name, size in sizes.items() if size > 1]


def host_leads_exchanges(c: ConfigOnRanks) -> str:
    way = ", ".join(axes_led_by_the_host(c))
    return f"memory.graphs = whole: {way} is in the way: exchanges between ranks are sized and launched by the host"


@MEMORY_RULES.rule(
    "no exchange of a whole graph needs the host",
    (GRAPHS, "parallel.cp", "parallel.pp", "parallel.ep", "parallel.etp", "parallel.dispatcher"),
    says=host_leads_exchanges,
    fix="set memory.graphs to none",
)
def no_exchange_of_a_whole_graph_needs_the_host(c: ConfigOnRanks) -> bool:
    return not has_whole_graph(c) or not axes_led_by_the_host(c)


@MEMORY_RULES.rule(
    "a whole graph is of bf16 on a GPU",
    (GRAPHS, "train.device", "train.precision"),
    why="a step is captured on a GPU alone, and there in bf16: kernels for other types read the experts' rows on the "
    "host",
    fix="set memory.graphs to none",
)
def whole_graph_is_of_bf16_on_a_gpu(c: ConfigOnRanks) -> bool:
    if not has_whole_graph(c):
        return True
    return c.train.device != "cpu" and c.train.precision in ("auto", "bf16")


@MEMORY_RULES.rule(
    "a whole graph has one lane",
    (GRAPHS, "pipeline.pair", "shard.sync"),
    why="the lanes of paired slots and of sums in two levels wait for each other on the host",
    fix="set pipeline.pair to false and shard.sync to flat, or memory.graphs to none",
)
def whole_graph_has_one_lane(c: ConfigOnRanks) -> bool:
    one_lane = not c.pipeline.pair and c.shard.sync == "flat"
    return not has_whole_graph(c) or one_lane


@MEMORY_RULES.rule(
    "a whole graph updates all weights at its end",
    (GRAPHS, "optim.when", "optim.clip_by", "shard.mode"),
    why="units that are gathered, clipped or updated one by one are followed by the host",
    fix="set memory.graphs to none",
)
def whole_graph_updates_at_its_end(c: ConfigOnRanks) -> bool:
    at_the_end = c.optim.when == "step" and c.optim.clip_by == "global"
    return not has_whole_graph(c) or (at_the_end and c.shard.mode == "zero1")


@MEMORY_RULES.rule(
    "a whole graph offloads nothing",
    (GRAPHS, OFFLOAD, "optim.states"),
    why="copies to the host have streams and a pool of their own, which a graph would have to own",
    fix="set memory.graphs to none",
)
def whole_graph_offloads_nothing(c: ConfigOnRanks) -> bool:
    offloads = c.memory.offload or c.optim.states == "host"
    return not has_whole_graph(c) or not offloads


@MEMORY_RULES.rule(
    "a whole graph records no routing",
    (GRAPHS, "train.record_routing"),
    why="the experts of every token are copied to the host between the layers",
    fix="set memory.graphs to none",
)
def whole_graph_records_no_routing(c: ConfigOnRanks) -> bool:
    return not has_whole_graph(c) or not c.train.record_routing


@MEMORY_RULES.rule(
    "a whole graph finds stored weights in their places",
    (GRAPHS, "precision.storage", "precision.recipe", "precision.recipes", "optim.rule", "optim.groups"),
    why="weights stored in FP8 stay in their places only where AdamW writes blocks of 128 x 128 on one replica: with "
    "other scales, another rule or dp above 1 they are made anew elsewhere",
    fix="set precision.storage to plain",
)
def whole_graph_finds_stored_weights(c: ConfigOnRanks) -> bool:
    if not has_whole_graph(c) or c.precision.storage == "plain":
        return True
    recipes = [spec for spec in recipes_in_use(c) if spec.format == "fp8"]
    has_blocks = all(spec.weight == "block" for spec in recipes)
    return c.dp == 1 and has_blocks and updates_by_adamw(c)


def updates_by_adamw(c: ConfigOnRanks) -> bool:
    rules = {c.optim.rule}
    with suppress(UserError):  # reported by a rule of the optimizer
        rules |= {group.rule or "adamw" for group in parse_groups(c.optim.groups)}
    return rules == {"adamw"}


@MEMORY_RULES.rule(
    "a tape is shared where there is one",
    ("memory.tape_processes", "memory.tape"),
    why="processes share the replays of a tape, and without memory.tape there is none",
    fix="set memory.tape to true, or memory.tape_processes to 1",
)
def shared_tape_is_there(c: ConfigOnRanks) -> bool:
    return c.memory.tape or c.memory.tape_processes == 1
