"""A training step on the clock: the costs of every stage go through the pipeline's own program.

The program is the one the executor would run and `schedule.simulate` clocks it, so that bubbles, uneven stages and
paired slots come out as they would. Around the pipeline stand the exchange of gradients, hidden behind the last
microbatch's backward as far as it goes, the optimizer, and the return of weights, hidden behind the first forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from moefold.anatomy.counts import train_flops_per_token
from moefold.anatomy.stages import Stage, program_for, rank_of_stage, stages_of
from moefold.anatomy.steps import block_steps, embed, predict
from moefold.plan.timing import Pace, Passes, Seconds, layer_passes, pass_step, total
from moefold.schedule.costs import Costs
from moefold.schedule.simulate import Timeline, simulate

FRICTION = 0.45


def stage_passes(pace: Pace, stage: Stage) -> Passes:
    """One microbatch through one stage."""
    model = pace.config.model
    parts = [layer_passes(pace, layer) for layer in stage.layers]
    parts += [layer_passes(pace, model.layers + depth - 1) for depth in stage.ahead]
    parts += [pass_step(pace, embed(model))] if stage.embeds else []
    parts += [pass_step(pace, predict(model))] if stage.predicts else []
    return total(parts)


def costs_of(pace: Pace, passes: list[Passes]) -> Costs:
    kinds = ("F", "D", "W")
    p = pace.config.parallel
    size = 2.0 * pace.config.model.hidden * pace.share.tokens
    send = pace.cluster.pass_on(size, pace.world if p.pp > 1 else 1)
    nothing = [0.0] * len(passes)
    return Costs(
        {kind: [getattr(each, kind).compute for each in passes] for kind in kinds},
        {kind: [getattr(each, kind).travel for each in passes] for kind in kinds},
        send,
        nothing,
        nothing,
        friction=FRICTION,
    )


def owned(pace: Pace, stages: list[Stage]) -> tuple[float, float]:
    """Parameters of one rank in these stages: dense (cut over tp) and routed experts' (cut over ep and etp)."""
    model, p = pace.config.model, pace.config.parallel
    dense = expert = 0.0
    for stage in stages:
        for layer in stage.layers:
            for step in block_steps(model, layer):
                for w in step.weights:
                    if w.active != 1.0:
                        expert += w.size / (p.ep * p.etp)
                    else:
                        dense += w.size / p.tp
        dense += model.vocab * model.hidden / p.tp * (stage.embeds + stage.predicts)
    return dense, expert


def around(pace: Pace, stages: list[Stage], window: float) -> tuple[float, float]:
    """Seconds of exchange that show, and of the optimizer, on a rank with these stages."""
    p, world = pace.config.parallel, pace.world
    dense, expert = owned(pace, stages)
    dp, edp = world // (p.tp * p.pp), world // (p.ep * p.etp * p.pp)
    grads = 4.0 
    def ex(b):
        return pace.cluster.reduce(b*dense, p.tp, dp) + pace.cluster.reduce(b*expert, p.ep*p.etp, edp)
    shown = max(0.0, ex(grads) - window*2/3) + max(0.0, ex(2.0) - window/3)
    opt = 30.0*(dense/dp + expert/edp)/pace.stream
    return shown, opt
