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

from moefold.anatomy.stages import program_for
from moefold.plan.counts import Class
from moefold.plan.hardware import Gpu
from moefold.plan.memory import BYTES, Setting
from moefold.plan.stage import Pieces, stage_count, stages_by_rank
from moefold.plan.state import MAIN
from moefold.plan.timing import Pace, Passes, total
from moefold.schedule.costs import Costs
from moefold.schedule.simulate import Timeline, simulate

FRICTION = 0.45  # of hidden travel: its kernels take a part of the device, and slots do not fit perfectly
KINDS = ("F", "D", "W")


@dataclass(frozen=True)
class StepTime:
    """One step. `walls` add up to `seconds`, on an average rank."""

    seconds: float
    clocked: Clocked
    exchange: float
    optimizer: float
    walls: dict[str, float]
    costs: Costs


def costs_of(pace: Pace, passes: list[Passes]) -> Costs:
    s = pace.setting
    cargo = s.choices.recipe.wide * s.config.model.hidden * s.portion.tokens
    nothing = [0.0] * len(passes)
    return Costs(
        {kind: [getattr(each, kind).compute for each in passes] for kind in KINDS},
        {kind: [getattr(each, kind).travel for each in passes] for kind in KINDS},
        pace.cluster.pass_on(cargo, s.world) if s.config.parallel.pp > 1 else 0.0,
        nothing,
        nothing,
        FRICTION,
    )


def enough(microbatches: int, pp: int) -> int:
    """How many microbatches show all that happens; what is left over by groups of pp stays the same."""
    few = 4 * pp
    return microbatches if microbatches <= few + pp else few + microbatches % pp


@dataclass(frozen=True)
class Clocked:
    """The pipeline of a step: its seconds, those of travel that no compute hid on an average rank, and the timeline of
    `shown` microbatches."""

    seconds: float
    exposed: float
    timeline: Timeline
    shown: int


def clock(setting: Setting, costs: Costs) -> Clocked:
    pp, every = setting.config.parallel.pp, setting.microbatches
    shown = enough(every, pp)
    timeline = simulate(program_for(setting.config, shown), costs)
    found = Clocked(timeline.makespan, mean(timeline.exposed), timeline, shown)
    if shown == every:
        return found
    before = simulate(program_for(setting.config, shown - pp), costs)
    more = (every - shown) / pp
    return Clocked(
        found.seconds + more * (found.seconds - before.makespan),
        found.exposed + more * (found.exposed - mean(before.exposed)),
        timeline,
        shown,
    )


def time_step(setting: Setting, gpu: Gpu) -> StepTime:
    pace, config = Pace(setting, gpu), setting.config
    ranks = stages_by_rank(config)
    by_rank = [[pace.stage(pieces) for pieces in rank.pieces] for rank in ranks]
    by_stage = {
        n: each for rank, mine in zip(ranks, by_rank, strict=True) for n, each in zip(rank.numbers, mine, strict=True)
    }
    costs = costs_of(pace, [by_stage[number] for number in range(len(by_stage))])
    clocked = clock(setting, costs)
    around = [outside(pace, rank.pieces, total(mine)) for rank, mine in zip(ranks, by_rank, strict=True)]
    exchange, optimizer = (max(each) for each in zip(*around, strict=True))
    walls = mean_walls(setting, [total(mine) for mine in by_rank], clocked)
    walls["communication"] += exchange
    walls["memory"] += optimizer
    return StepTime(clocked.seconds + exchange + optimizer, clocked, exchange, optimizer, walls, costs)


def outside(pace: Pace, pieces: tuple[Pieces, ...], mine: Passes) -> tuple[float, float]:
    """On one rank: seconds of exchange that no compute hides, and of the optimizer."""
    s = pace.setting
    parameters: Counter[Class] = Counter()
    for each in pieces:
        parameters.update(dict(stage_count(s.config.model, each, s.portion, s.choices).parameters))
    shown = 0.0
    if s.choices.sharding != "fsdp":  # whose weights and gradients travel with every microbatch
        scatter = pace.cluster.exchange(parameters, s, BYTES[s.config.optim.gradient_travel])
        gather = pace.cluster.exchange(parameters, s, s.choices.recipe.wide)
        shown = max(0.0, scatter - mine.D.compute - mine.W.compute) + max(0.0, gather - mine.F.compute)
    return shown, optimizer_seconds(pace, parameters)


def optimizer_seconds(pace: Pace, parameters: Counter[Class]) -> float:
    """Of the parameters whose state this rank owns."""
    s = pace.setting
    cut = {"dense": s.degrees["dp"] * s.config.parallel.cp, "expert": s.degrees["edp"]}
    owned = sum(n / (cut[grid] if s.choices.sharding != "none" else 1) for (grid, _), n in parameters.items())
    seconds = owned * optimizer_bytes(s) / pace.stream
    on_host = owned * (optimizer_bytes(s) - s.choices.recipe.wide) / pace.gpu.host_link
    return max(seconds, on_host) if s.choices.states_on_host else seconds


def optimizer_bytes(s: Setting) -> float:
    """Of a parameter: its gradient is read, main weight and moments are read and written, the weight is written."""
    optim = s.config.optim
    state = 2 * MAIN[optim.main] + 2 * 2 * BYTES[optim.moments]
    return BYTES[optim.gradients] + state + s.choices.recipe.wide


def mean_walls(s: Setting, ranks: list[Passes], clocked: Clocked) -> dict[str, float]:
    """Where the pipeline's time goes, on the average over ranks: arithmetic at the peak, what the three walls cost
    (memory, communication, compute efficiency with the host's share of it apart), and waiting for other ranks."""

    def of(field: str) -> float:
        return s.microbatches * mean(sum(getattr(getattr(rank, kind), field) for kind in KINDS) for rank in ranks)

    ideal = of("ideal")
    walls = {
        "arithmetic": ideal,
        "compute": of("products") + of("attention") + of("passes") - ideal,
        "host": of("host"),
        "memory": of("memory"),
        "communication": of("joined") + clocked.exposed,
    }
    return {**walls, "bubble": clocked.seconds - sum(walls.values())}
