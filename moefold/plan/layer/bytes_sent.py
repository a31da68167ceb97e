"""What leaves a rank in a step of one microbatch, by axis: tokens that are gathered, keys that meet other queries, rows
that go to experts. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.anatomy.step_specs import StepSpec, dispatched_width
from moefold.dispatch.catalog import expected_distinct
from moefold.plan.layer.rank_shapes import RankShapes


@dataclass(frozen=True)
class AxisTraffic:
    """Bytes that leave this rank over an axis, as a ring would send them, in forward and in backward."""

    step: str
    axis: str
    what: str
    forward: float
    backward: float


def step_bytes_sent(spec: StepSpec, s: RankShapes) -> list[AxisTraffic]:
    """Bytes that leave this rank. A gather's backward is a sum over ranks of as many bytes, and the reverse."""
    p, wide = s.portion, s.choices.recipe.wide
    found: list[AxisTraffic] = []

    def add_both_ways(axis: str, what: str, size: float, backward: float | None = None) -> None:
        if size:
            found.append(AxisTraffic(spec.name, axis, what, size, size if backward is None else backward))

    stream = s.T * s.D * wide * (p.tp - 1)
    if spec.name in ("embed", "look_ahead"):
        add_both_ways("tp", "sum of words", stream)
    if spec.name in ("mlp", "shared") or (spec.name == "attend" and not s.mla):
        add_both_ways("tp", "gather", stream)
    if spec.name == "predict":
        add_both_ways("tp", "gather", stream * (1 + s.model.mtp))
    if spec.name == "attend" and s.mla:
        add_both_ways("tp", "gather", s.T * ((s.q_rank or s.D) + s.kv_rank + s.rope) * wide * (p.tp - 1))
    if spec.name in ("attend", "mlp", "shared"):
        add_both_ways("tp", "sum", stream)
    if spec.name == "attend" and p.cp > 1:
        found += [AxisTraffic(spec.name, "cp", p.context, *context_parallel_bytes(s))]
    if spec.name in ("dispatch", "combine"):
        found += expert_parallel_bytes(spec.name, s)
    return found


def context_parallel_bytes(s: RankShapes) -> tuple[float, float]:
    """Context parallelism, forward and backward. Gathered keys' gradients are summed back; a ring sends keys and
    values round once more and their fp32 gradients with them; swapping heads is the same both ways."""
    p, wide = s.portion, s.choices.recipe.wide
    keys = s.C * s.G * (s.Q + s.V)
    if p.context == "all_gather":
        return keys * wide * (p.cp - 1), keys * wide * (p.cp - 1)
    if p.context == "ring":
        return keys * wide * (p.cp - 1), keys * (wide * (p.cp - 1) + 4 * p.cp)
    inside = p.cp if p.context == "all_to_all" else min(p.cp, s.choices.node)
    swapped = s.C * (s.H * (s.Q + s.V) + s.G * (s.Q + s.V)) * wide * (inside - 1) / inside
    nodes = p.cp / inside
    return swapped + keys * wide * (nodes - 1), swapped + keys * (wide * (nodes - 1) + (4 * nodes if nodes > 1 else 0))


def expert_parallel_bytes(step: str, s: RankShapes) -> list[AxisTraffic]:
    """Tokens to experts or back, by dispatcher. Backward sends gradients of the same rows the other way."""
    p, wide = s.portion, s.choices.recipe.wide
    there = (1 + 4 / 128 if s.choices.travel == "fp8" else wide) if step == "dispatch" else wide
    token = s.T * dispatched_width(s.model)
    found: list[tuple[str, str, float]] = []
    if p.ep * p.etp > 1 and p.dispatcher == "all_gather":
        found.append(("ep", "all_gather", token * (p.ep * p.etp - 1)))
    elif p.ep * p.etp > 1:
        inside = min(p.ep, max(1, s.choices.node // p.etp))
        nodes = p.ep / inside
        copies = s.K if p.dispatcher == "all_to_all" else expected_distinct(s.K, p.ep)
        if p.dispatcher == "hierarchical" and nodes > 1:
            found.append(("ep nodes", "hierarchical", token * expected_distinct(s.K, nodes) * (nodes - 1) / nodes))
            found.append(("ep inside", "hierarchical", token * copies * (inside - 1) / inside))
        elif p.ep > 1:
            found.append(("ep", p.dispatcher, token * copies * (p.ep - 1) / p.ep))
        if p.etp > 1:
            found.append(("etp", "to everyone", token * (copies if p.ep > 1 else 1) * (p.etp - 1)))
    return [AxisTraffic(step, axis, what, size * there, size * wide) for axis, what, size in found]
