"""Advice for a plan: sentences about what to change, each with the figure that makes it apply."""

from __future__ import annotations

from dataclasses import asdict

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


def advice_entries(plan: Situation) -> list[dict[str, str]]:
    """The advice as plain data."""
    return [asdict(advice) for advice in advise(plan)]
