"""Time of a training step by simulation of the pipeline program with the costs of every stage.

The program is the one that the executor would run; `schedule/simulate_program.py` simulates it, so that bubbles, uneven
stages and paired slots are included. Three times are added: the reduce-scatter of gradients, overlapped with the last
microbatch's backward, the optimizer, and the all-gather of weights, overlapped with the first forward.

The steady state of a pipeline is periodic: beyond a few times pp microbatches, every further pp microbatches take the
same time (2 pp where two are in step). Where stages are uneven, the busiest rank takes longest for them, but it has
waited for less busy ranks at first: it determines the time only after so many microbatches that its slack is used up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean
from typing import NamedTuple

from moefold.anatomy.stage_contents import pair_kind, pipeline_program
from moefold.config.run import Config, ParallelConfig, PipelineConfig
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import STATE_ELEMENT_BYTES, RunSetting
from moefold.plan.memory.rank_stages import StagePieces, stages_by_rank
from moefold.plan.memory.resident import SUM_BYTES
from moefold.plan.time.chunk_overlap import OVERLAP_FRICTION
from moefold.plan.time.step_times import OpSeconds, PassSeconds, StepClock, sum_pass_seconds
from moefold.plan.time.update_seconds import PassTimes, trained_part, update_seconds
from moefold.schedule.program import OP_KINDS
from moefold.schedule.simulate_program import OrderedProgram, SlotTimes, slot_slack, time_slots
from moefold.schedule.stage_costs import StageCosts


class UpdateSeconds(NamedTuple):
    """Exposed exchange of gradients and weights, and the optimizer with new FP8 copies."""

    exchange: float
    optimizer: float


@dataclass(frozen=True)
class StepTime:
    """Time of one step. `walls` are means over ranks and add up to `seconds`."""

    seconds: float
    pipeline_time: PipelineTime
    exchange: float
    optimizer: float
    walls: dict[str, float]
    costs: StageCosts


def pipeline_costs(clock: StepClock, passes: list[PassSeconds]) -> StageCosts:
    """Costs of each stage, in the order of the stages."""
    s = clock.setting
    zeros = [0.0] * len(passes)
    compute: dict[str, list[float]] = {}
    travel: dict[str, list[float]] = {}
    for kind in OP_KINDS:
        compute[kind] = []
        travel[kind] = []
        for seconds in passes:
            op: OpSeconds = getattr(seconds, kind)
            compute[kind].append(op.compute)
            travel[kind].append(op.travel)
    send = neighbour_send_seconds(s, clock.cluster)
    return StageCosts(compute, travel, send, zeros, zeros, OVERLAP_FRICTION)


def neighbour_send_seconds(s: RunSetting, cluster: Cluster) -> float:
    """Seconds of a message between pipeline stages."""
    if s.parallel.pp == 1:
        return 0.0
    row = s.recipe.wide * s.model.hidden
    message = row * s.portion.tokens
    return cluster.neighbour_seconds(message, s.world)


def simulated_microbatches(microbatches: int, period: int) -> int:
    """Number of microbatches to simulate: a few periods, with the same remainder over periods."""
    few = 4 * period
    if microbatches <= few + period:
        return microbatches
    return few + microbatches % period


@dataclass(frozen=True)
class PipelineTime:
    """Time of a step's pipeline: its seconds, exposed communication as the mean over ranks, and the simulated slots of
    `shown_microbatches`."""

    seconds: float
    exposed: float
    program: OrderedProgram
    slots: SlotTimes
    shown_microbatches: int


def time_pipeline(setting: RunSetting, costs: StageCosts) -> PipelineTime:
    pp = setting.parallel.pp
    period = 2 * pp if pair_kind(setting.pipeline) == "alike" else pp
    shown = simulated_microbatches(setting.microbatches, period)
    program = ordered_program(setting.pipeline, pp, shown)
    slots = time_slots(program, costs)
    seconds = slots.makespan
    exposed = mean(slots.exposed)
    if shown < setting.microbatches:
        # Extrapolate with the time of the last simulated period.
        fewer = shown - period
        shorter_program = ordered_program(setting.pipeline, pp, fewer)
        shorter = time_slots(shorter_program, costs)
        groups = (setting.microbatches - shown) / period
        of_group = seconds - shorter.makespan
        exposed_of_group = exposed - mean(shorter.exposed)
        seconds += groups * of_group
        exposed += groups * exposed_of_group
        slack = steady_slack(program, slots, costs.send)
        for rank, late in enumerate(slack):
            work = slots.busy[rank] - shorter.busy[rank]
            through_rank = slots.makespan - late + groups * work
            seconds = max(seconds, through_rank)
    return PipelineTime(seconds, exposed, program, slots, shown)


def steady_slack(program: OrderedProgram, times: SlotTimes, send: float) -> list[float]:
    """By rank: the least slack of a slot in the middle half of the rank's slots, where the pipeline is full."""
    by_rank = defaultdict[int, list[float]](list)
    slack_of_slots = slot_slack(program, times, send)
    for slot, slack in zip(program.slots, slack_of_slots, strict=True):
        by_rank[slot.rank].append(slack)
    least: list[float] = []
    for rank in range(program.ranks):
        slacks = by_rank[rank]
        quarter = len(slacks) // 4
        middle = slacks[quarter:-quarter]
        least.append(min(middle))
    return least


@lru_cache(maxsize=128)
def ordered_program(pipeline: PipelineConfig, pp: int, microbatches: int) -> OrderedProgram:
    """Cached: a search times the same program with the costs of many layouts."""
    parallel = ParallelConfig(pp=pp)
    config = Config(pipeline=pipeline, parallel=parallel)
    program = pipeline_program(config, microbatches)
    return OrderedProgram(program)


def time_training_step(setting: RunSetting, gpu: Gpu) -> StepTime:
    clock = StepClock(setting, gpu)
    by_stage: dict[int, PassSeconds] = {}
    by_rank: list[PassSeconds] = []
    updates: list[UpdateSeconds] = []
    for rank in stages_by_rank(setting.config):
        seconds = [clock.time_stage(pieces) for pieces in rank.pieces]
        numbered = zip(rank.numbers, seconds, strict=True)
        by_stage.update(numbered)
        of_rank = sum_pass_seconds(seconds)
        by_rank.append(of_rank)
        update = exposed_update_seconds(clock, rank.pieces, of_rank)
        updates.append(update)

    numbers = sorted(by_stage)
    in_order = [by_stage[number] for number in numbers]
    # The pipeline in order of its stages, then the exposed exchange and the optimizer.
    costs = pipeline_costs(clock, in_order)
    pipeline_time = time_pipeline(setting, costs)
    exchange = max(update.exchange for update in updates)
    optimizer = max(update.optimizer for update in updates)
    walls = mean_time_walls(setting, by_rank, pipeline_time)
    walls["communication"] += exchange
    walls["memory"] += optimizer
    seconds = pipeline_time.seconds + exchange + optimizer
    return StepTime(seconds, pipeline_time, exchange, optimizer, walls, costs)


def exposed_update_seconds(clock: StepClock, stages: Sequence[StagePieces], passes: PassSeconds) -> UpdateSeconds:
    """Seconds of one rank."""
    s = clock.setting
    parameters: Counter[ParameterClass] = Counter()
    copied = 0.0
    for pieces in stages:
        stage = s.count_stage(pieces)
        parameters.update(dict(stage.parameters))
        copied += stage.requantised
    trained = trained_part(s)  # frozen parameters are not exchanged
    gradient = trained * STATE_ELEMENT_BYTES[s.optim.gradient_reduce]
    weight = trained * s.recipe.wide
    cluster = clock.cluster
    exposed = cluster.copies_seconds(parameters, s, trained * SUM_BYTES)
    if s.choices.sharding != "fsdp":  # FSDP exchanges weights and gradients with every microbatch
        scatter = cluster.exchange_seconds(parameters, s, gradient)
        gather = cluster.exchange_seconds(parameters, s, weight)
        F, D, W = passes
        exposed_scatter = max(0.0, scatter - D.compute - W.compute)
        exposed_gather = max(0.0, gather - F.compute)
        exposed += exposed_scatter + exposed_gather
    copying = copied / clock.quantise_bandwidth
    optimizer = optimizer_seconds(clock, parameters, passes) + copying
    return UpdateSeconds(exposed, optimizer)


def optimizer_seconds(clock: StepClock, parameters: Counter[ParameterClass], passes: PassSeconds) -> float:
    """Seconds of the optimizer on the parameters whose state this rank holds."""
    s = clock.setting
    is_sharded = s.choices.sharding != "none"
    owned = {"dense": 0.0, "expert": 0.0}
    for (grid, _), count in parameters.items():
        shards = s.shards_of(grid) if is_sharded else 1
        owned[grid] += count / shards
    F, D, W = passes
    beside = PassTimes(F.compute, D.compute + W.compute)
    return update_seconds(s, clock.cluster, owned["dense"], owned["expert"], beside)


def mean_time_walls(s: RunSetting, ranks: list[PassSeconds], pipeline_time: PipelineTime) -> dict[str, float]:
    """Time of the pipeline by cause, as means over ranks: arithmetic at the peak, the three walls (memory,
    communication, compute efficiency with host latency apart), and the bubble."""

    def mean_seconds(field: str) -> float:
        by_rank: list[float] = []
        for passes in ranks:
            parts = [getattr(op, field) for op in passes]
            by_rank.append(sum(parts))
        return s.microbatches * mean(by_rank)

    ideal = mean_seconds("ideal")
    products = mean_seconds("products")
    attention = mean_seconds("attention")
    kernels = products + attention + mean_seconds("passes")
    walls = {
        "arithmetic": ideal,
        "compute": kernels - ideal,
        "host": mean_seconds("host"),
        "memory": mean_seconds("memory"),
        "communication": mean_seconds("joined") + pipeline_time.exposed,
    }
    known = sum(walls.values())
    bubble = pipeline_time.seconds - known
    is_rounding = abs(bubble) < 1e-9 * known  # without a pipeline there is none
    walls["bubble"] = 0.0 if is_rounding else bubble
    return walls
