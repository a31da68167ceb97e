"""Where to cut a model into stages when the user does not say: the cut whose slowest stage is fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from moefold.schedule.schedule_error import ScheduleError
from moefold.schedule.stage_layout import StageLayout


def model_pieces(layers: int, dense_layers: int = 0, mtp_layers: int = 0) -> str:
    """The pieces of a model in order: `pieces_of(4, 1, 1)` is "EdtttmL"."""
    return "E" + "d" * dense_layers + "t" * (layers - dense_layers) + "m" * mtp_layers + "L"


def propose_layout(pieces: str, costs: Sequence[float], stages: int) -> StageLayout:
    """Cut `pieces`, each with its cost, into `stages` runs: least slowest stage first, then least sum of squares.

    Exact, by dynamic programming over where the last stage begins: the best way to put the first j pieces on s stages
    is the best way to put the first i on s - 1, for some i < j, and pieces i to j on stage s. The slowest stage is
    settled first; then it only bounds the stages, since the two aims together would not be a sum over stages.
    """
    if len(pieces) < stages:
        raise ScheduleError(f"{stages} stages are more than the model has pieces, {len(pieces)}; lower pp or vpp")
    upto = [0.0, *accumulate(costs)]
    slowest, _ = cut_into_stages(upto, stages, math.inf, lambda so_far, stage: max(so_far, stage))
    _, bounds = cut_into_stages(upto, stages, slowest, lambda so_far, stage: so_far + stage * stage)
    return StageLayout(tuple(pieces[a:b] for a, b in pairwise(bounds)))


def cut_into_stages(
    upto: Sequence[float], stages: int, most: float, join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The least value of `join` over all cuts into stages of at most `most`, and the bounds of the first such cut."""
    pieces = len(upto) - 1
    best = [0.0] + [math.inf] * pieces  # best[j]: the first j pieces on the stages so far
    begins: list[list[int]] = []
    for stage in range(1, stages + 1):
        now, begin = [math.inf] * (pieces + 1), [0] * (pieces + 1)
        for j in range(stage, pieces - (stages - stage) + 1):
            for i in range(j - 1, stage - 2, -1):
                cost = upto[j] - upto[i]
                if cost > most * (1 + 1e-12):
                    break  # costs are not negative: an earlier beginning only adds
                value = join(best[i], cost)
                if value < now[j]:
                    now[j], begin[j] = value, i
        best = now
        begins.append(begin)
    bounds = [pieces]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return best[pieces], bounds[::-1]
