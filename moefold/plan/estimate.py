"""A step's time and memory in closed form, for ranking thousands of layouts; the best are then clocked exactly.

A rank works on every microbatch in turn, so a step takes at least as long as the busiest rank does with all of them;
before and after it stand the other ranks' turns at the first and the last, a chunk each:

    unpaired    m x busiest + (p - 1) / v x mean
    paired      the same, a rank being busy with what a woven forward and backward take, but for the first and last

Rank r has p - r microbatches under way, or 2 (p - r - 1) + (v - 1) p + 1 chunks of them where it has several stages,
and one more where a forward is paired with a backward. Of ranks that hold the same, the first has the most.

Layers of one kind cost the same, so that a rank is a few kinds of pieces and how many it has of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from moefold.config.run import Config
from moefold.plan.choices import Choices
from moefold.plan.comm import Cluster
from moefold.plan.memory import BYTES, GIB, Setting, microbatches_of
from moefold.plan.simulate import FRICTION, optimizer_bytes
from moefold.plan.sizes import portion_of
from moefold.plan.stage import stage_count, stages_by_rank
from moefold.plan.timing import Pace

Kind = tuple[str, int]
Kinds = tuple[tuple[Kind, int], ...]  # of pieces, with how many there are


@dataclass(frozen=True)
class Cut:
    """A model on its pipeline ranks: for each different rank what it holds, how many are like it, and the first."""

    ranks: tuple[tuple[Kinds, int, int], ...]

    @cached_property
    def kinds(self) -> set[Kind]:
        return {kind for kinds, _, _ in self.ranks for kind, _ in kinds}


def cut_of(config: Config) -> Cut:
    held = [Counter(piece for stage in rank.pieces for piece in stage) for rank in stages_by_rank(config)]
    ranks = [tuple(sorted(each.items())) for each in held]
    return Cut(tuple((kinds, n, ranks.index(kinds)) for kinds, n in Counter(ranks).items()))


def plain_setting(config: Config, world: int, choices: Choices) -> Setting:
    """A setting whose program nobody has walked: all that the closed forms need."""
    c = config.pipeline
    portion = portion_of(config, config.parallel.dispatcher, c.defer or (c.pair and c.fill))
    return Setting(config, world, choices, portion, [], microbatches_of(config, world))


@dataclass(frozen=True)
class Price:
    """One microbatch through a piece: seconds of both lanes, and of forward's and backward's compute."""

    compute: float
    travel: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Held:
    """What one sequence of a piece keeps for its backward, and needs beside; a second one makes the latter grow. And
    parameters on a rank: of the dense grid, of the expert grid, and quantised ones."""

    kept: float
    beside: float
    grows: float
    dense: float
    expert: float
    quantized: float


def price_of(pace: Pace, kind: Kind) -> Price:
    F, D, W = pace.piece(*kind)
    return Price(F.compute + D.compute + W.compute, F.travel + D.travel + W.travel, F.compute, D.compute + W.compute)


def held_of(s: Setting, kind: Kind) -> Held:
    """Everything kept grows with the sequences of a microbatch; what is needed beside has a part that does not."""
    one, two = (stage_count(s.config.model, (kind,), replace(s.portion, micro_batch=n), s.choices) for n in (1, 2))
    grids = {"dense": 0.0, "expert": 0.0}
    for (grid, _), n in one.parameters:
        grids[grid] += n
    return Held(one.kept, one.backward, two.backward - one.backward, quantized=one.quantized, **grids)


def of(field: str, kinds: Kinds, each: Mapping[Kind, Price] | Mapping[Kind, Held]) -> float:
    return sum(n * getattr(each[kind], field) for kind, n in kinds)


def woven(compute: float, travel: float) -> float:
    """A forward and a backward of these stages in one slot."""
    most, least = max(compute, travel), min(compute, travel)
    return most + FRICTION * least


Prices = Mapping[Kind, Price]
Holdings = Mapping[Kind, Held]


def step_seconds(s: Setting, cluster: Cluster, cut: Cut, prices: Prices, held: Holdings) -> float:
    c, p, m = s.config.pipeline, s.config.parallel, s.microbatches
    lanes = [((of("compute", kinds, prices), of("travel", kinds, prices)), n) for kinds, n, _ in cut.ranks]
    busiest = max((woven(*each) if c.pair else sum(each)) for each, _ in lanes)
    alone = sum(sum(each) * n for each, n in lanes) / p.pp
    unpaired = (max(sum(each) for each, _ in lanes) - busiest) / c.vpp  # the first forward, the last backward
    around = max(outside(s, cluster, kinds, prices, held) for kinds, _, _ in cut.ranks)
    return m * busiest + (p.pp - 1) * alone / c.vpp + unpaired + around


def outside(s: Setting, cluster: Cluster, kinds: Kinds, prices: Prices, held: Holdings) -> float:
    """Exchange that no compute hides, and the optimizer."""
    mine = {("dense", ()): of("dense", kinds, held), ("expert", ()): of("expert", kinds, held)}
    shown = 0.0
    if s.choices.sharding != "fsdp":
        scatter = cluster.exchange(mine, s, BYTES[s.config.optim.gradient_travel])
        gather = cluster.exchange(mine, s, s.choices.recipe.wide)
        shown = max(0.0, scatter - of("backward", kinds, prices)) + max(0.0, gather - of("forward", kinds, prices))
    return shown + sum(owned(s, grid) * n for (grid, _), n in mine.items()) * optimizer_bytes(s) / cluster.stream


def owned(s: Setting, grid: str) -> float:
    """The share of a parameter's state that one rank has."""
    if s.choices.sharding == "none":
        return 1.0
    return 1 / (s.degrees["edp"] if grid == "expert" else s.degrees["dp"] * s.config.parallel.cp)


def live_chunks(pp: int, vpp: int, rank: int, microbatches: int, pair: bool) -> int:
    """Chunks of microbatches that a rank has under way at most."""
    ahead = pp - rank - 1
    chunks = 2 * ahead + (vpp - 1) * pp + 1 if vpp > 1 or pair else ahead + 1
    return min(chunks + pair, microbatches * vpp)


def largest_gib(s: Setting, cut: Cut, held: Holdings) -> float:
    """GiB of the rank that needs most."""
    return max(rank_bytes(s, kinds, held, first) for kinds, _, first in cut.ranks) / GIB


def rank_bytes(s: Setting, kinds: Kinds, held: Holdings, rank: int) -> float:
    c, choices, recipe = s.config.pipeline, s.choices, s.choices.recipe
    live = live_chunks(s.config.parallel.pp, c.vpp, rank, s.microbatches, c.pair) / c.vpp
    more = s.config.train.micro_batch - 1
    lives = {"L": 1.0 + c.pair}  # the head's microbatch turns round at once
    size = (more + 1) * sum(n * lives.get(kind[0], live) * held[kind].kept for kind, n in kinds)
    size += max(held[kind].beside + more * held[kind].grows for kind, _ in kinds)
    copies = recipe.copies - (recipe.wide if choices.quantized_weights else 0.0) if recipe.copies else 0.0
    states = 0.0 if choices.states_on_host else 4.0 + 2 * BYTES[s.config.optim.moments]
    for grid in ("dense", "expert"):
        share = owned(s, grid)
        weights = (recipe.wide + BYTES[choices.gradients]) * (share if choices.sharding == "fsdp" else 1.0)
        size += of(grid, kinds, held) * (weights + states * share)
    return size + of("quantized", kinds, held) * copies
