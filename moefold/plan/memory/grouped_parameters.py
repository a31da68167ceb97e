"""Parameters by what `optim.groups` makes of them: frozen ones have neither gradient nor state; a matrix under Muon has
one moment, any other parameter two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from moefold.anatomy.model_totals import parameter_shapes
from moefold.anatomy.stage_contents import Stage, pipeline_stages
from moefold.anatomy.step_specs import WeightSpec, embed_step, prefixed_steps
from moefold.config.optimizer_groups import OptimizerGroup, first_match, parse_groups
from moefold.config.run import Config, ModelConfig
from moefold.plan.layer.layer_costs import parameter_class
from moefold.plan.memory.rank_stages import RankStages
from moefold.plan.memory.resident import ResidentState, moment_sizes, shard_count
from moefold.plan.memory.run_setting import RunSetting

WORD_TABLES = ("embedding.weight", "head.weight")  # left to AdamW unless an entry says otherwise

AS_THE_RUN = OptimizerGroup()  # options of parameters that no entry matches


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
        group = first_match(entries, name) or AS_THE_RUN
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


def has_step(stage: Stage, prefix: str, name: str) -> bool:
    if name == "embed":
        return stage.embeds
    if name == "predict":
        return stage.predicts
    kind, number, *_ = prefix.split(".")
    if kind == "blocks":
        return int(number) in stage.layers
    return int(number) + 1 in stage.ahead


def is_updated_by_muon(s: RunSetting, group: OptimizerGroup, weight: WeightSpec) -> bool:
    """Whether Muon updates a parameter: asked for by its entry, or as the rule of the run, if it is a matrix between
    hidden vectors."""
    if group.rule is not None or s.optim.rule != "muon":
        return group.rule == "muon"
    if not weight.is_matrix or weight.name in WORD_TABLES:
        return False
    return min(weight.shape[-2:]) > 1


@lru_cache(maxsize=64)  # a search asks for it with every layout
def trained_share(model: ModelConfig, groups: tuple[str, ...]) -> float:
    """The share of a model's parameters that `optim.groups` does not freeze."""
    if not groups:
        return 1.0
    entries = parse_groups(groups)
    whole = 0
    frozen = 0
    for name, shape in parameter_shapes(model).items():
        size = prod(shape)
        whole += size
        group = first_match(entries, name)
        if group is not None and group.frozen:
            frozen += size
    return 1 - frozen / whole
