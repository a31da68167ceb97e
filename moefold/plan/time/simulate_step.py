"""A training step on the clock: the costs of every stage go through the pipeline's own program.

The program is the one the executor would run and `schedule.simulate` clocks it, so that bubbles, uneven stages and
paired slots come out as they would. Around the pipeline stand the exchange of gradients, hidden behind the last
microbatch's backward as far as it goes, the optimizer, and the return of weights, hidden behind the first forward.

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
from moefold.plan.memory.rank_stages import StagePieces, count_stage, stages_by_rank
from moefold.plan.memory.resident import MAIN_WEIGHT_BYTES
from moefold.plan.time.step_times import PassSeconds, StepClock, sum_pass_seconds
from moefold.schedule.simulate_program import Timeline, simulate_program
from moefold.schedule.stage_costs import StageCosts

OVERLAP_FRICTION = 0.45  # of hidden travel: its kernels take a part of the device, and slots do not fit perfectly
OP_KINDS = ("F", "D", "W")


@dataclass(frozen=True)
class StepTime:
    """One step. `walls` add up to `seconds`, on an average rank."""

    seconds: float
    pipeline_time: PipelineTime
    exchange: float
    optimizer: float
    walls: dict[str, float]
    costs: StageCosts


def pipeline_costs(pace: StepClock, passes: list[PassSeconds]) -> StageCosts:
    s = pace.setting
    cargo = s.choices.recipe.wide * s.config.model.hidden * s.portion.tokens
    nothing = [0.0] * len(passes)
    return StageCosts(
        {kind: [getattr(each, kind).compute for each in passes] for kind in OP_KINDS},
        {kind: [getattr(each, kind).travel for each in passes] for kind in OP_KINDS},
        pace.cluster.neighbour_seconds(cargo, s.world) if s.config.parallel.pp > 1 else 0.0,
        nothing,
        nothing,
        OVERLAP_FRICTION,
    )


def simulated_microbatches(microbatches: int, pp: int) -> int:
    """How many microbatches show all that happens; what is left over by groups of pp stays the same."""
    few = 4 * pp
    return microbatches if microbatches <= few + pp else few + microbatches % pp


@dataclass(frozen=True)
class PipelineTime:
    """The pipeline of a step: its seconds, those of travel that no compute hid on an average rank, and the timeline of
    `shown` microbatches."""

    seconds: float
    exposed: float
    timeline: Timeline
    shown_microbatches: int


def time_pipeline(setting: RunSetting, costs: StageCosts) -> PipelineTime:
    pp, every = setting.config.parallel.pp, setting.microbatches
    shown = simulated_microbatches(every, pp)
    timeline = simulate_program(pipeline_program(setting.config, shown), costs)
    found = PipelineTime(timeline.makespan, mean(timeline.exposed), timeline, shown)
    if shown == every:
        return found
    before = simulate_program(pipeline_program(setting.config, shown - pp), costs)
    more = (every - shown) / pp
    return PipelineTime(
        found.seconds + more * (found.seconds - before.makespan),
        found.exposed + more * (found.exposed - mean(before.exposed)),
        timeline,
        shown,
    )


def time_training_step(setting: RunSetting, gpu: Gpu) -> StepTime:
    pace, config = StepClock(setting, gpu), setting.config
    ranks = stages_by_rank(config)
    by_rank = [[pace.stage(pieces) for pieces in rank.pieces] for rank in ranks]
    by_stage = {
        n: each for rank, mine in zip(ranks, by_rank, strict=True) for n, each in zip(rank.numbers, mine, strict=True)
    }
    costs = pipeline_costs(pace, [by_stage[number] for number in range(len(by_stage))])
    clocked = time_pipeline(setting, costs)
    around = [
        exposed_update_seconds(pace, rank.pieces, sum_pass_seconds(mine))
        for rank, mine in zip(ranks, by_rank, strict=True)
    ]
    exchange, optimizer = (max(each) for each in zip(*around, strict=True))
    walls = mean_time_walls(setting, [sum_pass_seconds(mine) for mine in by_rank], clocked)
    walls["communication"] += exchange
    walls["memory"] += optimizer
    return StepTime(clocked.seconds + exchange + optimizer, clocked, exchange, optimizer, walls, costs)


def exposed_update_seconds(pace: StepClock, pieces: tuple[StagePieces, ...], mine: PassSeconds) -> tuple[float, float]:
    """On one rank: seconds of exchange that no compute hides, and of the optimizer."""
    s = pace.setting
    parameters: Counter[ParameterClass] = Counter()
    for each in pieces:
        parameters.update(dict(count_stage(s.config.model, each, s.portion, s.choices).parameters))
    shown = 0.0
    if s.choices.sharding != "fsdp":  # whose weights and gradients travel with every microbatch
        scatter = pace.cluster.exchange(parameters, s, STATE_ELEMENT_BYTES[s.config.optim.gradient_reduce])
        gather = pace.cluster.exchange(parameters, s, s.choices.recipe.wide)
        shown = max(0.0, scatter - mine.D.compute - mine.W.compute) + max(0.0, gather - mine.F.compute)
    return shown, optimizer_seconds(pace, parameters)


def optimizer_seconds(pace: StepClock, parameters: Counter[ParameterClass]) -> float:
    """Of the parameters whose state this rank owns."""
    s = pace.setting
    cut = {"dense": s.degrees["dp"] * s.config.parallel.cp, "expert": s.degrees["edp"]}
    owned = sum(n / (cut[grid] if s.choices.sharding != "none" else 1) for (grid, _), n in parameters.items())
    seconds = owned * optimizer_bytes(s) / pace.stream
    on_host = owned * (optimizer_bytes(s) - s.choices.recipe.wide) / pace.gpu.host_link
    return max(seconds, on_host) if s.choices.states_on_host else seconds


def optimizer_bytes(s: RunSetting) -> float:
    """Of a parameter: its gradient is read, main weight and moments are read and written, the weight is written."""
    optim = s.config.optim
    state = 2 * MAIN_WEIGHT_BYTES[optim.main] + 2 * 2 * STATE_ELEMENT_BYTES[optim.moments]
    return STATE_ELEMENT_BYTES[optim.gradients] + state + s.choices.recipe.wide


def mean_time_walls(s: RunSetting, ranks: list[PassSeconds], clocked: PipelineTime) -> dict[str, float]:
    """Where the pipeline's time goes, on the average over ranks: arithmetic at the peak, what the three walls cost
    (memory, communication, compute efficiency with the host's share of it apart), and waiting for other ranks."""

    def mean_seconds(field: str) -> float:
        return s.microbatches * mean(sum(getattr(getattr(rank, kind), field) for kind in OP_KINDS) for rank in ranks)

    ideal = mean_seconds("ideal")
    walls = {
        "arithmetic": ideal,
        "compute": mean_seconds("products") + mean_seconds("attention") + mean_seconds("passes") - ideal,
        "host": mean_seconds("host"),
        "memory": mean_seconds("memory"),
        "communication": mean_seconds("joined") + clocked.exposed,
    }
    return {**walls, "bubble": clocked.seconds - sum(walls.values())}
