"""Parameters by what `optim.groups` makes of them: frozen ones have neither gradient nor state; a matrix under Muon has
one moment, any other parameter two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from moefold.anatomy.stage_contents import Stage, pipeline_stages
from moefold.anatomy.step_specs import (
    PrefixedStep,
    WeightSpec,
    embed_step,
    prefixed_model_steps,
    prefixed_mtp_steps,
)
from moefold.config.optimizer_groups import OptimizerGroup, parse_groups
from moefold.config.run import Config, ModelConfig
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.memory.rank_stages import RankStages
from moefold.plan.memory.resident import ResidentState, moment_sizes, shard_count
from moefold.plan.memory.run_setting import RunSetting

WORD_TABLES = ("embedding.weight", "head.weight")  # left to AdamW unless an entry says otherwise


@dataclass
class GroupedCounts:
    """Elements on a rank: of weights and of optimizer state; of both, those that are trained; and of second moments."""

    weights: float = 0.0
    trained: float = 0.0
    state: float = 0.0
    trained_state: float = 0.0
    second_moments: float = 0.0


def with_groups(s: RunSetting, rank: RankStages, state: ResidentState) -> ResidentState:
    """The state of a rank without what frozen parameters and rules of groups do not have. What products with frozen
    weights save for backward is not told apart."""
    if not s.optim.groups or s.config.lora.rank:
        return state
    counts = grouped_counts(s, rank)
    trained = counts.trained / counts.weights
    trained_state = counts.trained_state / counts.state
    first, second = moment_sizes(s.optim)
    return replace(
        state,
        share=state.share * trained_state,
        reduced=state.reduced * trained_state,
        gradients=state.gradients * trained,
        main=state.main * trained_state,
        moments=counts.trained_state * first + counts.second_moments * second,
        trained=trained,
    )


def grouped_counts(s: RunSetting, rank: RankStages) -> GroupedCounts:
    degrees = s.portion.degrees
    is_sharded = s.choices.sharding != "none"
    entries = parse_groups(s.optim.groups)
    counts = GroupedCounts()
    for name, weight in rank_weights(s.config, rank):
        held = prod(weight.part(degrees))
        shards = shard_count(s, parameter_class(weight, degrees)) if is_sharded else 1
        counts.weights += held
        counts.state += held / shards
        group = group_of(entries, name)
        if group.frozen:
            continue
        counts.trained += held
        counts.trained_state += held / shards
        if not is_updated_by_muon(s, group, weight):
            counts.second_moments += held / shards
    return counts


def rank_weights(config: Config, rank: RankStages) -> Iterator[tuple[str, WeightSpec]]:
    """Every weight of a rank, with its full name."""
    stages = pipeline_stages(config)
    own = [stages[number] for number in rank.numbers]
    for prefix, step in prefixed_steps(config.model):
        if any(has_step(stage, prefix, step.name) for stage in own):
            for weight in step.weights:
                yield prefix + weight.name, weight
    if rank.copies_embedding:
        [embedding] = embed_step(config.model).weights
        yield embedding.name, embedding


def prefixed_steps(model: ModelConfig) -> list[PrefixedStep]:
    return [*prefixed_model_steps(model), *prefixed_mtp_steps(model)]


def has_step(stage: Stage, prefix: str, name: str) -> bool:
    if name == "embed":
        return stage.embeds
    if name == "predict":
        return stage.predicts
    kind, number, *_ = prefix.split(".")
    if kind == "blocks":
        return int(number) in stage.layers
    return int(number) + 1 in stage.ahead


def parameter_class(weight: WeightSpec, degrees: dict[str, int]) -> ParameterClass:
    axes = tuple(axis for _, axis in weight.cut_over(degrees))
    grid = "expert" if "ep" in axes else "dense"
    return grid, axes


def group_of(entries: list[OptimizerGroup], name: str) -> OptimizerGroup:
    """The first entry that matches a parameter's name; without one, a group with the options of the run."""
    for entry in entries:
        if entry.matches(name):
            return entry
    return OptimizerGroup()


def is_updated_by_muon(s: RunSetting, group: OptimizerGroup, weight: WeightSpec) -> bool:
    """Whether Muon updates a parameter: asked for by its entry, or as the rule of the run, if it is a matrix between
    hidden vectors."""
    if group.rule is not None or s.optim.rule != "muon":
        return group.rule == "muon"
    if not weight.is_matrix or weight.name in WORD_TABLES:
        return False
    return min(weight.shape[-2:]) > 1


def trained_share(config: Config) -> float:
    """The share of the model's parameters that is not frozen."""
    if not config.optim.groups:
        return 1.0
    entries = parse_groups(config.optim.groups)
    whole = 0
    trained = 0
    for prefix, step in prefixed_steps(config.model):
        for weight in step.weights:
            whole += weight.size
            group = group_of(entries, prefix + weight.name)
            if not group.frozen:
                trained += weight.size
    return trained / whole
