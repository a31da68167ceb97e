"""Peak memory of every pipeline rank, by part. Torch-free, and fast enough for a search.

    weights + gradients + main weights + moments        resident state
    + activations + working + margin                    at the peak
    + buffers + graphs                                  for communication and captured graphs

Activations are those of the live microbatches in the rank's own program at the peak, by stage. Ranks that differ in
their tensor, context, data or expert coordinate have the same memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from moefold.anatomy.visiting_states import visiting_bytes
from moefold.anatomy.weight_units import size_of_buffers
from moefold.config.run import BLOCK_TYPES, Config
from moefold.dispatch.room_sizes import arena_bytes, head_room, projection_room
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.memory.base_bytes import pieces_of_rank, weight_bytes
from moefold.plan.memory.context_rows import settings_of_rows
from moefold.plan.memory.grouped_parameters import with_groups
from moefold.plan.memory.host_weights import host_weights
from moefold.plan.memory.live_microbatches import StageBytes, running_op
from moefold.plan.memory.rank_stages import (
    RankKind,
    RankStages,
    StageCount,
    StagePieces,
    stages_by_rank,
)
from moefold.plan.memory.replicas import shard_count
from moefold.plan.memory.resident import (
    STATE_ELEMENT_BYTES,
    SUM_BYTES,
    ResidentState,
    adapters_of_layer,
    resident_state,
)
from moefold.plan.memory.run_setting import GIB, RunSetting, build_run_setting
from moefold.plan.options import PlanChoices

CUBLAS_WORKSPACE = GIB / 16  # allocated by torch for cuBLAS
UNITS_AT_A_TIME = 2  # with gradients: one that is reduced or updated, and one that backward is in
PIPELINE_MESSAGES = 4  # two received ahead and one sent, each way
OP_DESCRIPTIONS = {"F": "forward", "D": "backward", "W": "weight gradients"}


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank at its peak, in bytes. `live`: live microbatches by stage; `at`: the running op.
    `total` is what torch allocates, `needed` what the GPU must have: with GPU memory outside torch's allocator
    (`outside`). `host` is host memory. `stashed`: the most that pages of stashed rows take of their pool, a part of the
    buffers. `updated`: the number of parameters whose optimizer state the rank has."""

    rank: int
    stages: tuple[int, ...]
    parameters: float
    updated: float
    weights: float
    gradients: float
    main: float
    moments: float
    activations: float
    working: float
    margin: float
    buffers: float
    graphs: float
    host: float
    outside: float
    stashed: float
    live: tuple[int, ...]
    at: str

    @property
    def state(self) -> float:
        """Bytes of the resident state."""
        return self.weights + self.gradients + self.main + self.moments

    @property
    def total(self) -> float:
        peak = self.state + self.activations + self.working + self.margin
        return peak + self.buffers + self.graphs

    @property
    def needed(self) -> float:
        return self.total + self.outside


def plan_memory(
    config: Config,
    world: int,
    choices: PlanChoices | None = None,
    ranks: Iterable[int] | None = None,
) -> list[RankMemory]:
    """Memory of the given pipeline ranks, by default of all; `fullest_rank` picks the largest."""
    setting = build_run_setting(config, world, choices or PlanChoices())
    return memory_by_rank(setting, ranks)


def memory_by_rank(s: RunSetting, ranks: Iterable[int] | None = None) -> list[RankMemory]:
    """Memory of pipeline ranks; with dynamic sizes of context parallelism in rows of the size that needs most."""
    memory = memory_of_setting(fullest_setting(s), ranks)
    return [replace(rank, outside=s.outside) for rank in memory]


def fullest_setting(s: RunSetting) -> RunSetting:
    """The setting of the rows that need most; with fixed sizes the run's own."""
    settings = settings_of_rows(s)
    if len(settings) == 1:
        return settings[0]
    return max(settings, key=most_memory)


def most_memory(s: RunSetting) -> float:
    return fullest_rank(memory_of_setting(s)).total


def memory_of_setting(s: RunSetting, ranks: Iterable[int] | None = None) -> list[RankMemory]:
    all_stages = stages_by_rank(s.config)
    if ranks is None:
        ranks = range(len(all_stages))
    costs: dict[RankKind, RankKindCosts] = {}  # most ranks of a pipeline are of a few kinds
    memory: list[RankMemory] = []
    for number in ranks:
        stages = all_stages[number]
        kind = stages.kind
        if kind not in costs:
            costs[kind] = rank_kind_costs(s, stages)
        of_rank = rank_memory(s, number, stages, costs[kind])
        memory.append(of_rank)
    return memory


def fullest_rank(ranks: list[RankMemory]) -> RankMemory:
    return max(ranks, key=lambda rank: rank.total)


@dataclass(frozen=True)
class RankKindCosts:
    """Costs that ranks with the same pieces have in common: stages with even expert load, and with the fullest
    experts. `host`: weights there."""

    state: ResidentState
    host: float
    update: float
    buffers: float
    stages: list[StageCount]
    fullest: list[StageCount]
    even: StageBytes
    full: StageBytes


def rank_kind_costs(s: RunSetting, rank: RankStages) -> RankKindCosts:
    even = stage_counts(s, rank)
    full = stage_counts(s, rank, s.load)
    state = with_groups(s, rank, resident_state(s, rank, even))
    experts = host_weights(s, rank)
    state = replace(state, weights=state.weights - experts.saved)
    return RankKindCosts(
        state=state,
        host=experts.on_host,
        update=optimizer_workspace(s, state),
        buffers=buffer_bytes(s, rank, state),
        stages=even,
        fullest=full,
        even=bytes_by_stage(even),
        full=bytes_by_stage(full),
    )


def stage_counts(s: RunSetting, rank: RankStages, load: float = 1.0) -> list[StageCount]:
    return [s.count_stage(pieces, load) for pieces in rank.pieces]


def bytes_by_stage(stages: list[StageCount]) -> StageBytes:
    kept = [stage.kept for stage in stages]
    waiting = [stage.waiting for stage in stages]
    forward = [stage.forward for stage in stages]
    backward = [stage.backward for stage in stages]
    weight_gradients = [0.0] * len(stages)
    return StageBytes(kept, waiting, forward + backward + weight_gradients)


class PeakMoment(NamedTuple):
    """Peak of a rank: saved bytes with even expert load and with the fullest experts, workspace, allocated gradients,
    live microbatches, and the running op."""

    even: float
    full: float
    working: float
    gradients: float
    live: tuple[int, ...]
    running_op: str

    @property
    def total(self) -> float:
        return self.full + self.working + self.gradients


def find_peak_moment(s: RunSetting, number: int, rank: RankStages, costs: RankKindCosts) -> PeakMoment:
    gradients = costs.state.gradients
    if s.grows_gradients:
        moments = one_microbatch_moments(s, rank, costs)
        peak = max(moments, key=lambda moment: moment.total)
    else:
        peak = program_peak(s, number, rank, costs)
    # The optimizer runs when no microbatch is live, or inside backward.
    if s.frees_gradients:
        return peak
    if costs.update + gradients > peak.total:
        no_microbatch = (0,) * len(peak.live)
        return PeakMoment(0.0, 0.0, costs.update, gradients, no_microbatch, "optimizer step")
    return peak


def program_peak(s: RunSetting, number: int, rank: RankStages, costs: RankKindCosts) -> PeakMoment:
    """The peak over the moments of the rank's program, with the fullest experts."""
    moment = s.moments[number].peak_moment(costs.full)
    kept, working = moment.bytes_held(costs.even)
    full_kept, full_working = moment.bytes_held(costs.full)
    full = full_kept + full_working - working
    kind, chunk = running_op(moment)
    op = OP_DESCRIPTIONS[kind]
    description = f"{op} of stage {rank.numbers[chunk]}"
    gradients = costs.state.gradients
    return PeakMoment(kept, full, working, gradients, moment.live, description)


def most_gradients(s: RunSetting, rank: RankStages) -> float:
    """Parameters whose gradients exist at a time: all, or those of two units, each a layer, where they are freed."""
    if not s.frees_gradients:
        return inf
    units: list[float] = []
    for pieces in rank.pieces:
        for piece, layer in pieces:
            parameters = s.count_piece(piece, layer).parameters
            units.append(sum(parameters.values()))
    largest = sorted(units)[-UNITS_AT_A_TIME:]
    return sum(largest)


def one_microbatch_moments(s: RunSetting, rank: RankStages, costs: RankKindCosts) -> Iterator[PeakMoment]:
    """Moments of a step's only microbatch: forward, with no gradient allocated, and every step of backward."""
    most = most_gradients(s, rank)
    gradient_bytes = STATE_ELEMENT_BYTES[s.optim.gradients] * costs.state.trained
    even = costs.stages[0]
    full = costs.fullest[0]
    fullest_forward = full.kept + full.forward - even.forward
    yield PeakMoment(even.kept, fullest_forward, even.forward, 0.0, (1,), "forward of stage 0")
    steps = zip(even.backward_steps, full.backward_steps, strict=True)
    for even_step, full_step in steps:
        even_freed, with_gradients, even_workspace = even_step
        full_freed, _, full_workspace = full_step
        kept = even.kept - even_freed
        fullest_kept = full.kept - full_freed + full_workspace - even_workspace
        gradients = min(with_gradients, most) * gradient_bytes
        yield PeakMoment(kept, fullest_kept, even_workspace, gradients, (1,), "backward of stage 0")


def rank_memory(s: RunSetting, number: int, rank: RankStages, costs: RankKindCosts) -> RankMemory:
    state = costs.state
    peak = find_peak_moment(s, number, rank, costs)
    main = state.main
    moments = state.moments
    host = costs.host
    # Offloaded state and activations are counted on the host instead.
    if s.states_on_host:
        host += main + moments
        main = moments = 0.0
    for microbatches, stage in zip(peak.live, costs.stages, strict=True):
        host += microbatches * stage.offloaded
    return RankMemory(
        rank=number,
        stages=rank.numbers,
        parameters=state.parameters,
        updated=state.share,
        weights=state.weights,
        gradients=peak.gradients,
        main=main,
        moments=moments,
        activations=peak.even,
        working=peak.working,
        margin=peak.full - peak.even,
        buffers=costs.buffers,
        graphs=graph_input_bytes(s, rank, peak.live),
        host=host,
        outside=s.outside,
        stashed=most_stashed(s, number, costs),
        live=peak.live,
        at=peak.running_op,
    )


def most_stashed(s: RunSetting, number: int, costs: RankKindCosts) -> float:
    """Bytes in pages of a stash when most microbatches are live, with the fullest experts."""
    pages = [stage.stash_pages for stage in costs.fullest]
    nothing = [0.0] * len(pages)
    by_stage = StageBytes(pages, nothing, 3 * nothing)
    moment = s.moments[number].peak_moment(by_stage)
    most, _ = moment.bytes_held(by_stage)
    return most


def optimizer_workspace(s: RunSetting, state: ResidentState) -> float:
    """Bytes of the reduced gradients that the optimizer reads."""
    if s.choices.stack != "moefold" or s.choices.sharding == "fsdp":
        return 0.0
    kept = s.optim.gradients
    of_sum = SUM_BYTES if kept in BLOCK_TYPES else STATE_ELEMENT_BYTES[kept]
    return state.reduced * of_sum


def layer_count(pieces: StagePieces) -> int:
    return sum(piece in "tm" for piece, _ in pieces)


def buffer_bytes(s: RunSetting, rank: RankStages, state: ResidentState) -> float:
    """Bytes of pipeline messages, RoPE tables and GEMM workspace; with FSDP also whole weights and gradients, what
    states in host memory pass through, the pool of a stash, and rooms of tokens and of projections' rows."""
    model = s.model
    choices = s.choices
    wide = choices.recipe.wide
    size = CUBLAS_WORKSPACE if choices.device == "cuda" else 0.0
    if s.parallel.pp > 1:
        streams = 1 + rank.aside
        elements = PIPELINE_MESSAGES * s.portion.tokens * model.hidden
        size += elements * wide * streams
    if choices.stack == "moefold":  # one RoPE table for all layers, in fp32
        rotated = model.attention.rope_dim or model.attention.head_dim
        size += s.portion.seq_len * rotated * 4
    if choices.sharding == "fsdp":
        size += whole_unit_bytes(s, rank, state)
    if s.states_on_host and choices.stack == "moefold" and choices.device == "cuda":
        visiting = state.main + state.moments
        size += visiting_bytes(state.share, visiting, s.optim.states_window_gib)
    if s.portion.stashes:
        size += s.config.memory.stash_gib * GIB
    if s.parallel.dispatcher == "symmetric" and s.parallel.ep * s.parallel.etp > 1:
        size += arena_bytes(s.config, int(wide))
    if "projections" in s.parallel.tiles:
        size += projection_room(s.config, int(wide)).arena_bytes
    if "heads" in s.parallel.tiles:
        size += head_room(s.config, int(wide)).arena_bytes
    return size


def whole_unit_bytes(s: RunSetting, rank: RankStages, state: ResidentState) -> float:
    """Bytes of whole weights and gradients with FSDP: of two layers and of one; in this trainer of the two largest
    units, the one in use and the next, with paired slots for each of two passes, and gradients of the one in backward
    and of that on its way."""
    wide = s.recipe.wide
    gradient = STATE_ELEMENT_BYTES[s.optim.gradients]
    if s.choices.stack != "moefold":
        layers = sum(map(layer_count, rank.pieces))
        layer_parameters = state.parameters / max(1, layers)
        return layer_parameters * (2 * wide + gradient)
    weights = bytes_of_whole_units(s, rank)
    config = s.config
    if config.train.objective == "dpo" and not config.lora.rank:  # units of the frozen copy
        weights *= 2
    parameters: list[float] = []
    for piece, layer in pieces_of_rank(rank):
        count = s.count_piece(piece, layer)
        size = shared_out(s, count.parameters)
        parameters.append(size)
    parameters.sort()
    largest = parameters[-UNITS_AT_A_TIME:]
    gradients = state.trained * sum(largest)
    return weights + gradients * gradient


def bytes_of_whole_units(s: RunSetting, rank: RankStages) -> float:
    """Bytes of the units of a rank that have memory at a time in a fully sharded run."""
    units: list[float] = []
    for piece, layer in pieces_of_rank(rank):
        size = unit_bytes(s, piece, layer)
        units.append(size)
    return size_of_buffers(units, s.pipeline)


def unit_bytes(s: RunSetting, piece: str, layer: int) -> float:
    weights = weight_bytes(s, piece, layer)
    size = shared_out(s, weights)
    is_layer = piece in "tm"
    if is_layer and s.shards_of("dense") > 1:
        adapters = adapters_of_layer(s)
        size += adapters * s.recipe.wide
    return size


def shared_out(s: RunSetting, sizes: Mapping[ParameterClass, float]) -> float:
    """Of sizes by class, the sum of those that are shared out among replicas: others are whole on every rank."""
    total = 0.0
    for kind, size in sizes.items():
        if shard_count(s, kind) > 1:
            total += size
    return total


def graph_input_bytes(s: RunSetting, rank: RankStages, live: tuple[int, ...]) -> float:
    """Bytes of the static inputs of captured steps: one stream for each layer and live microbatch."""
    if s.choices.graphs == "none":
        return 0.0
    captured = 0
    for microbatches, pieces in zip(live, rank.pieces, strict=True):
        captured += microbatches * layer_count(pieces)
    elements = captured * s.portion.tokens * s.model.hidden
    return elements * s.recipe.wide
