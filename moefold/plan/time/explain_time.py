"""The arithmetic behind a step's time, line by line, as a person would do it."""

from __future__ import annotations

from collections.abc import Iterator

from moefold.anatomy.step_specs import sliding_window_of
from moefold.plan.layer import pointwise
from moefold.plan.layer.layer_costs import StepCount, count_piece
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.explain_memory import piece_name
from moefold.plan.memory.peak_memory import RunSetting
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.plan.time.simulate_step import OVERLAP_FRICTION, StepTime, time_training_step
from moefold.plan.time.step_times import OpSeconds, PassSeconds, StepClock

OP_TIME_PARTS = ("products", "attention", "passes", "host", "joined", "memory", "travel")


def explain_time(setting: RunSetting, gpu: Gpu) -> list[str]:
    """How the seconds of a step come about: each kind of piece once, then the pipeline and what stands around it."""
    pace, step = StepClock(setting, gpu), time_training_step(setting, gpu)
    kinds = dict.fromkeys(kind for rank in stages_by_rank(setting.config) for stage in rank.pieces for kind in stage)
    lines = [describe_gpu_rates(gpu, setting)]
    for kind in kinds:
        lines += [f"{piece_name(*kind)}: milliseconds of one microbatch on one rank, by step and pass"]
        lines += piece_time_lines(pace, kind)
    return [*lines, *whole_step_lines(setting, step)]


def describe_gpu_rates(gpu: Gpu, s: RunSetting) -> str:
    k, precision = gpu.kernels, s.choices.precision
    return (
        f"{gpu.name} ({gpu.origin}): products in {precision} tend to {gpu.achieved_rate(precision) / 1e12:,.0f} of "
        f"{gpu.peak_flops(precision) / 1e12:,.0f} TFLOP/s, grouped ones to {k.grouped:.0%} of that, and blend with "
        f"{gpu.hbm / 1e12:.2f} TB/s by power {k.blend:g}; passes reach {k.stream:.0%} of it; "
        f"a launch takes {gpu.host.launch * 1e6:.1f} us"
    )


def piece_time_lines(pace: StepClock, kind: tuple[str, int]) -> Iterator[str]:
    s = pace.setting
    model = s.config.model
    sizes = RankShapes(model, s.portion, s.choices, sliding_window_of(model, kind[1]))
    counts = {step.name: step for step in count_piece(model, *kind, s.portion, s.choices).steps}
    for name, passes in pace.steps(*kind).items():
        yield from step_time_lines(counts[name], sizes, passes)


def step_time_lines(step: StepCount, s: RankShapes, passes: PassSeconds) -> Iterator[str]:
    for kind, seconds in zip("FDW", passes, strict=True):
        if seconds.all:
            yield f"  {step.name:<10} {kind} {seconds.all * 1e3:9.3f}   {format_op_seconds(seconds)}"
    for g in step.gemms:
        many = f"{g.groups:g} x " if g.groups > 1 else ""
        shape = f"{many}({g.rows:,.0f} x {g.k:,.0f} by {g.n:,.0f})" + (f" x {g.times}" if g.times > 1 else "")
        yield f"    {g.name}: {shape} = {g.flops / 1e12:.3f} TFLOP forward"
    launched, looped = pointwise.count_launches(step.name, step.gemms, s)
    moved = pointwise.pointwise_bytes(step.name, s) + pointwise.quantization_bytes(step.gemms, s)
    yield f"    {moved / 1e9:.3f} GB of pointwise passes, {launched + looped:g} launches forward"


def format_op_seconds(seconds: OpSeconds) -> str:
    parts = {name: getattr(seconds, name) for name in OP_TIME_PARTS}
    return " + ".join(f"{name} {value * 1e3:.3f}" for name, value in parts.items() if value > 0)


def whole_step_lines(s: RunSetting, step: StepTime) -> Iterator[str]:
    p, c, batch = s.config.parallel, s.config.pipeline, s.config.train.global_batch * s.config.data.seq_len
    hides = f"; of travel that a paired slot hides, {OVERLAP_FRICTION:.0%} still slows it" if c.pair else ""
    yield (
        f"pipeline: {step.pipeline_time.seconds:.4f} s for {s.microbatches} microbatches over {p.pp} ranks x {c.vpp} stages, "
        f"clocked by the program of {c.schedule}{', paired' if c.pair else ''}{hides}"
    )
    replicas = f"dp {s.degrees['dp']} and edp {s.degrees['edp']}"
    yield f"exchange of gradients and weights over {replicas} that no compute hides: {step.exchange:.4f} s"
    yield f"optimizer: {step.optimizer:.4f} s"
    rate = batch / step.seconds / s.world
    yield f"step: {step.seconds:.4f} s for {batch:,} tokens on {s.world:,} GPUs = {rate:,.0f} tokens/s a GPU"
