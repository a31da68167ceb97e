"""What a rank holds all the time: weights, gradients, main weights and moments, cut over replicas as a choice says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from moefold.layout.placement import GRIDS
from moefold.plan.counts import Class, piece_count
from moefold.plan.setting import Setting
from moefold.plan.stage import RankStages, StageCount

BYTES = {"fp32": 4, "bf16": 2}
MAIN = {"fp32": 4, "split": 2}  # of a main weight beside one in bf16


@dataclass(frozen=True)
class State:
    """What a rank holds all the time: its parameters, how many of them are its share among replicas, how many of these
    have other ranks' gradients to add, and bytes."""

    parameters: float
    share: float
    summed: float
    weights: float
    gradients: float
    main: float
    moments: float


def state_of(s: Setting, rank: RankStages, stages: list[StageCount]) -> State:
    """Weights, gradients, main weights and moments; what is cut over replicas is their share. Weights of a low
    precision have the copies that products read."""
    choices, recipe = s.choices, s.choices.recipe
    counts = {kind: (count, replicas(s, kind)) for kind, count in parameters_of(s, rank, stages).items()}
    whole = sum(count for count, _ in counts.values())
    share = sum(count / n for count, n in counts.values())
    weights, states = {"none": (whole, whole), "zero": (whole, share), "fsdp": (share, share)}[choices.sharding]
    quantized = sum(stage.quantized for stage in stages) * weights / whole if recipe.copies else 0.0
    plain = weights - (quantized if choices.quantized_weights else 0.0)
    return State(
        whole,
        share,
        sum(count / n for count, n in counts.values() if n > 1),
        plain * recipe.wide + quantized * recipe.copies,
        weights * BYTES[s.config.optim.gradients],
        states * MAIN[s.config.optim.main] if recipe.wide < 4 else 0.0,
        states * 2 * BYTES[s.config.optim.moments],
    )


def parameters_of(s: Setting, rank: RankStages, stages: list[StageCount]) -> Counter[Class]:
    found: Counter[Class] = Counter()
    for stage in stages:
        found.update(dict(stage.parameters))
    if rank.copies:
        found.update(piece_count(s.config.model, "E", 0, s.portion, s.choices).parameters)
    return found


def replicas(s: Setting, kind: Class) -> int:
    """How many ranks hold the same parameters of a class: those along the axes of their grid that do not cut them."""
    grid, axes = kind
    return prod(s.degrees[axis] for axis in GRIDS[grid] if axis not in axes)
