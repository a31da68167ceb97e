"""Rules of the section `memory`: readable entries, and regions whose collectives all ranks issue in one order."""

from __future__ import annotations

from contextlib import suppress

from moefold.config.errors import UserError
from moefold.config.memory_regions import REGIONS, RegionLayers, parse_recompute, recompute_problems
from moefold.config.rule import ConfigOnRanks, RuleList

RECOMPUTE = "memory.recompute"

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


def recomputed_exchanges(c: ConfigOnRanks) -> RegionLayers:
    """The recomputed regions that send tokens to experts, with their layers."""
    regions: RegionLayers = {}
    with suppress(UserError):  # reported by the rule above
        regions = parse_recompute(c.memory.recompute, layer_count(c))
    return {name: layers for name, layers in regions.items() if REGIONS[name].spans_exchange}


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
