"""Parameters by what `optim.groups` makes of them: frozen ones have neither gradient nor state; a matrix under Muon has
one moment, any other parameter two."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from moefold.anatomy.model_totals import parameter_shapes
from moefold.anatomy.update_groups import AS_THE_RUN, UpdatedWeight, rule_of
from moefold.config.optimizer_groups import first_match, parse_groups
from moefold.config.run import ModelConfig
from moefold.plan.layer.layer_costs import ParameterClass, named_weights, parameter_class
from moefold.plan.memory.rank_stages import RankStages, StagePieces
from moefold.plan.memory.replicas import shard_count
from moefold.plan.memory.resident import ResidentState, moment_sizes
from moefold.plan.memory.run_setting import RunSetting

Degrees = tuple[tuple[str, int], ...]  # of the axes that cut weights


class ClassCount(NamedTuple):
    """Elements of one class of parameters on a rank: all of them, the trained ones, those with a second moment."""

    held: float
    trained: float
    second: float


NONE_COUNTED = ClassCount(0.0, 0.0, 0.0)
RankClasses = Mapping[ParameterClass, ClassCount]


def with_groups(s: RunSetting, rank: RankStages, state: ResidentState) -> ResidentState:
    """The state of a rank without what frozen parameters and rules of groups do not have. What products with frozen
    weights save for backward is not told apart."""
    if not effective_groups(s):
        return state
    classes = rank_classes(s, rank)
    whole = sum_counts(classes.values())
    shares = sum_counts(owned_by_rank(s, classes))
    trained = whole.trained / whole.held
    trained_state = shares.trained / shares.held
    with_gradients = trained_state if s.choices.sharding == "fsdp" else trained
    first, second = moment_sizes(s.optim)
    return replace(
        state,
        share=state.share * trained_state,
        reduced=state.reduced * trained_state,
        gradients=state.gradients * with_gradients,
        main=state.main * trained_state,
        moments=shares.trained * first + shares.second * second,
        trained=trained,
    )


def effective_groups(s: RunSetting) -> tuple[str, ...]:
    """`optim.groups` where parameters of the model are trained, not adapters."""
    return () if s.config.lora.rank else s.optim.groups


def owned_by_rank(s: RunSetting, classes: RankClasses) -> Iterator[ClassCount]:
    """Of each class, the elements whose optimizer state is on this rank."""
    is_sharded = s.choices.sharding != "none"
    for kind, count in classes.items():
        shards = shard_count(s, kind) if is_sharded else 1
        yield ClassCount(*(elements / shards for elements in count))


def sum_counts(counts: Iterable[ClassCount]) -> ClassCount:
    columns = zip(*counts, strict=True)
    return ClassCount(*map(sum, columns))


def rank_classes(s: RunSetting, rank: RankStages) -> RankClasses:
    """Parameters of a rank by class."""
    groups = effective_groups(s)
    pieces = [piece for stage in rank.pieces for piece in stage]
    if rank.copies_embedding:
        pieces.append(("E", 0))
    degrees = tuple(s.portion.degrees.items())
    return count_classes(s.model, groups, s.optim.rule, degrees, tuple(pieces))


@lru_cache(maxsize=4096)  # a search asks for a rank with every layout and recompute
def count_classes(
    model: ModelConfig, groups: tuple[str, ...], rule: str, degrees: Degrees, pieces: StagePieces
) -> RankClasses:
    total: dict[ParameterClass, ClassCount] = {}
    for (piece, layer), times in Counter(pieces).items():
        for kind, count in piece_classes(model, groups, rule, degrees, piece, layer).items():
            more = ClassCount(*(times * elements for elements in count))
            known = total.get(kind, NONE_COUNTED)
            total[kind] = sum_counts([known, more])
    return total


@lru_cache(maxsize=4096)
def piece_classes(
    model: ModelConfig, groups: tuple[str, ...], rule: str, degrees: Degrees, piece: str, layer: int
) -> RankClasses:
    entries = parse_groups(groups)
    sizes = dict(degrees)
    classes: dict[ParameterClass, ClassCount] = {}
    for name, weight in named_weights(model, piece, layer):
        held = prod(weight.part(sizes))
        group = first_match(entries, name) or AS_THE_RUN
        trained = 0.0 if group.frozen else held
        updated = UpdatedWeight(name, weight.shape, weight.is_matrix)
        second = 0.0 if rule_of(rule, group, updated) == "muon" else trained
        kind = parameter_class(weight, sizes)
        known = classes.get(kind, NONE_COUNTED)
        count = ClassCount(held, trained, second)
        classes[kind] = sum_counts([known, count])
    return classes


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
