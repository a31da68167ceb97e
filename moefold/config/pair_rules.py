"""Rules of `pipeline.pairs alike`: what two microbatches in step do not have."""

from __future__ import annotations

from moefold.config.clone_rules import SLOTS, clones
from moefold.config.memory_regions import entries_of_expert_weights
from moefold.config.rule import ConfigOnRanks, RuleList
from moefold.config.shard_rules import MODE, is_fully_sharded
from moefold.config.static_graph_rules import has_static_graphs

PAIRS = "pipeline.pairs"
OPPOSITE = "set pipeline.pairs to opposite"

PAIR_RULES = RuleList()


def is_in_step(c: ConfigOnRanks) -> bool:
    return c.pipeline.pairs == "alike"


@PAIR_RULES.rule(
    "passes in step are paired",
    (PAIRS, "pipeline.pair", "pipeline.schedule"),
    why="passes share a slot where pipeline.pair says so, and dualpipe_v has pairs of its own",
    fix=OPPOSITE,
)
def passes_in_step_are_paired(c: ConfigOnRanks) -> bool:
    has_pairs = c.pipeline.pair and c.pipeline.schedule != "dualpipe_v"
    return not is_in_step(c) or has_pairs


@PAIR_RULES.rule(
    "weights of passes in step stay",
    (PAIRS, MODE, "memory.offload"),
    why="weights that come before a step and leave behind it are counted for one forward and one backward at a time",
    fix=OPPOSITE,
)
def weights_of_passes_in_step_stay(c: ConfigOnRanks) -> bool:
    come_and_go = is_fully_sharded(c) or bool(entries_of_expert_weights(c.memory.offload))
    return not (is_in_step(c) and come_and_go)


@PAIR_RULES.rule(
    "clones are of one microbatch",
    (PAIRS, SLOTS),
    why="two microbatches in one layer would need clones of different experts in the same slots",
    fix=OPPOSITE,
)
def clones_are_of_one_microbatch(c: ConfigOnRanks) -> bool:
    return not (is_in_step(c) and clones(c))


@PAIR_RULES.rule(
    "static graphs have one microbatch in a layer",
    (PAIRS, "memory.graphs"),
    why="what captured steps read of a microbatch is copied once, to memory that the next microbatch has too",
    fix=OPPOSITE,
)
def static_graphs_have_one_microbatch(c: ConfigOnRanks) -> bool:
    return not (is_in_step(c) and has_static_graphs(c))
