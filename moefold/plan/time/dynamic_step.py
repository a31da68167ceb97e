"""Time of a step with dynamic context parallelism (`parallel.context_sizes dynamic`), and of any other. Torch-free.

Samples are drawn from the histogram of lengths (`lengths`; without one, all are as long as a sequence), grouped as a
run groups them, by FLOPs and by what the planner's clock takes for sending, and timed by that clock. In every
microbatch ranks wait for the slowest group. Long batches are drawn in part: further microbatches take as long as those
that were drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import NamedTuple

from moefold.config.context_sending import keys_by_size
from moefold.config.run import ModelConfig, PipelineConfig
from moefold.data.dynamic_context import (
    ContextGroup,
    ContextMicrobatch,
    ContextPlan,
    ContextPrice,
    ContextShape,
    SampleSeconds,
    add_seconds,
    context_shape,
    group_seconds,
    plan_context,
)
from moefold.data.flops_price import FlopsPrice
from moefold.plan.length_histogram import Lengths, LengthShare, cut_lengths
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.context_rows import config_of_row
from moefold.plan.memory.run_setting import RunSetting
from moefold.plan.time.context_price import PlannedContextPrice
from moefold.plan.time.simulate_step import StepTime, ordered_program, time_training_step
from moefold.schedule.simulate_program import uneven_makespan
from moefold.schedule.stage_costs import uniform_costs

MOST_SAMPLES = 1024  # of a batch, that are drawn and grouped
PLAIN_PIPELINE = PipelineConfig()
OP_SHARES = 3  # of a microbatch's seconds: forward, data gradient, weight gradient


class DrawnPlan(NamedTuple):
    """Lengths of samples, and the plan for them."""

    lengths: tuple[int, ...]
    plan: ContextPlan


def time_step(setting: RunSetting, gpu: Gpu) -> StepTime:
    """Time of a step, with the sizes of context parallelism that the run has."""
    step = time_training_step(setting, gpu)
    if setting.parallel.context_sizes == "fixed":
        return step
    return with_pipeline_seconds(step, dynamic_seconds(setting, gpu))


def dynamic_seconds(setting: RunSetting, gpu: Gpu) -> float:
    """Seconds of the pipeline."""
    shape = shape_of(setting)
    price = planned_price(setting, gpu, shape)
    drawn = draw_plan(setting, shape, price)
    timed = [time_microbatch(each, drawn.lengths, price) for each in drawn.plan.microbatches]
    seconds = sum(each.seconds for each in timed)
    further = microbatch_scale(setting, drawn) - 1
    return step_seconds(timed, shape.stages, setting.pipeline) + further * seconds / shape.stages


class DynamicContext(NamedTuple):
    """Microbatches of a step, and by the size of a group its share of the work of ranks, idle ones left out."""

    microbatches: int
    shares: dict[int, float]

    def __str__(self) -> str:
        """dynamic context: about 11 microbatches a step; of their ranks 71% alone, 29% in groups of 4"""
        parts: list[str] = []
        for size, share in self.shares.items():
            place = "alone" if size == 1 else f"in groups of {size}"
            parts.append(f"{share:.0%} {place}")
        ranks = ", ".join(parts)
        return f"dynamic context: about {self.microbatches} microbatches a step; of their ranks {ranks}"


def dynamic_context(setting: RunSetting, gpu: Gpu) -> DynamicContext | None:
    """What a step with dynamic sizes is cut into; None with fixed sizes."""
    if setting.parallel.context_sizes == "fixed":
        return None
    shape = shape_of(setting)
    drawn = draw_plan(setting, shape, planned_price(setting, gpu, shape))
    microbatches = drawn.plan.microbatches
    by_size = ranks_by_size(microbatches)
    total = sum(by_size.values())
    shares = {size: ranks / total for size, ranks in by_size.items()}
    count = microbatch_scale(setting, drawn) * len(microbatches)
    return DynamicContext(round(count), shares)


def ranks_by_size(microbatches: Sequence[ContextMicrobatch]) -> dict[int, int]:
    """Ranks of groups with samples, by the size of the group, summed over microbatches."""
    ranks = Counter[int]()
    for microbatch in microbatches:
        for group in microbatch.groups:
            if group.samples:
                ranks[group.size] += group.size
    return dict(sorted(ranks.items()))


def microbatch_scale(setting: RunSetting, drawn: DrawnPlan) -> float:
    """Tokens of a step over those that were drawn."""
    tokens = setting.train.global_batch * setting.data.seq_len
    return max(1.0, tokens / sum(drawn.lengths))


def shape_of(setting: RunSetting) -> ContextShape:
    parallel = setting.parallel
    ranks = setting.world // (parallel.tp * parallel.pp)
    return context_shape(setting.config, ranks)


def draw_plan(setting: RunSetting, shape: ContextShape, price: PlannedContextPrice) -> DrawnPlan:
    sent_keys = keys_of_run(setting, shape, price)
    seq_len = setting.data.seq_len
    tokens = setting.train.global_batch * seq_len
    documents = setting.choices.documents
    samples = cut_lengths(documents, seq_len) if documents else (LengthShare(seq_len, 1.0),)
    return plan_of_draw(samples, tokens, shape, setting.model, tuple(sent_keys.items()))


def keys_of_run(setting: RunSetting, shape: ContextShape, price: PlannedContextPrice) -> dict[int, float]:
    """What a run takes for sending (`parallel.context_sending`): as it is set, or as it would be measured."""
    asked = keys_by_size(setting.parallel.context_sending, shape.sizes)
    if setting.parallel.context_sending:
        return asked
    by_flops = FlopsPrice(setting.model, asked)
    flops = by_flops.of_sample(shape.limit, 1).attention
    key_seconds = by_flops.each_key * price.of_sample(shape.limit, 1).attention / flops
    found: dict[int, float] = {}
    for size in shape.sizes:
        token_seconds = size * price.sent_of_size(size).seconds
        found[size] = float(f"{token_seconds / key_seconds:.2g}")
    return found


@lru_cache(maxsize=64)
def plan_of_draw(
    samples: Lengths,
    tokens: int,
    shape: ContextShape,
    model: ModelConfig,
    sent_keys: tuple[tuple[int, float], ...],
) -> DrawnPlan:
    """Samples for at least a microbatch of all stages, and the plan that a run makes for them."""
    fewest = min(tokens, shape.ranks * shape.limit * shape.stages)
    lengths = draw_lengths(samples, tokens, fewest)
    plan = plan_context(lengths, shape, FlopsPrice(model, dict(sent_keys)))
    return DrawnPlan(tuple(lengths), plan)


def draw_lengths(samples: Lengths, most: int, fewest: int) -> list[int]:
    """Lengths of so many tokens at most, and so many at least."""
    chance = Random(3)
    values = [sample.length for sample in samples]
    shares = [sample.share for sample in samples]
    lengths: list[int] = []
    total = 0
    while total < fewest or len(lengths) < MOST_SAMPLES:
        (length,) = chance.choices(values, shares)
        if lengths and total + length > most:
            break
        lengths.append(length)
        total += length
    return lengths


def planned_price(setting: RunSetting, gpu: Gpu, shape: ContextShape) -> PlannedContextPrice:
    """Prices of single samples: their lengths are known, so that the histogram is left out."""
    config = config_of_row(setting.config, 1, shape.limit)
    choices = replace(setting.choices, lengths=())
    return PlannedContextPrice(config, choices, gpu, setting.world, shape.limit)


def time_microbatch(microbatch: ContextMicrobatch, lengths: Sequence[int], price: ContextPrice) -> ContextMicrobatch:
    """The microbatch with the seconds of its slowest group."""
    seconds = [time_group(group, lengths, price) for group in microbatch.groups]
    return microbatch._replace(seconds=max(seconds))


def time_group(group: ContextGroup, lengths: Sequence[int], price: ContextPrice) -> float:
    sums = SampleSeconds(0.0, 0.0, 0.0)
    for sample in group.samples:
        of_sample = price.of_sample(lengths[sample], group.size)
        sums = add_seconds(sums, of_sample)
    return group_seconds(sums, price.fixed)


def step_seconds(
    microbatches: Sequence[ContextMicrobatch],
    ranks: int,
    pipeline: PipelineConfig = PLAIN_PIPELINE,
) -> float:
    """Seconds of the pipeline's program on so many ranks, stages of equal work."""
    program = ordered_program(pipeline, ranks, len(microbatches))
    costs = uniform_costs(ranks * pipeline.vpp, pipeline.vpp)
    weights = [microbatch.seconds / (OP_SHARES * ranks) for microbatch in microbatches]
    return uneven_makespan(program, costs, weights)


def with_pipeline_seconds(step: StepTime, pipeline: float) -> StepTime:
    """The step with other seconds of its pipeline. Arithmetic at the peak stays; what takes the rest of the time keeps
    its proportions."""
    seconds = pipeline + step.exchange + step.optimizer
    arithmetic = step.walls["arithmetic"]
    rest = step.seconds - arithmetic
    scale = max(0.0, seconds - arithmetic) / rest if rest > 0 else 0.0
    walls = {name: scale * wall for name, wall in step.walls.items()}
    walls["arithmetic"] = arithmetic
    pipeline_time = replace(step.pipeline_time, seconds=pipeline)
    return replace(step, seconds=seconds, pipeline_time=pipeline_time, walls=walls)
