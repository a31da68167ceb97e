"""Rules of `memory.graphs static`: what steps of the model that are captured one by one do not have."""

from __future__ import annotations

from contextlib import suppress

from moefold.config.errors import UserError
from moefold.config.memory_regions import entries_of_expert_weights, parse_offload
from moefold.config.memory_rules import GRAPHS, layer_count
from moefold.config.rule import ConfigOnRanks, RuleList

NO_GRAPHS = "set memory.graphs to none"
EAGER_REGIONS = frozenset(("activation", "dispatch", "experts", "moe", "layer"))  # those outside of captured steps

STATIC_GRAPH_RULES = RuleList()


def has_static_graphs(c: ConfigOnRanks) -> bool:
    return c.memory.graphs == "static"


@STATIC_GRAPH_RULES.rule(
    "static graphs are of a GPU",
    (GRAPHS, "train.device"),
    why="steps are captured on a GPU alone",
    fix=NO_GRAPHS,
)
def static_graphs_are_of_a_gpu(c: ConfigOnRanks) -> bool:
    return not has_static_graphs(c) or c.train.device != "cpu"


@STATIC_GRAPH_RULES.rule(
    "static graphs have no collectives",
    (GRAPHS, "parallel.tp", "parallel.cp"),
    why="attention, routers and MLPs of several tp or cp ranks send messages, which the host launches",
    fix="set parallel.tp and cp to 1, or memory.graphs to none",
)
def static_graphs_have_no_collectives(c: ConfigOnRanks) -> bool:
    return not has_static_graphs(c) or c.parallel.tp * c.parallel.cp == 1


@STATIC_GRAPH_RULES.rule(
    "static graphs find weights in their places",
    (GRAPHS, "shard.mode", "optim.states", "memory.offload", "precision.storage"),
    why="weights that are gathered, fetched or stored in FP8 alone have other places every time, and updates on the "
    "host are followed by it",
    fix=NO_GRAPHS,
)
def static_graphs_find_weights(c: ConfigOnRanks) -> bool:
    fetched = entries_of_expert_weights(c.memory.offload)
    in_place = c.shard.mode == "zero1" and c.optim.states == "device" and not fetched
    has_values = c.precision.storage == "plain"
    return not has_static_graphs(c) or (in_place and has_values)


@STATIC_GRAPH_RULES.rule(
    "static graphs keep what they save",
    (GRAPHS, "memory.offload", "model.layers", "model.mtp"),
    why="what captured steps save has its place in their graphs; regions outside of them may be offloaded: "
    f"{', '.join(sorted(EAGER_REGIONS))}",
    fix=NO_GRAPHS,
)
def static_graphs_keep_what_they_save(c: ConfigOnRanks) -> bool:
    if not has_static_graphs(c):
        return True
    with suppress(UserError):  # reported by a rule of regions
        named = parse_offload(c.memory.offload, layer_count(c))
        return named.keys() <= EAGER_REGIONS
    return True


@STATIC_GRAPH_RULES.rule(
    "static graphs tell the host nothing",
    (GRAPHS, "train.record_routing", "optim.qk_clip"),
    why="experts of every token, and the largest logits, are handed to the host inside of captured steps",
    fix=NO_GRAPHS,
)
def static_graphs_tell_nothing(c: ConfigOnRanks) -> bool:
    records = c.train.record_routing or c.optim.qk_clip
    return not (has_static_graphs(c) and records)
