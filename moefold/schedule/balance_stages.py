"""Automatic cut of a model into pipeline stages: the cut with the least time of the slowest stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_layout import StageLayout

ROUNDING_SLACK = 1 + 1e-12  # two sums of the same costs may differ in the last bits

Costs = Sequence[float]
JoinCosts = Callable[[float, float], float]


def model_pieces(layers: int, dense_layers: int = 0, mtp_layers: int = 0) -> str:
    """The pieces of a model in order: `model_pieces(4, 1, 1)` is "EdtttmL"."""
    dense = "d" * dense_layers
    moe = "t" * (layers - dense_layers)
    ahead = "m" * mtp_layers
    return f"E{dense}{moe}{ahead}L"


def propose_layout(pieces: str, costs: Costs, stages: int) -> StageLayout:
    """Cut `pieces`, each with its cost, into `stages` runs. The cost of the slowest stage is minimised first, then the
    sum of squares.

    Exact, by dynamic programming over the start of the last stage: the best cut of the first j pieces into s stages is,
    for some i < j, the best cut of the first i into s - 1 stages and pieces i to j on stage s. There are two programs:
    the first finds the least slowest stage, the second minimises the sum of squares with that as an upper bound.
    """
    if len(pieces) < stages:
        raise ScheduleError(f"{stages} stages, but the model has only {len(pieces)} pieces; lower pp or vpp")
    cumulative = [0.0, *accumulate(costs)]
    slowest, _ = cut_into_stages(cumulative, stages, math.inf, max)
    _, bounds = cut_into_stages(cumulative, stages, slowest, add_squared_cost)
    cuts = pairwise(bounds)
    stages_of_pieces = [pieces[start:end] for start, end in cuts]
    return StageLayout(tuple(stages_of_pieces))


def add_squared_cost(total: float, stage_cost: float) -> float:
    return total + stage_cost * stage_cost


def cut_into_stages(cumulative: Costs, stages: int, limit: float, join: JoinCosts) -> tuple[float, list[int]]:
    """The least value of `join` over all cuts into stages of at most `limit`, and the bounds of the first such cut."""
    pieces = len(cumulative) - 1
    best = [math.inf] * (pieces + 1)  # best[j]: the first j pieces on the stages so far
    best[0] = 0.0
    starts_by_stage: list[list[int]] = []
    for stage in range(1, stages + 1):
        last_end = pieces - (stages - stage)  # every later stage needs a piece
        ends = range(stage, last_end + 1)
        best, starts = extend_by_one_stage(best, cumulative, ends, limit, join)
        starts_by_stage.append(starts)

    # The last stage ends with the last piece; each start is the end of the stage before.
    end = pieces
    bounds = [end]
    for starts in reversed(starts_by_stage):
        end = starts[end]
        bounds.append(end)
    bounds.reverse()
    return best[pieces], bounds


def extend_by_one_stage(
    best: Costs, cumulative: Costs, ends: range, limit: float, join: JoinCosts
) -> tuple[list[float], list[int]]:
    """One row of the dynamic program: by end, the least value with one more stage, and the start of that stage. Every
    earlier stage has a piece, so the start is at least `ends[0] - 1`."""
    pieces = len(cumulative) - 1
    values = [math.inf] * (pieces + 1)
    starts = [0] * (pieces + 1)
    first_start = ends[0] - 1
    most = limit * ROUNDING_SLACK
    for end in ends:
        for start in reversed(range(first_start, end)):
            cost = cumulative[end] - cumulative[start]
            if cost > most:
                break  # costs are not negative: an earlier start only adds
            value = join(best[start], cost)
            if value < values[end]:
                values[end] = value
                starts[end] = start
    return values, starts
