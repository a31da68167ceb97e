"""Rules of clones of hot experts (`parallel.clone_slots`): what they need, and what does not know of them yet."""

from __future__ import annotations

from moefold.config.memory_rules import recomputed_regions
from moefold.config.precision_rules import recipes_in_use
from moefold.config.rule import ConfigOnRanks, RuleList

SLOTS = "parallel.clone_slots"
WITHOUT_CLONES = "set parallel.clone_slots to 0"
COUNTING_DISPATCHERS = ("all_to_all", "dedup", "hierarchical")
REGIONS_WITH_CLONES = {"dispatch", "experts", "moe", "layer"}

CLONE_RULES = RuleList()


def clones(c: ConfigOnRanks) -> bool:
    return c.parallel.clone_slots > 0


@CLONE_RULES.rule(
    "ranks clone experts of others",
    (SLOTS, "parallel.ep", "model.moe.experts"),
    why="a rank clones experts of other ep ranks, each at most once",
    fix=WITHOUT_CLONES,
)
def ranks_clone_experts_of_others(c: ConfigOnRanks) -> bool:
    held = c.model.moe.experts // c.parallel.ep
    return c.parallel.clone_slots <= c.model.moe.experts - held


@CLONE_RULES.rule(
    "a decision has clones",
    ("parallel.clone_decision", SLOTS),
    why="without spare slots nothing is cloned",
    fix="set parallel.clone_decision to now",
)
def decision_has_clones(c: ConfigOnRanks) -> bool:
    return clones(c) or c.parallel.clone_decision == "now"


@CLONE_RULES.rule(
    "clones are sent by a dispatcher that counts",
    (SLOTS, "parallel.dispatcher"),
    why=f"clones come with the counts of {', '.join(COUNTING_DISPATCHERS)}",
    fix="set parallel.dispatcher to all_to_all",
)
def clones_have_a_counting_dispatcher(c: ConfigOnRanks) -> bool:
    return not clones(c) or c.parallel.dispatcher in COUNTING_DISPATCHERS


@CLONE_RULES.rule(
    "cloned experts are whole on their rank",
    (SLOTS, "shard.mode"),
    why="weights that are gathered for a step would have to be gathered to be sent, too",
    fix="set shard.mode to zero1",
)
def cloned_experts_are_whole(c: ConfigOnRanks) -> bool:
    return not clones(c) or c.shard.mode == "zero1"


@CLONE_RULES.rule(
    "clones are plain matrices",
    (SLOTS, "precision.recipe", "precision.recipes", "precision.dispatch", "precision.combine_gradient"),
    why="clones have no quantised weights, and their rows are sent in train.precision",
    fix=WITHOUT_CLONES,
)
def clones_are_plain(c: ConfigOnRanks) -> bool:
    quantises = any(spec.quantises for spec in recipes_in_use(c))
    sends_plain = c.precision.dispatch == c.precision.combine_gradient == "plain"
    return not clones(c) or (sends_plain and not quantises)


@CLONE_RULES.rule(
    "clones are without biases and adapters",
    (SLOTS, "model.moe.biases", "lora.rank"),
    why="only the two matrices of an expert are sent",
    fix=WITHOUT_CLONES,
)
def clones_have_no_biases(c: ConfigOnRanks) -> bool:
    return not clones(c) or not (c.model.moe.biases or c.lora.rank)


@CLONE_RULES.rule(
    "rows of clones are not padded",
    (SLOTS, "model.moe.capacity.pad", "model.moe.capacity.pad_rows"),
    why="the host knows where the rows of clones begin only without padding",
    fix="set model.moe.capacity.pad to false and pad_rows to 1",
)
def rows_of_clones_are_not_padded(c: ConfigOnRanks) -> bool:
    capacity = c.model.moe.capacity
    return not clones(c) or not (capacity.pad or capacity.pad_rows > 1)


@CLONE_RULES.rule(
    "clones are sent once",
    (SLOTS, "memory.recompute", "memory.expert_chunk"),
    why="regions dispatch, experts, moe and layer, and chunks of experts, are computed again with weights that clones "
    "no longer have",
    fix=WITHOUT_CLONES,
)
def clones_are_sent_once(c: ConfigOnRanks) -> bool:
    repeats = REGIONS_WITH_CLONES & set(recomputed_regions(c))
    return not clones(c) or not (repeats or c.memory.expert_chunk)


@CLONE_RULES.rule(
    "gradients of clones arrive before an update",
    (SLOTS, "optim.when"),
    why="a layer updated in backward would move before its clones' gradients are back",
    fix="set optim.when to step",
)
def clone_gradients_arrive_before_an_update(c: ConfigOnRanks) -> bool:
    return not clones(c) or c.optim.when == "step"


@CLONE_RULES.rule(
    "one lane at a time adds to experts that are cloned",
    (SLOTS, "pipeline.pair", "pipeline.fill", "pipeline.schedule"),
    why="weight gradients that fill gaps would be added beside those of clones, to the same sums",
    fix="set pipeline.fill to false",
)
def one_lane_adds_to_cloned_experts(c: ConfigOnRanks) -> bool:
    has_pairs = c.pipeline.pair or c.pipeline.schedule == "dualpipe_v"
    return not clones(c) or not (has_pairs and c.pipeline.fill)
