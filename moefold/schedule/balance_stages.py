"""Automatic cut of a model into pipeline stages: the cut whose slowest stage is fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_layout import StageLayout

ROUNDING_SLACK = 1 + 1e-12  # two sums of the same costs may differ in the last bits

JoinCosts = Callable[[float, float], float]


def model_pieces(layers: int, dense_layers: int = 0, mtp_layers: int = 0) -> str:
    """The pieces of a model in order: `model_pieces(4, 1, 1)` is "EdtttmL"."""
    moe_layers = layers - dense_layers
    return "E" + "d" * dense_layers + "t" * moe_layers + "m" * mtp_layers + "L"


def propose_layout(pieces: str, costs: Sequence[float], stages: int) -> StageLayout:
    """Cut `pieces`, each with its cost, into `stages` runs: least slowest stage first, then least sum of squares.

    Exact, by dynamic programming over where the last stage begins: the best way to put the first j pieces on s stages
    is the best way to put the first i on s - 1, for some i < j, and pieces i to j on stage s. The slowest stage is
    minimised first; then it only bounds the stages, since the two aims together are not a sum over stages.
    """
    if len(pieces) < stages:
        raise ScheduleError(f"{stages} stages are more than the model has pieces, {len(pieces)}; lower pp or vpp")
    cumulative = [0.0, *accumulate(costs)]
    slowest, _ = cut_into_stages(cumulative, stages, math.inf, max)
    _, bounds = cut_into_stages(cumulative, stages, slowest, add_squared_cost)
    return StageLayout(tuple(pieces[start:end] for start, end in pairwise(bounds)))


def add_squared_cost(total: float, stage_cost: float) -> float:
    return total + stage_cost * stage_cost


def cut_into_stages(cumulative: Sequence[float], stages: int, limit: float, join: JoinCosts) -> tuple[float, list[int]]:
    """The least value of `join` over all cuts into stages of at most `limit`, and the bounds of the first such cut."""
    pieces = len(cumulative) - 1
    best = [math.inf] * (pieces + 1)  # best[j]: the first j pieces on the stages so far
    best[0] = 0.0
    starts_by_stage: list[list[int]] = []
    for stage in range(1, stages + 1):
        stages_left = stages - stage
        best, starts = extend_by_one_stage(best, cumulative, stage, stages_left, limit, join)
        starts_by_stage.append(starts)

    # The last stage ends with the last piece; each start is the end of the stage before.
    bounds = [pieces]
    for starts in reversed(starts_by_stage):
        bounds.append(starts[bounds[-1]])
    bounds.reverse()
    return best[pieces], bounds


def extend_by_one_stage(
    best: list[float], cumulative: Sequence[float], stage: int, stages_left: int, limit: float, join: JoinCosts
) -> tuple[list[float], list[int]]:
    """One row of the dynamic program: by end, the least value with `stage` stages, and where the last one starts."""
    pieces = len(cumulative) - 1
    values = [math.inf] * (pieces + 1)
    starts = [0] * (pieces + 1)
    for end in range(stage, pieces - stages_left + 1):
        for start in range(end - 1, stage - 2, -1):
            cost = cumulative[end] - cumulative[start]
            if cost > limit * ROUNDING_SLACK:
                break  # costs are not negative: an earlier start only adds
            value = join(best[start], cost)
            if value < values[end]:
                values[end] = value
                starts[end] = start
    return values, starts
