"""Rules of the section `shard`: copies that the ranks allow, and what full sharding does not do yet."""

from __future__ import annotations

from moefold.config.memory_rules import dispatches_again, recomputed_exchanges
from moefold.config.rule import ConfigOnRanks, RuleList, divisors_in_words

MODE = "shard.mode"

SHARD_RULES = RuleList()


def is_fully_sharded(c: ConfigOnRanks) -> bool:
    return c.shard.mode == "zero3"


def token_ranks(c: ConfigOnRanks) -> int:
    return c.dp * c.parallel.cp


def describe_replicas(c: ConfigOnRanks) -> str:
    return f"shard.replicas = {c.shard.replicas} does not divide dp x cp = {token_ranks(c)}"


def advise_replicas(c: ConfigOnRanks) -> str:
    return f"set shard.replicas to one of {divisors_in_words(token_ranks(c))}"


@SHARD_RULES.rule(
    "copies divide the replicas",
    ("shard.replicas", "parallel.tp", "parallel.cp", "parallel.pp"),
    says=describe_replicas,
    fix=advise_replicas,
)
def copies_divide_the_replicas(c: ConfigOnRanks) -> bool:
    return token_ranks(c) % c.shard.replicas == 0


@SHARD_RULES.rule(
    "units of paired slots are gathered in one order",
    (MODE, "memory.recompute", "pipeline.pair"),
    why="a recomputed region with exchanges runs beside the compute of another microbatch, and both gather units; "
    "ranks could issue these gathers in different orders",
    fix="set pipeline.pair to false, or shard.mode to zero1",
)
def paired_units_have_one_order(c: ConfigOnRanks) -> bool:
    both_gather = is_fully_sharded(c) and c.pipeline.pair
    return not (both_gather and recomputed_exchanges(c))


@SHARD_RULES.rule(
    "tokens that are dispatched again are normed with whole weights",
    (MODE, "memory.recompute", "parallel.ep", "parallel.etp"),
    why="a recomputed dispatch norms its tokens beside the compute of other steps, before their unit is gathered",
    fix="set shard.mode to zero1",
)
def dispatched_again_with_whole_weights(c: ConfigOnRanks) -> bool:
    return not (is_fully_sharded(c) and dispatches_again(c))


@SHARD_RULES.rule(
    "fully sharded units are updated after backward",
    (MODE, "optim.when", "optim.clip_by"),
    why="a unit that is gathered again in this backward must not have moved, and its norm is summed with the others'",
    fix="set optim.when to step and optim.clip_by to global, or shard.mode to zero1",
)
def sharded_units_are_updated_after_backward(c: ConfigOnRanks) -> bool:
    by_unit = c.optim.when == "backward" or c.optim.clip_by == "unit"
    return not (is_fully_sharded(c) and by_unit)
