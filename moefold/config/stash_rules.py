"""Rules of the stash of experts' rows (`memory.stash`): what it needs, and what does not know of it yet."""

from __future__ import annotations

from contextlib import suppress

from moefold.config.errors import UserError
from moefold.config.memory_regions import REGIONS, parse_offload, share_a_layer
from moefold.config.memory_rules import layer_count, recomputed_regions
from moefold.config.precision_rules import recipes_in_use
from moefold.config.rule import ConfigOnRanks, RuleList

STASH = "memory.stash"
WITHOUT_STASH = "set memory.stash to none"

STASH_RULES = RuleList()


def stashes(c: ConfigOnRanks) -> bool:
    return c.memory.stash != "none"


@STASH_RULES.rule(
    "a stack is of one microbatch at a time",
    (STASH, "parallel.pp", "pipeline.pair"),
    why="stages of a pipeline and paired slots begin further microbatches before the last one's backward: what lies on "
    "top of a stack is not what is needed first",
    fix="set memory.stash to pages",
)
def stack_is_of_one_microbatch(c: ConfigOnRanks) -> bool:
    in_turn = c.parallel.pp == 1 and not c.pipeline.pair
    return c.memory.stash != "stack" or in_turn


@STASH_RULES.rule(
    "a stash has plain rows",
    (STASH, "precision.recipe", "precision.recipes"),
    why="quantised products save tiles of experts' rows and copies along columns, which are no rows",
    fix=WITHOUT_STASH,
)
def stash_has_plain_rows(c: ConfigOnRanks) -> bool:
    quantises = any(spec.quantises for spec in recipes_in_use(c))
    return not stashes(c) or not quantises


@STASH_RULES.rule(
    "a stashed step updates at its end",
    (STASH, "optim.when", "train.precision"),
    why="a step whose rows found no room is run again from untouched state: units that are updated inside backward, "
    "and a loss scale that moves with every step, are touched by then",
    fix=WITHOUT_STASH,
)
def stashed_step_updates_at_its_end(c: ConfigOnRanks) -> bool:
    untouched = c.optim.when == "step" and c.train.precision != "fp16"
    return not stashes(c) or untouched


@STASH_RULES.rule(
    "stashed experts have one set of rows",
    (STASH, "memory.expert_chunk", "parallel.clone_slots"),
    why="chunks keep their inputs alone, and rows of clones end elsewhere than those of their rank's experts",
    fix=WITHOUT_STASH,
)
def stashed_experts_have_one_set_of_rows(c: ConfigOnRanks) -> bool:
    is_split = c.memory.expert_chunk > 0 or c.parallel.clone_slots > 0
    return not stashes(c) or not is_split


def offloads_experts(c: ConfigOnRanks) -> bool:
    offloaded: dict[str, frozenset[int]] = {}
    with suppress(UserError):  # reported by a rule of offload
        offloaded = parse_offload(c.memory.offload, layer_count(c))
    recomputed = recomputed_regions(c)
    for name, layers in offloaded.items():
        is_kept = name not in recomputed or not share_a_layer(layers, recomputed[name])
        if is_kept and "experts" in REGIONS[name].steps:
            return True
    return False


@STASH_RULES.rule(
    "stashed rows stay on the device",
    (STASH, "memory.offload", "memory.recompute", "model.layers", "model.mtp"),
    why="an offloaded region with experts would copy the rows to the host that the stash keeps",
    fix=WITHOUT_STASH,
)
def stashed_rows_stay_on_the_device(c: ConfigOnRanks) -> bool:
    return not stashes(c) or not offloads_experts(c)


def keeps_rows_of_experts(c: ConfigOnRanks) -> bool:
    """Whether the experts of some layer lie outside of recomputed regions."""
    moe = c.model.moe
    every_layer = range(moe.dense_layers, layer_count(c))
    keeping = frozenset(layer for layer in every_layer if (layer + 1) % moe.every == 0)
    for name, layers in recomputed_regions(c).items():
        if "experts" in REGIONS[name].spans:
            keeping -= keeping if layers is None else layers
    return bool(keeping)


@STASH_RULES.rule(
    "a stash has rows to keep",
    (STASH, "memory.recompute", "model.layers", "model.mtp", "model.moe.dense_layers", "model.moe.every"),
    why="experts of recomputed layers, and dense layers, keep no rows",
    fix=WITHOUT_STASH,
)
def stash_has_rows_to_keep(c: ConfigOnRanks) -> bool:
    return not stashes(c) or keeps_rows_of_experts(c)
