"""Resident state of a rank: weights, gradients, main weights and moments, sharded over replicas as chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from moefold.layout.placement import GRID_AXES
from moefold.plan.layer.layer_costs import ParameterClass
from moefold.plan.memory.rank_stages import RankStages, StageCount
from moefold.plan.memory.run_setting import RunSetting

STATE_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
MAIN_WEIGHT_BYTES = {"fp32": 4, "split": 2}  # of a main weight, beside the bf16 weight


@dataclass(frozen=True)
class ResidentState:
    """Resident state of a rank: number of parameters, its share of them among replicas, the part of that share whose
    gradients are reduced over ranks, and bytes. `copies` of weights in low precision are a part of `weights`."""

    parameters: float
    share: float
    reduced: float
    weights: float
    copies: float
    gradients: float
    main: float
    moments: float


def resident_state(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> ResidentState:
    """Resident state of a rank, whole or sharded over replicas. With a low precision, weights include the quantised
    copies that GEMMs read."""
    recipe = s.recipe
    optim = s.optim
    parameters = share = reduced = 0.0
    for kind, count in rank_parameters(s, rank, stages).items():
        replicas = replica_count(s, kind)
        parameters += count
        share += count / replicas
        if replicas > 1:
            reduced += count / replicas

    # Parameters whose weights, and whose optimizer state, are on this rank.
    weight_count = share if s.choices.sharding == "fsdp" else parameters
    state_count = parameters if s.choices.sharding == "none" else share
    held = weight_count / parameters
    quantized = sum(stage.quantized for stage in stages) * held
    copies = sum(stage.copies for stage in stages) * held
    plain = weight_count
    if s.keeps_only_quantised:
        plain -= quantized
    return ResidentState(
        parameters=parameters,
        share=share,
        reduced=reduced,
        weights=plain * recipe.wide + copies,
        copies=copies,
        gradients=weight_count * STATE_ELEMENT_BYTES[optim.gradients],
        main=main_weight_bytes(s, state_count, quantized * state_count / weight_count),
        moments=state_count * 2 * STATE_ELEMENT_BYTES[optim.moments],
    )


def main_weight_bytes(s: RunSetting, count: float, quantized: float) -> float:
    """Bytes of the main weights of so many parameters, some of them quantised. Weights that are stored in FP8 alone
    have fp32 main weights; of the rest, fp32 weights are their own."""
    stored = quantized if s.stores_fp8 else 0.0
    beside = MAIN_WEIGHT_BYTES[s.optim.main] if s.recipe.wide < 4 else 0
    return (count - stored) * beside + stored * MAIN_WEIGHT_BYTES["fp32"]


def rank_parameters(s: RunSetting, rank: RankStages, stages: list[StageCount]) -> Counter[ParameterClass]:
    parameters: Counter[ParameterClass] = Counter()
    for stage in stages:
        parameters.update(dict(stage.parameters))
    if rank.copies_embedding:
        embedding = s.count_piece("E", 0)
        parameters.update(embedding.parameters)
    return parameters


def replica_count(s: RunSetting, kind: ParameterClass) -> int:
    """Number of ranks that hold the same parameters of a class: the ranks along those axes of their grid that do not
    shard them."""
    grid, cut_axes = kind
    uncut_axes = [axis for axis in GRID_AXES[grid] if axis not in cut_axes]
    return prod(s.degrees[axis] for axis in uncut_axes)
