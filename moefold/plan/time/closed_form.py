"""Closed forms of a step's time and memory, for ranking thousands of layouts; the best are then simulated.

The steady state takes the busiest rank's time for all microbatches. Fill and drain of the pipeline add one chunk's
mean time for each other rank:

    unpaired    m x busiest + (p - 1) / v x mean
    paired      the same, with the time of a paired forward and backward, except for the first and last

Rank r has p - r live microbatches. With several stages per rank or with pairing, it has 2 (p - r - 1) + (v - 1) p + 1
live chunks; pairing adds one more. Of ranks with the same pieces, the first has the most.

Layers of one kind cost the same, so a rank is described by the number of its pieces of each kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from moefold.config.run import Config
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.machine.cluster import Cluster
from moefold.plan.memory.rank_stages import count_stage, stages_by_rank
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES, STATE_ELEMENT_BYTES
from moefold.plan.memory.run_setting import GIB, RunSetting, microbatches_per_step
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import OVERLAP_FRICTION, optimizer_bytes
from moefold.plan.time.step_times import StepClock

PieceKind = tuple[str, int]
PieceKindCounts = tuple[tuple[PieceKind, int], ...]  # kinds of pieces with their numbers


class RankGroup(NamedTuple):
    """Pipeline ranks that hold the same pieces: their number, and the first of them."""

    kinds: PieceKindCounts
    ranks: int
    first: int


@dataclass(frozen=True)
class PipelineCut:
    """A model cut over its pipeline ranks."""

    groups: tuple[RankGroup, ...]

    @cached_property
    def kinds(self) -> set[PieceKind]:
        kinds: set[PieceKind] = set()
        for group in self.groups:
            kinds.update(kind for kind, _ in group.kinds)
        return kinds


def cut_pipeline(config: Config) -> PipelineCut:
    by_rank: list[PieceKindCounts] = []
    for rank in stages_by_rank(config):
        pieces = Counter(piece for stage in rank.pieces for piece in stage)
        kinds = sorted(pieces.items())
        by_rank.append(tuple(kinds))
    groups: list[RankGroup] = []
    for kinds, ranks in Counter(by_rank).items():
        first = by_rank.index(kinds)
        groups.append(RankGroup(kinds, ranks, first))
    return PipelineCut(tuple(groups))


def closed_form_setting(config: Config, world: int, choices: PlanChoices) -> RunSetting:
    """A setting without a simulated program, which closed forms do not need."""
    pipeline = config.pipeline
    defers_wgrad = pipeline.defer or (pipeline.pair and pipeline.fill)
    portion = make_rank_portion(config, config.parallel.dispatcher, defers_wgrad)
    microbatches = microbatches_per_step(config, world)
    return RunSetting(config, world, choices, portion, [], microbatches)


@dataclass(frozen=True)
class PiecePrice:
    """Seconds of one microbatch in a piece: on the compute lane, on the comm lane (`travel`), and the compute of
    forward and of backward."""

    compute: float
    travel: float
    forward: float
    backward: float


@dataclass(frozen=True)
class PieceMemory:
    """Memory of a piece. Bytes: saved for one sequence, workspace for one sequence, growth of the workspace with each
    further sequence. Parameters on a rank: of the dense grid, of the expert grid, and quantised ones."""

    kept: float
    workspace: float
    workspace_growth: float
    dense: float
    expert: float
    quantized: float


PiecePrices = Mapping[PieceKind, PiecePrice]
PieceMemories = Mapping[PieceKind, PieceMemory]


def price_piece(clock: StepClock, kind: PieceKind) -> PiecePrice:
    piece, layer = kind
    F, D, W = clock.time_piece(piece, layer)
    return PiecePrice(
        compute=F.compute + D.compute + W.compute,
        travel=F.travel + D.travel + W.travel,
        forward=F.compute,
        backward=D.compute + W.compute,
    )


def measure_piece_memory(s: RunSetting, kind: PieceKind) -> PieceMemory:
    """Memory of a piece, from microbatches of one and of two sequences: a part of the workspace is constant."""
    pieces = (kind,)
    one_sequence = replace(s.portion, micro_batch=1)
    two_sequences = replace(s.portion, micro_batch=2)
    one = count_stage(s.model, pieces, one_sequence, s.choices)
    two = count_stage(s.model, pieces, two_sequences, s.choices)
    grids = {"dense": 0.0, "expert": 0.0}
    for (grid, _), count in one.parameters:
        grids[grid] += count
    return PieceMemory(
        kept=one.kept,
        workspace=one.backward,
        workspace_growth=two.backward - one.backward,
        dense=grids["dense"],
        expert=grids["expert"],
        quantized=one.quantized,
    )


def sum_over_pieces(field: str, kinds: PieceKindCounts, values: PiecePrices | PieceMemories) -> float:
    total = 0.0
    for kind, count in kinds:
        total += count * getattr(values[kind], field)
    return total


def paired_seconds(compute: float, travel: float) -> float:
    """Seconds of a forward and a backward in one slot."""
    longer = max(compute, travel)
    hidden = min(compute, travel)
    return longer + OVERLAP_FRICTION * hidden


def estimate_step_seconds(
    s: RunSetting, cluster: Cluster, cut: PipelineCut, prices: PiecePrices, memories: PieceMemories
) -> float:
    pipeline = s.pipeline
    pp = s.parallel.pp
    all_ranks = 0.0
    slowest = busiest = 0.0
    update = 0.0
    # The busiest rank bounds the steady state, the mean rank the fill and the drain.
    for kinds, ranks, _ in cut.groups:
        compute = sum_over_pieces("compute", kinds, prices)
        travel = sum_over_pieces("travel", kinds, prices)
        unpaired = compute + travel
        busy = paired_seconds(compute, travel) if pipeline.pair else unpaired
        all_ranks += unpaired * ranks
        slowest = max(slowest, unpaired)
        busiest = max(busiest, busy)
        group_update = estimate_update_seconds(s, cluster, kinds, prices, memories)
        update = max(update, group_update)
    mean_rank = all_ranks / pp
    steady = s.microbatches * busiest
    fill_and_drain = (pp - 1) * mean_rank / pipeline.vpp
    unpaired_ends = (slowest - busiest) / pipeline.vpp  # the first forward and the last backward
    return steady + fill_and_drain + unpaired_ends + update


def estimate_update_seconds(
    s: RunSetting, cluster: Cluster, kinds: PieceKindCounts, prices: PiecePrices, memories: PieceMemories
) -> float:
    """Seconds of exposed gradient and weight exchange, and of the optimizer."""
    dense = sum_over_pieces("dense", kinds, memories)
    expert = sum_over_pieces("expert", kinds, memories)
    exposed = 0.0
    if s.choices.sharding != "fsdp":
        parameters: dict[ParameterClass, float] = {}
        parameters["dense", ()] = dense
        parameters["expert", ()] = expert
        gradient = STATE_ELEMENT_BYTES[s.optim.gradient_reduce]
        scatter = cluster.exchange_seconds(parameters, s, gradient)
        gather = cluster.exchange_seconds(parameters, s, s.recipe.wide)
        backward = sum_over_pieces("backward", kinds, prices)
        forward = sum_over_pieces("forward", kinds, prices)
        exposed_scatter = max(0.0, scatter - backward)
        exposed_gather = max(0.0, gather - forward)
        exposed = exposed_scatter + exposed_gather
    owned_dense = owned_state_share(s, "dense") * dense
    owned_expert = owned_state_share(s, "expert") * expert
    owned = owned_dense + owned_expert
    return exposed + owned * optimizer_bytes(s) / cluster.pointwise_bandwidth


def owned_state_share(s: RunSetting, grid: str) -> float:
    """Share of a parameter's optimizer state that one rank holds."""
    if s.choices.sharding == "none":
        return 1.0
    if grid == "expert":
        return 1 / s.degrees["edp"]
    replicas = s.degrees["dp"] * s.parallel.cp
    return 1 / replicas


def max_live_chunks(pp: int, vpp: int, rank: int, microbatches: int, pair: bool) -> int:
    """Largest number of live chunks of microbatches on a rank."""
    later_ranks = pp - rank - 1
    chunks = later_ranks + 1
    if vpp > 1 or pair:
        earlier_chunks = (vpp - 1) * pp
        chunks = 2 * later_ranks + earlier_chunks + 1
    if pair:
        chunks += 1
    return min(chunks, microbatches * vpp)


def largest_rank_gib(s: RunSetting, cut: PipelineCut, memories: PieceMemories) -> float:
    """GiB of the rank with the largest memory."""
    most = 0.0
    for kinds, _, first in cut.groups:
        size = estimate_rank_bytes(s, kinds, memories, first)
        most = max(most, size)
    return most / GIB


def estimate_rank_bytes(s: RunSetting, kinds: PieceKindCounts, memories: PieceMemories, rank: int) -> float:
    choices = s.choices
    recipe = choices.recipe
    size = estimate_activation_bytes(s, kinds, memories, rank)
    state = 0.0
    if not choices.states_on_host:
        optim = s.optim
        moments = 2 * STATE_ELEMENT_BYTES[optim.moments]
        state = MAIN_WEIGHT_BYTES[optim.main] + moments
    weight_and_gradient = recipe.wide + STATE_ELEMENT_BYTES[s.optim.gradients]
    # Weights and gradients whole or sharded, optimizer state sharded over the replicas of its grid.
    for grid in ("dense", "expert"):
        share = owned_state_share(s, grid)
        weight_share = share if choices.sharding == "fsdp" else 1.0
        parameter = weight_and_gradient * weight_share + state * share
        size += sum_over_pieces(grid, kinds, memories) * parameter
    copies = recipe.copies
    if copies and choices.quantized_weights:
        copies -= recipe.wide
    return size + sum_over_pieces("quantized", kinds, memories) * copies


def estimate_activation_bytes(s: RunSetting, kinds: PieceKindCounts, memories: PieceMemories, rank: int) -> float:
    """Saved bytes of live microbatches, and the largest workspace. The head runs backward directly after forward, so
    one microbatch is live there, or two with pairing."""
    pipeline = s.pipeline
    sequences = s.train.micro_batch
    pp = s.parallel.pp
    chunks = max_live_chunks(pp, pipeline.vpp, rank, s.microbatches, pipeline.pair)
    live = chunks / pipeline.vpp
    live_on_head = 2.0 if pipeline.pair else 1.0
    kept = 0.0
    workspace = 0.0
    for kind, count in kinds:
        memory = memories[kind]
        piece, _ = kind
        live_pieces = count * (live_on_head if piece == "L" else live)
        kept += live_pieces * memory.kept
        growth = (sequences - 1) * memory.workspace_growth
        workspace = max(workspace, memory.workspace + growth)
    return sequences * kept + workspace
