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
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.machine.cluster import Cluster
from moefold.plan.memory.rank_stages import count_stage, stages_by_rank
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES, STATE_ELEMENT_BYTES
from moefold.plan.memory.run_setting import GIB, RunSetting, microbatches_per_step
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import OVERLAP_FRICTION, optimizer_bytes
from moefold.plan.time.step_times import StepClock

PieceKind = tuple[str, int]
PieceKindCounts = tuple[tuple[PieceKind, int], ...]  # of pieces, with how many there are


@dataclass(frozen=True)
class PipelineCut:
    """A model on its pipeline ranks: for each different rank what it holds, how many are like it, and the first."""

    ranks: tuple[tuple[PieceKindCounts, int, int], ...]

    @cached_property
    def kinds(self) -> set[PieceKind]:
        return {kind for kinds, _, _ in self.ranks for kind, _ in kinds}


def cut_pipeline(config: Config) -> PipelineCut:
    held = [Counter(piece for stage in rank.pieces for piece in stage) for rank in stages_by_rank(config)]
    ranks = [tuple(sorted(each.items())) for each in held]
    return PipelineCut(tuple((kinds, n, ranks.index(kinds)) for kinds, n in Counter(ranks).items()))


def closed_form_setting(config: Config, world: int, choices: PlanChoices) -> RunSetting:
    """A setting whose program nobody has walked: all that the closed forms need."""
    c = config.pipeline
    portion = make_rank_portion(config, config.parallel.dispatcher, c.defer or (c.pair and c.fill))
    return RunSetting(config, world, choices, portion, [], microbatches_per_step(config, world))


@dataclass(frozen=True)
class PiecePrice:
    """One microbatch through a piece: seconds of both lanes, and of forward's and backward's compute."""

    compute: float
    travel: float
    forward: float
    backward: float


@dataclass(frozen=True)
class PieceMemory:
    """What one sequence of a piece keeps for its backward, and needs beside; a second one makes the latter grow. And
    parameters on a rank: of the dense grid, of the expert grid, and quantised ones."""

    kept: float
    workspace: float
    grows: float
    dense: float
    expert: float
    quantized: float


def price_piece(pace: StepClock, kind: PieceKind) -> PiecePrice:
    F, D, W = pace.time_piece(*kind)
    return PiecePrice(
        F.compute + D.compute + W.compute, F.travel + D.travel + W.travel, F.compute, D.compute + W.compute
    )


def measure_piece_memory(s: RunSetting, kind: PieceKind) -> PieceMemory:
    """Everything kept grows with the sequences of a microbatch; what is needed beside has a part that does not."""
    one, two = (count_stage(s.config.model, (kind,), replace(s.portion, micro_batch=n), s.choices) for n in (1, 2))
    grids = {"dense": 0.0, "expert": 0.0}
    for (grid, _), n in one.parameters:
        grids[grid] += n
    return PieceMemory(one.kept, one.backward, two.backward - one.backward, quantized=one.quantized, **grids)


def sum_over_pieces(
    field: str, kinds: PieceKindCounts, each: Mapping[PieceKind, PiecePrice] | Mapping[PieceKind, PieceMemory]
) -> float:
    return sum(n * getattr(each[kind], field) for kind, n in kinds)


def paired_seconds(compute: float, travel: float) -> float:
    """A forward and a backward of these stages in one slot."""
    most, least = max(compute, travel), min(compute, travel)
    return most + OVERLAP_FRICTION * least


PiecePrices = Mapping[PieceKind, PiecePrice]
PieceMemories = Mapping[PieceKind, PieceMemory]


def estimate_step_seconds(
    s: RunSetting, cluster: Cluster, cut: PipelineCut, prices: PiecePrices, held: PieceMemories
) -> float:
    c, p, m = s.config.pipeline, s.config.parallel, s.microbatches
    lanes = [
        ((sum_over_pieces("compute", kinds, prices), sum_over_pieces("travel", kinds, prices)), n)
        for kinds, n, _ in cut.ranks
    ]
    busiest = max((paired_seconds(*each) if c.pair else sum(each)) for each, _ in lanes)
    alone = sum(sum(each) * n for each, n in lanes) / p.pp
    unpaired = (max(sum(each) for each, _ in lanes) - busiest) / c.vpp  # the first forward, the last backward
    around = max(estimate_update_seconds(s, cluster, kinds, prices, held) for kinds, _, _ in cut.ranks)
    return m * busiest + (p.pp - 1) * alone / c.vpp + unpaired + around


def estimate_update_seconds(
    s: RunSetting, cluster: Cluster, kinds: PieceKindCounts, prices: PiecePrices, held: PieceMemories
) -> float:
    """Exchange that no compute hides, and the optimizer."""
    mine = {
        ("dense", ()): sum_over_pieces("dense", kinds, held),
        ("expert", ()): sum_over_pieces("expert", kinds, held),
    }
    shown = 0.0
    if s.choices.sharding != "fsdp":
        scatter = cluster.exchange(mine, s, STATE_ELEMENT_BYTES[s.config.optim.gradient_reduce])
        gather = cluster.exchange(mine, s, s.choices.recipe.wide)
        shown = max(0.0, scatter - sum_over_pieces("backward", kinds, prices)) + max(
            0.0, gather - sum_over_pieces("forward", kinds, prices)
        )
    return (
        shown
        + sum(owned_state_share(s, grid) * n for (grid, _), n in mine.items()) * optimizer_bytes(s) / cluster.stream
    )


def owned_state_share(s: RunSetting, grid: str) -> float:
    """The share of a parameter's state that one rank has."""
    if s.choices.sharding == "none":
        return 1.0
    return 1 / (s.degrees["edp"] if grid == "expert" else s.degrees["dp"] * s.config.parallel.cp)


def max_live_chunks(pp: int, vpp: int, rank: int, microbatches: int, pair: bool) -> int:
    """Chunks of microbatches that a rank has under way at most."""
    ahead = pp - rank - 1
    chunks = 2 * ahead + (vpp - 1) * pp + 1 if vpp > 1 or pair else ahead + 1
    return min(chunks + pair, microbatches * vpp)


def largest_rank_gib(s: RunSetting, cut: PipelineCut, held: PieceMemories) -> float:
    """GiB of the rank that needs most."""
    return max(estimate_rank_bytes(s, kinds, held, first) for kinds, _, first in cut.ranks) / GIB


def estimate_rank_bytes(s: RunSetting, kinds: PieceKindCounts, held: PieceMemories, rank: int) -> float:
    c, choices, recipe = s.config.pipeline, s.choices, s.choices.recipe
    live = max_live_chunks(s.config.parallel.pp, c.vpp, rank, s.microbatches, c.pair) / c.vpp
    more = s.config.train.micro_batch - 1
    lives = {"L": 1.0 + c.pair}  # the head's microbatch turns round at once
    size = (more + 1) * sum(n * lives.get(kind[0], live) * held[kind].kept for kind, n in kinds)
    size += max(held[kind].workspace + more * held[kind].grows for kind, _ in kinds)
    copies = recipe.copies - (recipe.wide if choices.quantized_weights else 0.0) if recipe.copies else 0.0
    states = (
        0.0
        if choices.states_on_host
        else MAIN_WEIGHT_BYTES[s.config.optim.main] + 2 * STATE_ELEMENT_BYTES[s.config.optim.moments]
    )
    for grid in ("dense", "expert"):
        share = owned_state_share(s, grid)
        weights = (recipe.wide + STATE_ELEMENT_BYTES[s.config.optim.gradients]) * (
            share if choices.sharding == "fsdp" else 1.0
        )
        size += sum_over_pieces(grid, kinds, held) * (weights + states * share)
    return size + sum_over_pieces("quantized", kinds, held) * copies
