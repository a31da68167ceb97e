"""The arithmetic behind a step's time, line by line, as a person would do it."""

from __future__ import annotations

from collections.abc import Iterator

from moefold.anatomy.steps import window_of
from moefold.plan import traffic
from moefold.plan.counts import StepCount, piece_count
from moefold.plan.explain import named
from moefold.plan.hardware import Gpu
from moefold.plan.memory import Setting
from moefold.plan.simulate import FRICTION, StepTime, time_step
from moefold.plan.sizes import Sizes
from moefold.plan.stage import stages_by_rank
from moefold.plan.timing import Pace, Passes, Seconds

PARTS = ("products", "attention", "passes", "host", "joined", "memory", "travel")


def explain_time(setting: Setting, gpu: Gpu) -> list[str]:
    """How the seconds of a step come about: each kind of piece once, then the pipeline and what stands around it."""
    pace, step = Pace(setting, gpu), time_step(setting, gpu)
    kinds = dict.fromkeys(kind for rank in stages_by_rank(setting.config) for stage in rank.pieces for kind in stage)
    lines = [rates(gpu, setting)]
    for kind in kinds:
        lines += [f"{named(*kind)}: milliseconds of one microbatch on one rank, by step and pass"]
        lines += piece_lines(pace, kind)
    return [*lines, *around_lines(setting, step)]


def rates(gpu: Gpu, s: Setting) -> str:
    k, precision = gpu.kernels, s.choices.precision
    return (
        f"{gpu.name} ({gpu.origin}): products in {precision} tend to {gpu.rate(precision) / 1e12:,.0f} of "
        f"{gpu.peak_of(precision) / 1e12:,.0f} TFLOP/s, grouped ones to {k.grouped:.0%} of that, and blend with "
        f"{gpu.hbm / 1e12:.2f} TB/s by power {k.blend:g}; passes reach {k.stream:.0%} of it; "
        f"a launch takes {gpu.host.launch * 1e6:.1f} us"
    )


def piece_lines(pace: Pace, kind: tuple[str, int]) -> Iterator[str]:
    s = pace.setting
    model = s.config.model
    sizes = Sizes(model, s.portion, s.choices, window_of(model, kind[1]))
    counts = {step.name: step for step in piece_count(model, *kind, s.portion, s.choices).steps}
    for name, passes in pace.steps(*kind).items():
        yield from step_lines(counts[name], sizes, passes)


def step_lines(step: StepCount, s: Sizes, passes: Passes) -> Iterator[str]:
    for kind, seconds in zip("FDW", passes, strict=True):
        if seconds.all:
            yield f"  {step.name:<10} {kind} {seconds.all * 1e3:9.3f}   {spoken(seconds)}"
    for g in step.gemms:
        many = f"{g.groups:g} x " if g.groups > 1 else ""
        shape = f"{many}({g.rows:,.0f} x {g.k:,.0f} by {g.n:,.0f})" + (f" x {g.times}" if g.times > 1 else "")
        yield f"    {g.name}: {shape} = {g.flops / 1e12:.3f} TFLOP forward"
    launched, looped = traffic.launched(step.name, step.gemms, s)
    moved = traffic.moved(step.name, s) + traffic.quantised(step.gemms, s)
    yield f"    {moved / 1e9:.3f} GB of pointwise passes, {launched + looped:g} launches forward"


def spoken(seconds: Seconds) -> str:
    parts = {name: getattr(seconds, name) for name in PARTS}
    return " + ".join(f"{name} {value * 1e3:.3f}" for name, value in parts.items() if value > 0)


def around_lines(s: Setting, step: StepTime) -> Iterator[str]:
    p, c, batch = s.config.parallel, s.config.pipeline, s.config.train.global_batch * s.config.data.seq_len
    hides = f"; of travel that a paired slot hides, {FRICTION:.0%} still slows it" if c.pair else ""
    yield (
        f"pipeline: {step.clocked.seconds:.4f} s for {s.microbatches} microbatches over {p.pp} ranks x {c.vpp} stages, "
        f"clocked by the program of {c.schedule}{', paired' if c.pair else ''}{hides}"
    )
    replicas = f"dp {s.degrees['dp']} and edp {s.degrees['edp']}"
    yield f"exchange of gradients and weights over {replicas} that no compute hides: {step.exchange:.4f} s"
    yield f"optimizer: {step.optimizer:.4f} s"
    rate = batch / step.seconds / s.world
    yield f"step: {step.seconds:.4f} s for {batch:,} tokens on {s.world:,} GPUs = {rate:,.0f} tokens/s a GPU"
