"""What a rank holds all the time: weights, gradients, main weights and moments, cut over replicas as a choice says."""

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
    """What a rank holds all the time: its parameters, how many of them are its share among replicas, how many of these
    have other ranks' gradients to add, and bytes."""

    parameters: float
    share: float
    summed: float
    weights: float
    gradients: float
    main: float
    moments: float


def resident_state(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> ResidentState:
    """Weights, gradients, main weights and moments; what is cut over replicas is their share. Weights of a low
    precision have the copies that products read."""
    choices, recipe = s.choices, s.choices.recipe
    counts = {kind: (count, replica_count(s, kind)) for kind, count in rank_parameters(s, rank, stages).items()}
    whole = sum(count for count, _ in counts.values())
    share = sum(count / n for count, n in counts.values())
    weights, states = {"none": (whole, whole), "zero": (whole, share), "fsdp": (share, share)}[choices.sharding]
    quantized = sum(stage.quantized for stage in stages) * weights / whole if recipe.copies else 0.0
    plain = weights - (quantized if choices.quantized_weights else 0.0)
    return ResidentState(
        whole,
        share,
        sum(count / n for count, n in counts.values() if n > 1),
        plain * recipe.wide + quantized * recipe.copies,
        weights * STATE_ELEMENT_BYTES[s.config.optim.gradients],
        states * MAIN_WEIGHT_BYTES[s.config.optim.main] if recipe.wide < 4 else 0.0,
        states * 2 * STATE_ELEMENT_BYTES[s.config.optim.moments],
    )


def rank_parameters(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> Counter[ParameterClass]:
    found: Counter[ParameterClass] = Counter()
    for stage in stages:
        found.update(dict(stage.parameters))
    if rank.copies:
        found.update(count_piece(s.config.model, "E", 0, s.portion, s.choices).parameters)
    return found


def replica_count(s: RunSetting, kind: ParameterClass) -> int:
    """How many ranks hold the same parameters of a class: those along the axes of their grid that do not cut them."""
    grid, axes = kind
    return prod(s.degrees[axis] for axis in GRID_AXES[grid] if axis not in axes)
