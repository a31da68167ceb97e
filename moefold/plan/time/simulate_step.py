"""Time of a training step by simulation: the costs of every stage go through the pipeline's own program.

The program is the one the executor would run and `schedule/simulate_program.py` clocks it, so that bubbles, uneven
stages and paired slots are included. Around the pipeline come the reduction of gradients, hidden behind the last
microbatch's backward as far as it goes, the optimizer, and the gather of weights, hidden behind the first forward.

A pipeline that is full repeats itself: beyond a few times pp microbatches, each further pp of them take as long as the
last pp did.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import mean

from moefold.anatomy.stage_contents import pipeline_program
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import STATE_ELEMENT_BYTES, RunSetting
from moefold.plan.memory.rank_stages import StagePieces, stages_by_rank
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES
from moefold.plan.time.step_times import OpSeconds, PassSeconds, StepClock, sum_pass_seconds
from moefold.schedule.program import OP_KINDS
from moefold.schedule.simulate_program import Timeline, simulate_program
from moefold.schedule.stage_costs import StageCosts

OVERLAP_FRICTION = 0.45  # of hidden travel: its kernels take a part of the device, and slots do not fit perfectly


@dataclass(frozen=True)
class StepTime:
    """One step. `walls` add up to `seconds`, on an average rank."""

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
    send = 0.0
    if s.parallel.pp > 1:
        row = s.recipe.wide * s.model.hidden
        message = row * s.portion.tokens
        send = clock.cluster.neighbour_seconds(message, s.world)
    return StageCosts(compute, travel, send, zeros, zeros, OVERLAP_FRICTION)


def simulated_microbatches(microbatches: int, pp: int) -> int:
    """How many microbatches show the whole pattern; the remainder over groups of pp stays the same."""
    few = 4 * pp
    if microbatches <= few + pp:
        return microbatches
    return few + microbatches % pp


@dataclass(frozen=True)
class PipelineTime:
    """The pipeline of a step: its seconds, those of travel that no compute hid on an average rank, and the timeline of
    `shown_microbatches`."""

    seconds: float
    exposed: float
    timeline: Timeline
    shown_microbatches: int


def time_pipeline(setting: RunSetting, costs: StageCosts) -> PipelineTime:
    pp = setting.parallel.pp
    shown = simulated_microbatches(setting.microbatches, pp)
    program = pipeline_program(setting.config, shown)
    timeline = simulate_program(program, costs)
    seconds = timeline.makespan
    exposed = mean(timeline.exposed)
    if shown < setting.microbatches:
        # Extrapolate by what the last pp of the simulated microbatches took.
        shorter_program = pipeline_program(setting.config, shown - pp)
        shorter = simulate_program(shorter_program, costs)
        groups = (setting.microbatches - shown) / pp
        seconds += groups * (seconds - shorter.makespan)
        exposed += groups * (exposed - mean(shorter.exposed))
    return PipelineTime(seconds, exposed, timeline, shown)


def time_training_step(setting: RunSetting, gpu: Gpu) -> StepTime:
    clock = StepClock(setting, gpu)
    by_stage: dict[int, PassSeconds] = {}
    by_rank: list[PassSeconds] = []
    updates: list[tuple[float, float]] = []
    for rank in stages_by_rank(setting.config):
        seconds = [clock.time_stage(pieces) for pieces in rank.pieces]
        by_stage.update(zip(rank.numbers, seconds, strict=True))
        of_rank = sum_pass_seconds(seconds)
        by_rank.append(of_rank)
        updates.append(exposed_update_seconds(clock, rank.pieces, of_rank))

    in_order = [by_stage[number] for number in sorted(by_stage)]
    # The pipeline in order of its stages, then what its last backward and first forward do not hide.
    costs = pipeline_costs(clock, in_order)
    pipeline_time = time_pipeline(setting, costs)
    exchange = max(exchange for exchange, _ in updates)
    optimizer = max(optimizer for _, optimizer in updates)
    walls = mean_time_walls(setting, by_rank, pipeline_time)
    walls["communication"] += exchange
    walls["memory"] += optimizer
    seconds = pipeline_time.seconds + exchange + optimizer
    return StepTime(seconds, pipeline_time, exchange, optimizer, walls, costs)


def exposed_update_seconds(
    clock: StepClock, stages: tuple[StagePieces, ...], passes: PassSeconds
) -> tuple[float, float]:
    """On one rank: seconds of exchange that no compute hides, and of the optimizer."""
    s = clock.setting
    parameters: Counter[ParameterClass] = Counter()
    for pieces in stages:
        stage = s.count_stage(pieces)
        parameters.update(dict(stage.parameters))
    exposed = 0.0
    if s.choices.sharding != "fsdp":  # FSDP exchanges weights and gradients with every microbatch
        gradient = STATE_ELEMENT_BYTES[s.optim.gradient_reduce]
        scatter = clock.cluster.exchange_seconds(parameters, s, gradient)
        gather = clock.cluster.exchange_seconds(parameters, s, s.recipe.wide)
        F, D, W = passes
        exposed_scatter = max(0.0, scatter - D.compute - W.compute)
        exposed_gather = max(0.0, gather - F.compute)
        exposed = exposed_scatter + exposed_gather
    return exposed, optimizer_seconds(clock, parameters)


def optimizer_seconds(clock: StepClock, parameters: Counter[ParameterClass]) -> float:
    """Of the parameters whose state this rank owns."""
    s = clock.setting
    shards = {"dense": 1, "expert": 1}
    if s.choices.sharding != "none":
        shards["dense"] = s.degrees["dp"] * s.parallel.cp
        shards["expert"] = s.degrees["edp"]
    owned = 0.0
    for (grid, _), count in parameters.items():
        owned += count / shards[grid]
    moved = owned * optimizer_bytes(s)
    seconds = moved / clock.pointwise_bandwidth
    if not s.choices.states_on_host:
        return seconds
    copied = owned * (optimizer_bytes(s) - s.recipe.wide)
    return max(seconds, copied / clock.gpu.host_link)


def optimizer_bytes(s: RunSetting) -> float:
    """Of a parameter: its gradient is read, main weight and moments are read and written, the weight is written."""
    optim = s.optim
    gradient = STATE_ELEMENT_BYTES[optim.gradients]
    moments = 2 * STATE_ELEMENT_BYTES[optim.moments]
    state = 2 * MAIN_WEIGHT_BYTES[optim.main] + 2 * moments
    return gradient + state + s.recipe.wide


def mean_time_walls(s: RunSetting, ranks: list[PassSeconds], pipeline_time: PipelineTime) -> dict[str, float]:
    """Where the pipeline's time goes, on the average over ranks: arithmetic at the peak, what the three walls cost
    (memory, communication, compute efficiency with the host's share of it apart), and waiting for other ranks."""

    def mean_seconds(field: str) -> float:
        by_rank: list[float] = []
        for passes in ranks:
            parts = [getattr(op, field) for op in passes]
            by_rank.append(sum(parts))
        return s.microbatches * mean(by_rank)

    ideal = mean_seconds("ideal")
    kernels = mean_seconds("products") + mean_seconds("attention") + mean_seconds("passes")
    walls = {
        "arithmetic": ideal,
        "compute": kernels - ideal,
        "host": mean_seconds("host"),
        "memory": mean_seconds("memory"),
        "communication": mean_seconds("joined") + pipeline_time.exposed,
    }
    walls["bubble"] = pipeline_time.seconds - sum(walls.values())
    return walls
