"""Rules of the section `lora`: readable targets, and what adapters over a frozen base do not do."""

from __future__ import annotations

from moefold.config.entry_lists import problems_of_entries
from moefold.config.lora_targets import parse_targets
from moefold.config.rule import ConfigOnRanks, RuleList

RANK = "lora.rank"

LORA_RULES = RuleList()


def has_adapters(c: ConfigOnRanks) -> bool:
    return c.lora.rank > 0


def problems_of_targets(c: ConfigOnRanks) -> str:
    return problems_of_entries(parse_targets, c.lora.targets)


@LORA_RULES.rule(
    "targets of adapters can be read",
    ("lora.targets",),
    says=problems_of_targets,
    fix='set lora.targets to ""',
)
def targets_can_be_read(c: ConfigOnRanks) -> bool:
    return not problems_of_targets(c)


@LORA_RULES.rule(
    "targets have a rank",
    (RANK, "lora.targets"),
    why="without a rank no product has an adapter",
    fix='set lora.rank to 16, or lora.targets to ""',
)
def targets_have_a_rank(c: ConfigOnRanks) -> bool:
    return has_adapters(c) or not c.lora.targets


@LORA_RULES.rule(
    "a frozen base is whole on every replica",
    (RANK, "shard.mode"),
    why="frozen weights are in no unit that could be gathered",
    fix="set shard.mode to zero1",
)
def frozen_base_is_whole(c: ConfigOnRanks) -> bool:
    return not (has_adapters(c) and c.shard.mode == "zero3")


@LORA_RULES.rule(
    "a frozen base is not stored in FP8 alone",
    (RANK, "precision.storage"),
    why="only weights that are trained have that storage",
    fix="set precision.storage to plain",
)
def frozen_base_has_plain_storage(c: ConfigOnRanks) -> bool:
    return not (has_adapters(c) and c.precision.storage == "fp8")


@LORA_RULES.rule(
    "a frozen base is not clipped",
    (RANK, "optim.qk_clip"),
    why="clipping rescales query and key projections, which are frozen",
    fix="set optim.qk_clip to 0",
)
def frozen_base_is_not_clipped(c: ConfigOnRanks) -> bool:
    return not (has_adapters(c) and c.optim.qk_clip > 0)


@LORA_RULES.rule(
    "selection biases of a frozen base stay",
    (RANK, "model.moe.balance.bias_rate"),
    why="selection biases are a part of the base, and a file of adapters has no place for them",
    fix="set model.moe.balance.bias_rate to 0",
)
def selection_biases_stay(c: ConfigOnRanks) -> bool:
    return not (has_adapters(c) and c.model.moe.balance.bias_rate > 0)
