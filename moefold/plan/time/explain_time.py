"""The arithmetic of a step's time, line by line."""

from __future__ import annotations

from collections.abc import Iterator

from moefold.plan.layer.layer_costs import Gemm, StepCount
from moefold.plan.layer.pointwise import count_launches, input_quantization_bytes, pointwise_bytes
from moefold.plan.layer.quantise_passes import forward_quantise_bytes
from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.machine.fp8_rates import FP8_RATIOS
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.explain_memory import piece_name
from moefold.plan.memory.peak_memory import RunSetting
from moefold.plan.memory.rank_stages import stages_by_rank
from moefold.plan.time.dynamic_step import dynamic_context, time_step
from moefold.plan.time.simulate_step import OVERLAP_FRICTION, StepTime
from moefold.plan.time.step_times import OpSeconds, PassSeconds, StepClock

OP_TIME_PARTS = {
    "products": "GEMMs",
    "attention": "attention",
    "passes": "pointwise",
    "host": "host latency",
    "joined": "tp and cp collectives",
    "memory": "recompute and offload",
    "travel": "expert communication",
}  # fields of OpSeconds -> printed names


def explain_time(setting: RunSetting, gpu: Gpu) -> list[str]:
    """Lines of a step's time: each kind of piece once, then the pipeline, the exchange and the optimizer."""
    clock = StepClock(setting, gpu)
    step = time_step(setting, gpu)
    kinds: dict[tuple[str, int], None] = {}
    for rank in stages_by_rank(setting.config):
        for pieces in rank.pieces:
            kinds.update(dict.fromkeys(pieces))
    lines = [describe_gpu_rates(gpu, setting)]
    for piece, layer in kinds:
        lines.append(f"{piece_name(piece, layer)}: milliseconds of one microbatch on one rank, by step and pass")
        lines += piece_time_lines(clock, piece, layer)
    lines += whole_step_lines(setting, gpu, step)
    return lines


def describe_gpu_rates(gpu: Gpu, s: RunSetting) -> str:
    kernels = gpu.kernels
    precision = s.choices.precision
    products = ""
    if s.product_precision != precision:
        products = f" (products of FP8 recipes: by measured ratios, {FP8_RATIOS})"
    achieved = gpu.achieved_rate(precision) / 1e12
    peak = gpu.peak_flops(precision) / 1e12
    return (
        f"{gpu.name} ({gpu.origin}): large GEMMs in {precision} reach {achieved:,.0f} of "
        f"{peak:,.0f} TFLOP/s{products}, grouped GEMMs {kernels.grouped:.0%} of that; memory bandwidth "
        f"{gpu.hbm / 1e12:.2f} TB/s, of which pointwise kernels reach {kernels.stream:.0%}; exponent of the "
        f"smooth roofline {kernels.blend:g}; a launch takes {gpu.host.launch * 1e6:.1f} us"
    )


def piece_time_lines(clock: StepClock, piece: str, layer: int) -> Iterator[str]:
    shapes = clock.setting.layer_shapes(layer)
    count = clock.setting.count_piece(piece, layer)
    seconds = clock.time_steps(piece, layer)
    for step in count.steps:
        yield from step_time_lines(step, shapes, seconds[step.name])
        logits = clock.logit_flops(step, shapes)
        if logits:
            yield f"    largest logits: {logits / 1e12:.3f} TFLOP, in attention's forward, by its rate"


def step_time_lines(step: StepCount, s: RankShapes, passes: PassSeconds) -> Iterator[str]:
    for kind, seconds in zip("FDW", passes, strict=True):
        if seconds.total:
            milliseconds = seconds.total * 1e3
            parts = format_op_seconds(seconds)
            yield f"  {step.name:<10} {kind} {milliseconds:9.3f}   {parts}"
    for gemm in step.gemms:
        yield f"    {gemm.name}: {gemm_shape(gemm)} = {gemm.flops / 1e12:.3f} TFLOP forward"
    launched, looped = count_launches(step.name, step.gemms, s)
    quantized = input_quantization_bytes(step.gemms, s)
    in_fp8 = forward_quantise_bytes(step.name, step.gemms, s)
    moved = pointwise_bytes(step.name, s) + quantized + in_fp8
    launches = launched + looped
    if launches:
        yield f"    {moved / 1e9:.3f} GB moved by pointwise kernels, {launches:g} launches forward"


def gemm_shape(gemm: Gemm) -> str:
    """8 x (512 x 2,048 by 1,024)"""
    shape = f"({gemm.rows:,.0f} x {gemm.k:,.0f} by {gemm.n:,.0f})"
    if gemm.groups > 1:
        shape = f"{gemm.groups:g} x {shape}"
    if gemm.times > 1:
        shape = f"{shape} x {gemm.times}"
    return shape


def format_op_seconds(seconds: OpSeconds) -> str:
    parts: list[str] = []
    for field, name in OP_TIME_PARTS.items():
        value = getattr(seconds, field)
        if value > 0:
            parts.append(f"{name} {value * 1e3:.3f}")
    return " + ".join(parts)


def whole_step_lines(s: RunSetting, gpu: Gpu, step: StepTime) -> Iterator[str]:
    pipeline = s.pipeline
    shape = f"{s.microbatches} microbatches over {s.parallel.pp} ranks x {pipeline.vpp} stages"
    program = f"simulated with the program of {pipeline.schedule}"
    if pipeline.pair:
        program += f", paired; a paired slot takes {OVERLAP_FRICTION:.0%} of its overlapped communication longer"
    dynamic = dynamic_context(s, gpu)
    if dynamic:
        yield str(dynamic)
        shape = f"about {dynamic.microbatches} microbatches over {s.parallel.pp} ranks"
    elif s.choices.documents:
        yield f"attention of the busiest ranks: {s.attention_imbalance:.3f} times the mean, by lengths of documents"
    yield f"pipeline: {step.pipeline_time.seconds:.4f} s for {shape}, {program}"
    replicas = f"dp {s.degrees['dp']} and edp {s.degrees['edp']}"
    if s.config.shard.sync == "hierarchical":
        replicas += ", in two levels"
    if s.config.shard.replicas > 1:
        replicas += f", {s.config.shard.replicas} copies of all shares"
    yield f"exposed exchange of gradients and weights over {replicas}: {step.exchange:.4f} s"
    yield f"optimizer: {step.optimizer:.4f} s"
    batch = s.train.global_batch * s.data.seq_len
    rate = batch / step.seconds / s.world
    yield f"step: {step.seconds:.4f} s for {batch:,} tokens on {s.world:,} GPUs = {rate:,.0f} tokens/s a GPU"
