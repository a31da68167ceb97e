"""Rules of the section `lora`: readable targets, and what adapters over a frozen base do not do."""

from __future__ import annotations

from moefold.config.entry_lists import problems_of_entries
from moefold.config.lora_targets import parse_targets
from moefold.config.precision_rules import ENTRIES, RECIPE, recipes_in_use
from moefold.config.rule import ConfigOnRanks, RuleList

RANK = "lora.rank"
BASE = "lora.base"
DORA = "lora.dora"

LORA_RULES = RuleList()


def has_adapters(c: ConfigOnRanks) -> bool:
    return c.lora.rank > 0


def has_blocks(c: ConfigOnRanks) -> bool:
    return c.lora.base != "plain"


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
    "dropout has adapters",
    (RANK, "lora.dropout"),
    why="inputs of adapters alone are dropped",
    fix="set lora.rank to 16, or lora.dropout to 0",
)
def dropout_has_adapters(c: ConfigOnRanks) -> bool:
    return has_adapters(c) or not c.lora.dropout


@LORA_RULES.rule(
    "magnitudes have adapters",
    (RANK, DORA),
    why="magnitudes are trained beside adapters",
    fix="set lora.rank to 16, or lora.dora to false",
)
def magnitudes_have_adapters(c: ConfigOnRanks) -> bool:
    return has_adapters(c) or not c.lora.dora


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


@LORA_RULES.rule(
    "a base in blocks is frozen",
    (BASE, RANK),
    why="weights that are trained are not stored in blocks",
    fix="set lora.rank to 16, or lora.base to plain",
)
def base_in_blocks_is_frozen(c: ConfigOnRanks) -> bool:
    return has_adapters(c) or not has_blocks(c)


@LORA_RULES.rule(
    "a base in blocks has plain products",
    (BASE, RECIPE, ENTRIES),
    why="products of blocks multiply what these stand for, in the model's precision",
    fix="set precision.recipe to plain, or lora.base to plain",
)
def base_in_blocks_has_plain_products(c: ConfigOnRanks) -> bool:
    return not has_blocks(c) or not any(spec.quantises for spec in recipes_in_use(c))


@LORA_RULES.rule(
    "a base in blocks is in whole graphs of a GPU alone",
    (BASE, "memory.graphs", "train.device"),
    why="steps are captured whole, on a GPU; elsewhere the host reads how many rows each expert has, to dequantise "
    "those that have some",
    fix="set memory.graphs to none",
)
def base_in_blocks_is_in_whole_graphs_of_a_gpu(c: ConfigOnRanks) -> bool:
    graphs = c.memory.graphs
    is_captured = graphs == "whole" and c.train.device != "cpu"
    return not has_blocks(c) or graphs == "none" or is_captured


@LORA_RULES.rule(
    "a base in blocks is not invariant",
    (BASE, "kernels.invariant"),
    why="products of blocks are not written for it",
    fix="set kernels.invariant to false, or lora.base to plain",
)
def base_in_blocks_is_not_invariant(c: ConfigOnRanks) -> bool:
    return not (has_blocks(c) and c.kernels.invariant)
