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

from moefold.anatomy.stage_contents import pair_kind
from moefold.anatomy.visiting_states import visiting_bytes
from moefold.config.run import Config
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.layer.rank_shapes import make_rank_portion
from moefold.plan.machine.cluster import Cluster
from moefold.plan.memory.base_bytes import saved_on_rank
from moefold.plan.memory.grouped_parameters import (
    ClassCount,
    effective_groups,
    owned_by_rank,
    rank_classes,
    sum_counts,
)
from moefold.plan.memory.host_weights import host_weights
from moefold.plan.memory.peak_memory import CUBLAS_WORKSPACE, PIPELINE_MESSAGES
from moefold.plan.memory.rank_stages import RankStages, StagePieces, stages_by_rank
from moefold.plan.memory.resident import (
    MAIN_WEIGHT_BYTES,
    STATE_ELEMENT_BYTES,
    SUM_BYTES,
    adapter_count,
    moment_sizes,
)
from moefold.plan.memory.run_setting import (
    GIB,
    RunSetting,
    agree_on_sharding,
    defers_weight_gradients,
    microbatches_per_step,
)
from moefold.plan.options import PlanChoices
from moefold.plan.time.simulate_step import OVERLAP_FRICTION, neighbour_send_seconds
from moefold.plan.time.step_times import StepClock
from moefold.plan.time.update_seconds import PassTimes, trained_part, update_seconds
from moefold.schedule.simulate_program import OpLanes, paired_duration

PieceKind = tuple[str, int]
StageNumbers = tuple[int, ...]  # the stages of a rank
BOUNDED_SCHEDULES = ("1f1b", "interleaved")  # of other schedules only the work of a rank is counted


@dataclass(frozen=True)
class PipelineCut:
    """A model cut over its pipeline ranks: its distinct stages, and for each rank the numbers of its stages among
    them."""

    stages: tuple[StagePieces, ...]
    by_rank: tuple[StageNumbers, ...]
    ranks: tuple[RankStages, ...]

    @cached_property
    def kinds(self) -> set[PieceKind]:
        kinds: set[PieceKind] = set()
        for pieces in self.stages:
            kinds.update(pieces)
        return kinds

    @cached_property
    def distinct_ranks(self) -> list[int]:
        """The first of the ranks with the same stages: it has the most live microbatches of them."""
        first: dict[StageNumbers, int] = {}
        for rank, stages in enumerate(self.by_rank):
            first.setdefault(stages, rank)
        return list(first.values())


def cut_pipeline(config: Config) -> PipelineCut:
    numbers: dict[StagePieces, int] = {}
    by_rank: list[StageNumbers] = []
    ranks = stages_by_rank(config)
    for rank in ranks:
        stages: list[int] = []
        for pieces in rank.pieces:
            next_number = len(numbers)
            number = numbers.setdefault(pieces, next_number)
            stages.append(number)
        by_rank.append(tuple(stages))
    distinct = tuple(numbers)
    return PipelineCut(distinct, tuple(by_rank), tuple(ranks))


class PipelineShape(NamedTuple):
    """Pipeline ranks, stages of each, and whether forwards are paired with backwards."""

    pp: int
    vpp: int
    pair: bool

    def lone_forwards(self, rank: int) -> int:
        """Forwards that a rank runs before its first backward."""
        later_ranks = self.pp - rank - 1
        if self.vpp == 1 and not self.pair:
            return later_ranks + 1
        return 2 * later_ranks + (self.vpp - 1) * self.pp + 1

    def forwards_of_stage(self, forwards: int, place: int) -> int:
        """Of a rank's first forwards, those of its stage at this place: p microbatches of each stage in turn."""
        pp = self.pp
        if self.vpp == 1:
            return forwards
        rounds, rest = divmod(forwards, pp * self.vpp)
        begun = max(0, rest - place * pp)
        return rounds * pp + min(pp, begun)

    def backwards_of_stage(self, backwards: int, place: int) -> int:
        """The same of backwards, which begin with the last stage."""
        turn = self.vpp - 1 - place
        return self.forwards_of_stage(backwards, turn)


def pipeline_shape(s: RunSetting) -> PipelineShape:
    pipeline = s.pipeline
    pair = pair_kind(pipeline) == "opposite"
    return PipelineShape(s.parallel.pp, pipeline.vpp, pair)


def closed_form_setting(config: Config, world: int, choices: PlanChoices) -> RunSetting:
    """A setting without a simulated program, which closed forms do not need. The dispatcher must be chosen."""
    choices = agree_on_sharding(config, choices)
    microbatches = microbatches_per_step(config, world)
    defers_wgrad = defers_weight_gradients(config, choices, config.pipeline.defer)
    dispatcher = config.parallel.dispatcher
    accumulates = microbatches > 1
    portion = make_rank_portion(config, dispatcher, defers_wgrad, accumulates)
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

    @property
    def forward_compute(self) -> float:
        compute, _ = self.F
        return compute

    @property
    def backward_compute(self) -> float:
        data_gradient, _ = self.D
        weight_gradient, _ = self.W
        return data_gradient + weight_gradient


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
    ops = clock.time_piece(*kind)
    F, D, W = [(op.compute, op.travel) for op in ops]
    return StageSeconds(F, D, W)


def measure_piece(s: RunSetting, kind: PieceKind) -> StageMemory:
    count = s.count_stage((kind,), s.load)
    grids = {"dense": 0.0, "expert": 0.0}
    for (grid, _), parameters in count.parameters:
        grids[grid] += parameters
    defers_wgrad = s.portion.defers_wgrad
    return StageMemory(
        kept=count.kept,
        waiting=count.waiting if defers_wgrad else 0.0,
        workspace=count.backward,
        dense=grids["dense"],
        expert=grids["expert"],
        quantized=count.quantized,
        copies=count.copies,
    )


def time_stages(cut: PipelineCut, pieces: Mapping[PieceKind, StageSeconds]) -> list[StageSeconds]:
    """Seconds of the distinct stages."""
    stages: list[StageSeconds] = []
    for kinds in cut.stages:
        held = [pieces[kind] for kind in kinds]
        F = sum_lanes([piece.F for piece in held])
        D = sum_lanes([piece.D for piece in held])
        W = sum_lanes([piece.W for piece in held])
        stages.append(StageSeconds(F, D, W))
    return stages


def sum_lanes(ops: Sequence[OpLanes]) -> OpLanes:
    lanes = zip(*ops, strict=True)
    compute, comm = map(sum, lanes)
    return compute, comm


def measure_stages(cut: PipelineCut, pieces: Mapping[PieceKind, StageMemory]) -> list[StageMemory]:
    """Memory of the distinct stages. Backward frees the tensors of later pieces, except for those that wait for a
    weight gradient."""
    stages: list[StageMemory] = []
    for kinds in cut.stages:
        held = [pieces[kind] for kind in kinds]
        freed = 0.0
        workspace = 0.0
        for piece in reversed(held):
            needed = piece.workspace - freed
            workspace = max(workspace, needed)
            freed += piece.kept - piece.waiting
        columns = zip(*held, strict=True)
        sums = map(sum, columns)
        total = StageMemory(*sums)
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
        of_rank = least_update_seconds(s, cluster, times, held)
        update = max(update, of_rank)
    bound = PipelineBound(s, cluster, cut, seconds)
    return bound.seconds + update


class PipelineBound:
    """The least time of a pipeline: the largest of its ranks' bounds."""

    def __init__(self, s: RunSetting, cluster: Cluster, cut: PipelineCut, stages: StageTimes):
        pipeline = s.pipeline
        self.shape = pipeline_shape(s)
        self.pp = self.shape.pp
        self.vpp = self.shape.vpp
        self.pair = self.shape.pair
        self.microbatches = s.microbatches
        self.alike = pair_kind(pipeline) == "alike"
        is_bounded_schedule = pipeline.schedule in BOUNDED_SCHEDULES
        self.bounded = is_bounded_schedule and not pipeline.defer and not self.alike
        self.send = neighbour_send_seconds(s, cluster)
        self.by_rank: list[StageTimes] = []
        for numbers in cut.by_rank:
            of_rank = [stages[number] for number in numbers]
            self.by_rank.append(of_rank)
        self.pair_seconds: dict[StageNumbers, float] = {}

    @property
    def seconds(self) -> float:
        if not self.bounded:
            work = map(self.rank_work_seconds, range(self.pp))
            return max(work)
        # Seconds of earlier ranks' first stages, and of later ranks' last stages.
        first = [rank[0] for rank in self.by_rank]
        last = [rank[-1] for rank in self.by_rank]
        last.reverse()
        forwards = self.forwards_with_send(first)
        fill = running_sums(forwards)
        drain = running_sums(self.backwards_with_send(first))
        later = running_sums(self.backwards_with_send(last))
        all_forwards = -self.send
        for stages in self.by_rank:
            all_forwards += sum(self.forwards_with_send(stages))
        longest = 0.0
        for rank in range(self.pp):
            later_ranks = self.pp - 1 - rank
            first_backward = all_forwards + later[later_ranks]
            after = self.seconds_from_first_backward(rank, first_backward, fill[rank])
            end = after + drain[rank]
            longest = max(longest, end)
        return longest

    def forwards_with_send(self, stages: StageTimes) -> list[float]:
        return [stage.forward + self.send for stage in stages]

    def backwards_with_send(self, stages: StageTimes) -> list[float]:
        return [stage.backward + self.send for stage in stages]

    def seconds_from_first_backward(self, rank: int, first_backward: float, fill: float) -> float:
        """When the last slot of a rank ends, given the earliest start of its first backward and of its first
        forward."""
        shape = self.shape
        stages = self.by_rank[rank]
        slots = self.microbatches * self.vpp
        lone = min(slots, shape.lone_forwards(rank))
        pairs = slots - lone
        forward = 0.0
        backward = 0.0
        lone_forward = 0.0
        paired_backward = 0.0
        for place, stage in enumerate(stages):
            lone_here = shape.forwards_of_stage(lone, place)
            paired_here = shape.backwards_of_stage(pairs, place)
            forward += self.microbatches * stage.forward
            backward += self.microbatches * stage.backward
            lone_forward += lone_here * stage.forward
            paired_backward += paired_here * stage.backward
        forwards_end = fill + lone_forward
        start = max(first_backward, forwards_end)
        if not self.pair:
            return start + backward + forward - lone_forward
        lone_backward = backward - paired_backward
        return start + lone_backward + self.seconds_of_pairs(rank, pairs)

    def seconds_of_pairs(self, rank: int, pairs: int) -> float:
        """Seconds of a rank's paired slots, whose stages come in cycles."""
        cycle = self.pp * self.vpp
        cycles, rest = divmod(pairs, cycle)
        whole = self.seconds_of_first_pairs(rank, cycle) if cycles else 0.0
        begun = self.seconds_of_first_pairs(rank, rest)
        return cycles * whole + begun

    def seconds_of_first_pairs(self, rank: int, pairs: int) -> float:
        """Seconds of the first pairs of a cycle. Backwards visit the rank's stages in reverse order, p microbatches
        each, and forwards are ahead of them by the lone forwards."""
        stages = self.by_rank[rank]
        later_ranks = self.pp - rank - 1
        ahead = 2 * later_ranks + 1
        groups, late = divmod(ahead, self.pp)
        early = self.pp - late
        last = self.vpp - 1
        seconds = 0.0
        for turn in range(self.vpp):
            backward = stages[last - turn]
            place = (last + groups + turn) % self.vpp
            following = (place + 1) % self.vpp
            left = max(pairs - turn * self.pp, 0)
            pairs_here = min(left, self.pp)
            early_here = min(pairs_here, early)
            late_here = pairs_here - early_here
            seconds += early_here * self.seconds_of_pair(stages[place], backward)
            seconds += late_here * self.seconds_of_pair(stages[following], backward)
        return seconds

    def seconds_of_pair(self, forward: StageSeconds, backward: StageSeconds) -> float:
        key = id(forward), id(backward)
        known = self.pair_seconds.get(key)
        if known is None:
            ops = forward.F, backward.D, backward.W
            known = paired_duration(ops, OVERLAP_FRICTION)
            self.pair_seconds[key] = known
        return known

    def rank_work_seconds(self, rank: int) -> float:
        """Seconds of a rank's ops, with every pair that its program could have."""
        work = 0.0
        for stage in self.by_rank[rank]:
            if self.pair:
                work += self.seconds_of_pair(stage, stage)
            elif self.alike:
                work += seconds_in_step(stage)
            else:
                work += stage.forward + stage.backward
        return self.microbatches * work


def seconds_in_step(stage: StageSeconds) -> float:
    """Seconds of a microbatch that is in step with another: half of both forwards and of both backwards."""
    forwards = paired_duration([stage.F, stage.F], OVERLAP_FRICTION)
    backwards = paired_duration([stage.D, stage.D, stage.W, stage.W], OVERLAP_FRICTION)
    return (forwards + backwards) / 2


def running_sums(values: Sequence[float]) -> list[float]:
    """Sums of the values before each place, and of all."""
    return list(accumulate(values, initial=0.0))


def least_update_seconds(s: RunSetting, cluster: Cluster, times: StageTimes, stages: StageMemories) -> float:
    """Seconds of exposed gradient and weight exchange, and of the optimizer."""
    grids = GridParameters.of_stages(stages)
    exposed = exposed_exchange_seconds(s, cluster, times, grids)
    owned_dense = owned_state_share(s, "dense") * grids.dense
    owned_expert = owned_state_share(s, "expert") * grids.expert
    forward = sum(stage.forward_compute for stage in times)
    backward = sum(stage.backward_compute for stage in times)
    return exposed + update_seconds(s, cluster, owned_dense, owned_expert, PassTimes(forward, backward))


class GridParameters(NamedTuple):
    """Parameters of a rank: of the dense grid and of the expert grid."""

    dense: float
    expert: float

    @staticmethod
    def of_stages(stages: StageMemories) -> GridParameters:
        dense = sum(stage.dense for stage in stages)
        expert = sum(stage.expert for stage in stages)
        return GridParameters(dense, expert)


def exposed_exchange_seconds(s: RunSetting, cluster: Cluster, times: StageTimes, grids: GridParameters) -> float:
    """Gradients are scattered during backward, weights gathered during forward; FSDP does both with every microbatch.
    Sums over copies of shares come at the end of a step."""
    parameters: dict[ParameterClass, float] = {}
    parameters["dense", ()] = grids.dense
    parameters["expert", ()] = grids.expert
    trained = trained_part(s)  # frozen parameters are not exchanged
    gradient = trained * STATE_ELEMENT_BYTES[s.optim.gradient_reduce]
    weight = trained * s.recipe.wide
    copies = cluster.copies_seconds(parameters, s, trained * SUM_BYTES)
    if s.choices.sharding == "fsdp":
        return copies
    scatter = cluster.exchange_seconds(parameters, s, gradient)
    gather = cluster.exchange_seconds(parameters, s, weight)
    backward = sum(stage.backward_compute for stage in times)
    forward = sum(stage.forward_compute for stage in times)
    exposed_scatter = max(0.0, scatter - backward)
    exposed_gather = max(0.0, gather - forward)
    return copies + exposed_scatter + exposed_gather


def owned_state_share(s: RunSetting, grid: str) -> float:
    """Share of a parameter's optimizer state that one rank holds."""
    if s.choices.sharding == "none":
        return 1.0
    return 1 / s.shards_of(grid)


# Memory.


def least_rank_gib(s: RunSetting, cut: PipelineCut, stages: StageMemories) -> float:
    """GiB of the rank with the largest memory."""
    most = 0.0
    for rank in cut.distinct_ranks:
        numbers = cut.by_rank[rank]
        held = [stages[number] for number in numbers]
        state = least_rank_state(s, cut.ranks[rank], held)
        activations = least_activation_bytes(s, held, rank)
        most = max(most, least_rank_bytes(s, state, activations))
    needed = most + least_buffer_bytes(s) + s.outside
    return needed / GIB


def least_buffer_bytes(s: RunSetting) -> float:
    if s.parallel.pp == 1:
        return CUBLAS_WORKSPACE
    message = s.portion.tokens * s.model.hidden * s.recipe.wide
    return CUBLAS_WORKSPACE + PIPELINE_MESSAGES * message


def least_rank_bytes(s: RunSetting, state: LeastState, activations: float) -> float:
    resident = state.weights + state.optimizer
    if s.frees_gradients:
        return resident + activations
    if s.grows_gradients:  # they are allocated while activations are freed
        return resident + max(state.gradients, activations)
    return resident + state.gradients + activations


class LeastState(NamedTuple):
    """Bytes on the device of a rank's weights, gradients and optimizer state."""

    weights: float
    gradients: float
    optimizer: float


def least_rank_state(s: RunSetting, rank: RankStages, stages: StageMemories) -> LeastState:
    """Resident bytes of a rank. Frozen parameters have weights alone; where adapters are trained, nothing else is."""
    classes = rank_classes(s, rank)
    whole = sum_counts(classes.values())
    owned = sum_counts(owned_by_rank(s, classes))
    here = owned if s.choices.sharding == "fsdp" else whole
    wide = s.recipe.wide
    in_copies = sum(stage.copies for stage in stages)
    if s.keeps_only_quantised:
        in_copies -= wide * sum(stage.quantized for stage in stages)
    weights = here.held * wide + in_copies * here.held / whole.held
    weights -= host_weights(s, rank).saved
    gradients = here.trained * STATE_ELEMENT_BYTES[s.optim.gradients]
    if not s.config.lora.rank:
        optimizer = least_optimizer_bytes(s, owned, 1.0)
        return LeastState(weights, gradients, optimizer)
    adapters = adapter_count(s)
    trained = adapters / whole.held
    saved = saved_on_rank(s, rank)
    added = trained * here.held * wide
    with_adapters = weights - saved + added
    optimizer = least_optimizer_bytes(s, owned, trained)
    return LeastState(with_adapters, gradients * trained, optimizer)


def least_optimizer_bytes(s: RunSetting, owned: ClassCount, trained: float) -> float:
    """Bytes of main weights and moments on the device, of a share `trained` of what a rank owns; of those in host
    memory, the fewest slots that they pass through."""
    state_bytes = least_state_bytes(s, owned) * trained
    if not s.states_on_host:
        return state_bytes
    if s.choices.stack != "moefold" or s.choices.device != "cuda":
        return 0.0
    return visiting_bytes(owned.held * trained, state_bytes, window_gib=0.0)


def least_state_bytes(s: RunSetting, owned: ClassCount) -> float:
    """Bytes of main weights and moments. Without groups, Muon's plan does not tell norms apart."""
    first, second = moment_sizes(s.optim)
    has_second = s.optim.rule != "muon" or effective_groups(s)
    moments = owned.trained * first
    if has_second:
        moments += owned.second * second
    has_main = s.recipe.wide < 4
    main = MAIN_WEIGHT_BYTES[s.optim.main] if has_main else 0
    return owned.trained * main + moments


def least_activation_bytes(s: RunSetting, stages: StageMemories, rank: int) -> float:
    """Saved bytes of live microbatches, and the workspace of a backward, at the fullest of the moments after every p
    slots of a rank."""
    shape = pipeline_shape(s)
    slots = s.microbatches * shape.vpp
    enough = 2 * shape.pp * (shape.vpp + 1)  # later moments are the same
    kept = [stage.kept for stage in stages]
    most = 0.0
    for moment in live_moments(shape, rank, min(slots, enough)):
        saved = sum(map(mul, moment.live, kept))
        workspace = stages[moment.backward].workspace
        most = max(most, saved + workspace)
    return most


class BackwardMoment(NamedTuple):
    """The stage of a rank that runs backward, and live microbatches of each stage."""

    backward: int
    live: list[int]


@lru_cache(maxsize=65_536)
def live_moments(shape: PipelineShape, rank: int, slots: int) -> list[BackwardMoment]:
    """The moments of a rank after every p slots from its first backward on."""
    forwards = shape.lone_forwards(rank)
    if shape.pair:
        forwards += 1  # it shares the slot of the first backward
    backwards = 0
    moments: list[BackwardMoment] = []
    for stage in reversed(range(shape.vpp)):
        forwards_run = min(forwards, slots)
        live: list[int] = []
        for place in range(shape.vpp):
            begun = shape.forwards_of_stage(forwards_run, place)
            ended = shape.backwards_of_stage(backwards, place)
            live.append(begun - ended)
        moments.append(BackwardMoment(stage, live))
        forwards += shape.pp
        backwards += shape.pp
    return moments
