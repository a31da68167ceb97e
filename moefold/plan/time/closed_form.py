"""Lower bounds of a step's time and memory in closed form, for ranking thousands of layouts; the best are simulated.

No layout is faster than its bound or needs less memory, so that a search which simulates layouts in the order of their
bounds, until a bound exceeds the last simulated time that it needs, has passed over nothing.

Time on rank r of p, with v stages per rank, m microbatches, F and B the seconds of a stage:

    first B of rank r     F of all stages, B of the last stages of later ranks
    then                  its slots: B, or F with B, in a paired slot priced as the simulator does
    drain                 B of the first stages of earlier ranks

The forwards that rank r runs before its first B (`lone_forwards`) are not paired. Memory is that of the live stages
after every p slots, where forwards and backwards move on to the next stage of the rank. The costs of a stage are sums
over its pieces, and pieces of one kind cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from moefold.config.run import Config
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.machine.cluster import Cluster
from moefold.plan.memory.peak_memory import CUBLAS_WORKSPACE, PIPELINE_MESSAGES
from moefold.plan.memory.rank_stages import StagePieces, stages_by_rank
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES, STATE_ELEMENT_BYTES
from moefold.plan.memory.run_setting import GIB, RunSetting, defers_weight_gradients, microbatches_per_step
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import OVERLAP_FRICTION, neighbour_send_seconds, optimizer_bytes
from moefold.plan.time.step_times import StepClock
from moefold.schedule.simulate_program import OpLanes, paired_duration

PieceKind = tuple[str, int]
LiveStages = tuple[int, ...]  # live microbatches of each stage of a rank
BOUNDED_SCHEDULES = ("1f1b", "interleaved")  # of other schedules only the work of a rank is counted


@dataclass(frozen=True)
class PipelineCut:
    """A model cut over its pipeline ranks: its distinct stages, and for each rank the numbers of its stages."""

    stages: tuple[StagePieces, ...]
    by_rank: tuple[tuple[int, ...], ...]

    @cached_property
    def kinds(self) -> set[PieceKind]:
        kinds: set[PieceKind] = set()
        for pieces in self.stages:
            kinds.update(pieces)
        return kinds

    @cached_property
    def distinct_ranks(self) -> list[int]:
        """The first of the ranks with the same stages: it has the most live microbatches of them."""
        first: dict[tuple[int, ...], int] = {}
        for rank, stages in enumerate(self.by_rank):
            first.setdefault(stages, rank)
        return list(first.values())


def cut_pipeline(config: Config) -> PipelineCut:
    numbers: dict[StagePieces, int] = {}
    by_rank: list[tuple[int, ...]] = []
    for rank in stages_by_rank(config):
        stages = [numbers.setdefault(pieces, len(numbers)) for pieces in rank.pieces]
        by_rank.append(tuple(stages))
    return PipelineCut(tuple(numbers), tuple(by_rank))


def closed_form_setting(config: Config, world: int, choices: PlanChoices) -> RunSetting:
    """A setting without a simulated program, which closed forms do not need. The dispatcher must be chosen."""
    microbatches = microbatches_per_step(config, world)
    defers_wgrad = defers_weight_gradients(config, choices, config.pipeline.defer)
    portion = make_rank_portion(config, config.parallel.dispatcher, defers_wgrad, accumulates=microbatches > 1)
    return RunSetting(config, world, choices, portion, [], microbatches)


class StageSeconds(NamedTuple):
    """Seconds of both lanes in F, D and W, of one microbatch in a piece or a stage."""

    F: OpLanes
    D: OpLanes
    W: OpLanes

    @property
    def forward(self) -> float:
        return sum(self.F)

    @property
    def backward(self) -> float:
        return sum(self.D) + sum(self.W)


class StageMemory(NamedTuple):
    """Memory of a piece or a stage: bytes saved by a microbatch until D, bytes that wait for its W, workspace of D;
    parameters on a rank: of the dense grid, of the expert grid, and quantised ones; bytes of quantised copies."""

    kept: float
    waiting: float
    workspace: float
    dense: float
    expert: float
    quantized: float
    copies: float


StageTimes = Sequence[StageSeconds]
StageMemories = Sequence[StageMemory]


def time_piece(clock: StepClock, kind: PieceKind) -> StageSeconds:
    F, D, W = clock.time_piece(*kind)
    return StageSeconds((F.compute, F.travel), (D.compute, D.travel), (W.compute, W.travel))


def measure_piece(s: RunSetting, kind: PieceKind) -> StageMemory:
    count = s.count_stage((kind,), s.load)
    grids = {"dense": 0.0, "expert": 0.0}
    for (grid, _), parameters in count.parameters:
        grids[grid] += parameters
    waiting = count.waiting if s.portion.defers_wgrad else 0.0
    parameters = (grids["dense"], grids["expert"], count.quantized)
    return StageMemory(count.kept, waiting, count.backward, *parameters, count.copies)


def time_stages(cut: PipelineCut, pieces: Mapping[PieceKind, StageSeconds]) -> list[StageSeconds]:
    """Seconds of the distinct stages."""
    stages: list[StageSeconds] = []
    for kinds in cut.stages:
        held = [pieces[kind] for kind in kinds]
        F, D, W = map(sum_lanes, zip(*held, strict=True))
        stages.append(StageSeconds(F, D, W))
    return stages


def sum_lanes(ops: Sequence[OpLanes]) -> OpLanes:
    compute, comm = map(sum, zip(*ops, strict=True))
    return compute, comm


def measure_stages(cut: PipelineCut, pieces: Mapping[PieceKind, StageMemory]) -> list[StageMemory]:
    """Memory of the distinct stages. Backward frees the tensors of later pieces, except for those that wait for a
    weight gradient."""
    stages: list[StageMemory] = []
    for kinds in cut.stages:
        held = [pieces[kind] for kind in kinds]
        freed = workspace = 0.0
        for piece in reversed(held):
            workspace = max(workspace, piece.workspace - freed)
            freed += piece.kept - piece.waiting
        total = StageMemory(*map(sum, zip(*held, strict=True)))
        stages.append(total._replace(workspace=workspace))
    return stages


# Time.


def least_step_seconds(
    s: RunSetting, cluster: Cluster, cut: PipelineCut, seconds: StageTimes, memory: StageMemories
) -> float:
    update = 0.0
    for rank in cut.distinct_ranks:
        numbers = cut.by_rank[rank]
        times = [seconds[number] for number in numbers]
        held = [memory[number] for number in numbers]
        update = max(update, least_update_seconds(s, cluster, times, held))
    return PipelineBound(s, cluster, cut, seconds).seconds + update


def lone_forwards(pp: int, vpp: int, rank: int, pair: bool) -> int:
    """Forwards that a rank runs before its first backward."""
    later_ranks = pp - rank - 1
    if vpp == 1 and not pair:
        return later_ranks + 1
    return 2 * later_ranks + (vpp - 1) * pp + 1


class PipelineBound:
    """The least time of a pipeline: the largest of its ranks' bounds."""

    def __init__(self, s: RunSetting, cluster: Cluster, cut: PipelineCut, stages: StageTimes):
        self.pp = s.parallel.pp
        self.vpp = s.pipeline.vpp
        self.pair = s.pipeline.pair
        self.microbatches = s.microbatches
        self.bounded = s.pipeline.schedule in BOUNDED_SCHEDULES and not s.pipeline.defer
        self.send = neighbour_send_seconds(s, cluster)
        self.by_rank: list[list[StageSeconds]] = []
        for numbers in cut.by_rank:
            self.by_rank.append([stages[number] for number in numbers])
        self.pair_seconds: dict[tuple[int, int], float] = {}

    @property
    def seconds(self) -> float:
        if not self.bounded:
            work = map(self.rank_work_seconds, range(self.pp))
            return max(work)
        # Seconds of earlier ranks' first stages, and of later ranks' last stages.
        send = self.send
        first = [rank[0] for rank in self.by_rank]
        last = [rank[-1] for rank in self.by_rank]
        last.reverse()
        fill = running_sums([stage.forward + send for stage in first])
        drain = running_sums([stage.backward + send for stage in first])
        later = running_sums([stage.backward + send for stage in last])
        all_forwards = -send
        for stages in self.by_rank:
            all_forwards += sum(stage.forward + send for stage in stages)
        longest = 0.0
        for rank in range(self.pp):
            first_backward = all_forwards + later[self.pp - 1 - rank]
            after = self.seconds_from_first_backward(rank, first_backward, fill[rank])
            longest = max(longest, after + drain[rank])
        return longest

    def seconds_from_first_backward(self, rank: int, first_backward: float, fill: float) -> float:
        """When the last slot of a rank ends, given the earliest start of its first backward and of its first
        forward."""
        stages = self.by_rank[rank]
        slots = self.microbatches * self.vpp
        lone = min(slots, lone_forwards(self.pp, self.vpp, rank, self.pair))
        forward = backward = lone_forward = paired_backward = 0.0
        for place, stage in enumerate(stages):
            turn = self.vpp - 1 - place  # backwards begin with the last stage
            lone_here = forwards_of_stage(lone, place, self.pp, self.vpp)
            paired_here = forwards_of_stage(slots - lone, turn, self.pp, self.vpp)
            forward += self.microbatches * stage.forward
            backward += self.microbatches * stage.backward
            lone_forward += lone_here * stage.forward
            paired_backward += paired_here * stage.backward
        start = max(first_backward, fill + lone_forward)
        if not self.pair:
            return start + backward + forward - lone_forward
        lone_backward = backward - paired_backward
        return start + lone_backward + self.seconds_of_pairs(rank, slots - lone)

    def seconds_of_pairs(self, rank: int, pairs: int) -> float:
        """Seconds of a rank's paired slots, whose stages come in cycles."""
        cycle = self.pp * self.vpp
        cycles, rest = divmod(pairs, cycle)
        whole = self.seconds_of_first_pairs(rank, cycle) if cycles else 0.0
        return cycles * whole + self.seconds_of_first_pairs(rank, rest)

    def seconds_of_first_pairs(self, rank: int, pairs: int) -> float:
        """Seconds of the first pairs of a cycle. Backwards visit the rank's stages in reverse order, p microbatches
        each, and forwards are ahead of them by the lone forwards."""
        stages = self.by_rank[rank]
        ahead = 2 * (self.pp - rank - 1) + 1
        groups, late = divmod(ahead, self.pp)
        early = self.pp - late
        seconds = 0.0
        for turn in range(self.vpp):
            backward = stages[self.vpp - 1 - turn]
            place = (self.vpp - 1 + groups + turn) % self.vpp
            following = (place + 1) % self.vpp
            pairs_here = min(max(pairs - turn * self.pp, 0), self.pp)
            early_here = min(pairs_here, early)
            seconds += early_here * self.seconds_of_pair(stages[place], backward)
            seconds += (pairs_here - early_here) * self.seconds_of_pair(stages[following], backward)
        return seconds

    def seconds_of_pair(self, forward: StageSeconds, backward: StageSeconds) -> float:
        key = (id(forward), id(backward))
        if key not in self.pair_seconds:
            ops = (forward.F, backward.D, backward.W)
            self.pair_seconds[key] = paired_duration(ops, OVERLAP_FRICTION)
        return self.pair_seconds[key]

    def rank_work_seconds(self, rank: int) -> float:
        """Seconds of a rank's ops, with every pair that its program could have."""
        work = 0.0
        for stage in self.by_rank[rank]:
            alone = stage.forward + stage.backward
            work += self.seconds_of_pair(stage, stage) if self.pair else alone
        return self.microbatches * work


def running_sums(values: Sequence[float]) -> list[float]:
    """Sums of the values before each place, and of all."""
    return list(accumulate(values, initial=0.0))


def least_update_seconds(s: RunSetting, cluster: Cluster, times: StageTimes, stages: StageMemories) -> float:
    """Seconds of exposed gradient and weight exchange, and of the optimizer."""
    dense = sum(stage.dense for stage in stages)
    expert = sum(stage.expert for stage in stages)
    exposed = 0.0
    if s.choices.sharding != "fsdp":
        parameters: dict[ParameterClass, float] = {}
        parameters["dense", ()] = dense
        parameters["expert", ()] = expert
        gradient = STATE_ELEMENT_BYTES[s.optim.gradient_reduce]
        scatter = cluster.exchange_seconds(parameters, s, gradient)
        gather = cluster.exchange_seconds(parameters, s, s.recipe.wide)
        backward = sum(stage.D[0] + stage.W[0] for stage in times)
        forward = sum(stage.F[0] for stage in times)
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


# Memory.


def least_rank_gib(s: RunSetting, cut: PipelineCut, stages: StageMemories) -> float:
    """GiB of the rank with the largest memory."""
    most = 0.0
    for rank in cut.distinct_ranks:
        held = [stages[number] for number in cut.by_rank[rank]]
        most = max(most, least_rank_bytes(s, held, rank))
    return (most + least_buffer_bytes(s) + s.outside) / GIB


def least_buffer_bytes(s: RunSetting) -> float:
    if s.parallel.pp == 1:
        return CUBLAS_WORKSPACE
    message = s.portion.tokens * s.model.hidden * s.recipe.wide
    return CUBLAS_WORKSPACE + PIPELINE_MESSAGES * message


def least_rank_bytes(s: RunSetting, stages: StageMemories, rank: int) -> float:
    choices = s.choices
    optim = s.optim
    state = 0.0
    if not choices.states_on_host:
        moments = 2 * STATE_ELEMENT_BYTES[optim.moments]
        main = MAIN_WEIGHT_BYTES[optim.main] if s.recipe.wide < 4 else 0
        state = main + moments
    dense = sum(stage.dense for stage in stages)
    expert = sum(stage.expert for stage in stages)
    # Weights and gradients whole or sharded, optimizer state sharded over the replicas of its grid.
    weights = gradients = states = 0.0
    for grid, count in (("dense", dense), ("expert", expert)):
        share = owned_state_share(s, grid)
        held = count * share if choices.sharding == "fsdp" else count
        weights += held * s.recipe.wide
        gradients += held * STATE_ELEMENT_BYTES[optim.gradients]
        states += count * share * state
    if choices.sharding != "fsdp":
        weights += sum(stage.copies for stage in stages)
        if s.keeps_only_quantised:
            weights -= s.recipe.wide * sum(stage.quantized for stage in stages)
    activations = least_activation_bytes(s, stages, rank)
    if s.grows_gradients:  # they are allocated while activations are freed
        return weights + states + max(gradients, activations)
    return weights + states + gradients + activations


def least_activation_bytes(s: RunSetting, stages: StageMemories, rank: int) -> float:
    """Saved bytes of live microbatches, and the workspace of a backward, at the fullest of the moments after every p
    slots of a rank."""
    pp = s.parallel.pp
    vpp = s.pipeline.vpp
    slots = min(s.microbatches * vpp, 2 * pp * (vpp + 1))  # later moments are the same
    kept = [stage.kept for stage in stages]
    most = 0.0
    for backward, live in live_moments(pp, vpp, rank, slots, s.pipeline.pair):
        size = sum(map(mul, live, kept))
        most = max(most, size + stages[backward].workspace)
    return most


@lru_cache(maxsize=65_536)
def live_moments(pp: int, vpp: int, rank: int, slots: int, pair: bool) -> list[tuple[int, LiveStages]]:
    """The moments of a rank after every p slots from its first backward on: the stage that runs backward, and live
    microbatches."""
    forwards = lone_forwards(pp, vpp, rank, pair)
    if pair:
        forwards += 1  # it shares the slot of the first backward
    backwards = 0
    moments: list[tuple[int, LiveStages]] = []
    for turn in range(vpp):
        live: list[int] = []
        for place in range(vpp):
            begun = forwards_of_stage(min(forwards, slots), place, pp, vpp)
            ended = forwards_of_stage(backwards, vpp - 1 - place, pp, vpp)
            live.append(begun - ended)
        moments.append((vpp - 1 - turn, tuple(live)))
        forwards += pp
        backwards += pp
    return moments


def forwards_of_stage(forwards: int, place: int, pp: int, vpp: int) -> int:
    """Of a rank's first forwards, those of its stage at this place: p microbatches of each stage in turn."""
    if vpp == 1:
        return forwards
    rounds, rest = divmod(forwards, pp * vpp)
    return rounds * pp + min(pp, max(0, rest - place * pp))
