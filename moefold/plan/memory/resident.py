"""Resident state of a rank: weights, gradients, main weights and moments, sharded over replicas as a choice says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from moefold.layout.placement import GRID_AXES
from moefold.plan.layer.layer_costs import ParameterClass, count_piece
from moefold.plan.memory.rank_stages import RankStages, StageCount
from moefold.plan.memory.run_setting import RunSetting

STATE_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
MAIN_WEIGHT_BYTES = {"fp32": 4, "split": 2}  # of a main weight beside one in bf16


@dataclass(frozen=True)
class ResidentState:
    """What a rank holds all the time: its parameters, its share of them among replicas, the part of that share whose
    gradients are reduced over ranks, and bytes."""

    parameters: float
    share: float
    reduced: float
    weights: float
    gradients: float
    main: float
    moments: float


def resident_state(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> ResidentState:
    """Weights, gradients, main weights and moments, whole or sharded over replicas. Weights of a low precision have
    the copies that GEMMs read."""
    recipe = s.choices.recipe
    optim = s.config.optim
    parameters = share = reduced = 0.0
    for kind, count in rank_parameters(s, rank, stages).items():
        replicas = replica_count(s, kind)
        parameters += count
        share += count / replicas
        if replicas > 1:
            reduced += count / replicas

    # How many of the rank's parameters have weights and state here.
    weight_count = share if s.choices.sharding == "fsdp" else parameters
    state_count = parameters if s.choices.sharding == "none" else share
    quantized = 0.0
    if recipe.copies:
        quantized = sum(stage.quantized for stage in stages) * weight_count / parameters
    plain = weight_count
    if s.choices.quantized_weights:
        plain -= quantized
    main = state_count * MAIN_WEIGHT_BYTES[optim.main] if recipe.wide < 4 else 0.0
    return ResidentState(
        parameters=parameters,
        share=share,
        reduced=reduced,
        weights=plain * recipe.wide + quantized * recipe.copies,
        gradients=weight_count * STATE_ELEMENT_BYTES[optim.gradients],
        main=main,
        moments=state_count * 2 * STATE_ELEMENT_BYTES[optim.moments],
    )


def rank_parameters(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> Counter[ParameterClass]:
    parameters: Counter[ParameterClass] = Counter()
    for stage in stages:
        parameters.update(dict(stage.parameters))
    if rank.copies_embedding:
        embedding = count_piece(s.config.model, "E", 0, s.portion, s.choices)
        parameters.update(embedding.parameters)
    return parameters


def replica_count(s: RunSetting, kind: ParameterClass) -> int:
    """How many ranks hold the same parameters of a class: those along the axes of their grid that do not cut them."""
    grid, cut_axes = kind
    return prod(s.degrees[axis] for axis in GRID_AXES[grid] if axis not in cut_axes)
