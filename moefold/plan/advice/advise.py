"""Advice for a plan, and the error band of its speed: what stands beside the figures of an answer.

A sentence says what to change, with the figure that makes it apply.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moefold.plan.advice.figures import expert_ratio, graphs_needed, plain_ring, replicated_attention
from moefold.plan.advice.guidelines import (
    context_parallelism,
    groups_inside_a_domain,
    less_model_parallelism,
    more_stages_per_rank,
    whole_experts,
)
from moefold.plan.advice.remedies import (
    captured_graphs,
    communication_remedies,
    larger_microbatches,
    lower_precision,
    memory_remedies,
)
from moefold.plan.advice.sentences import Advice, AdviceRule
from moefold.plan.advice.situation import Situation
from moefold.plan.error_band import band_warning, describe_band, find_band
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import RunSetting, fullest_rank, memory_by_rank

ADVICE_RULES: tuple[AdviceRule, ...] = (
    less_model_parallelism,
    groups_inside_a_domain,
    more_stages_per_rank,
    whole_experts,
    context_parallelism,
    memory_remedies,
    plain_ring,
    communication_remedies,
    expert_ratio,
    replicated_attention,
    larger_microbatches,
    captured_graphs,
    graphs_needed,
    lower_precision,
)


def advise(plan: Situation) -> list[Advice]:
    """Sentences for the plan, the layout first."""
    sentences: list[Advice] = []
    for rule in ADVICE_RULES:
        sentences += rule(plan)
    return sentences


def answer_beside_figures(setting: RunSetting, gpu: Gpu, tokens_per_second: float) -> dict[str, Any]:
    """The part of an answer that is said beside its figures: the band of the planned speed, and the advice."""
    fullest = fullest_rank(memory_by_rank(setting))
    plan = Situation(setting, gpu, fullest)
    band = find_band(gpu.name, setting.world, setting.product_precision)
    warnings = filter(None, (band_warning(band, gpu.name), untimed_shares(setting)))
    return {
        "error_band": {
            "low": tokens_per_second * band.low,
            "middle": tokens_per_second * band.middle,
            "high": tokens_per_second * band.high,
            "runs": band.runs,
            "text": describe_band(band, gpu.name),
            "warning": "; ".join(warnings),
        },
        "advice": [asdict(advice) for advice in advise(plan)],
    }


def untimed_shares(setting: RunSetting) -> str:
    """A warning about shares that this trainer was never timed with on several GPUs; else nothing."""
    if setting.world == 1 or setting.choices.stack != "moefold":
        return ""
    shard = setting.config.shard
    untimed: list[str] = []
    if setting.choices.sharding == "fsdp":
        untimed.append("full sharding")
    if shard.replicas > 1:
        untimed.append("several copies of shares")
    if shard.sync == "hierarchical":
        untimed.append("sums in two levels")
    if not untimed:
        return ""
    return f"never timed on several GPUs, so that these times are an estimate: {', '.join(untimed)}"
