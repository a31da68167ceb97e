"""Bytes that a rank sends in a step of one microbatch, by axis: tokens of tp collectives, keys and values of context
parallelism, rows of experts. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from moefold.anatomy.step_specs import StepSpec, dispatched_width
from moefold.dispatch.catalog import expected_distinct
from moefold.plan.layer.rank_shapes import RankShapes

FP8_ROW_BYTES = 1 + 4 / 128  # an fp8 element and its share of the block's fp32 scale
FP32_BYTES = 4

SentElements = tuple[str, str, float]  # axis, what, elements


@dataclass(frozen=True)
class AxisTraffic:
    """Bytes sent by one rank over an axis in forward and in backward, with ring collectives."""

    step: str
    axis: str
    what: str
    forward: float
    backward: float


def step_bytes_sent(spec: StepSpec, s: RankShapes) -> list[AxisTraffic]:
    """Bytes sent by one rank in a step. The backward of an all-gather is a reduce-scatter of as many bytes, and the
    reverse."""
    step = spec.name
    traffic = tensor_parallel_bytes(step, s)
    if step == "attend" and s.portion.cp > 1:
        traffic += context_parallel_bytes(step, s)
    if step in ("dispatch", "combine"):
        traffic += expert_parallel_bytes(step, s)
    return traffic


def tensor_parallel_bytes(step: str, s: RankShapes) -> list[AxisTraffic]:
    """Bytes of tensor parallelism: all-gathers before column-sharded weights, reduce-scatters after row-sharded."""
    wide = s.recipe.wide
    other_ranks = s.portion.tp - 1
    stream = s.T * s.D * wide * other_ranks
    sent: list[tuple[str, float]] = []
    if step in ("embed", "look_ahead"):
        sent.append(("sum of embeddings", stream))
    if step in ("mlp", "shared") or (step == "attend" and not s.mla):
        sent.append(("gather", stream))
    if step == "predict":
        streams = 1 + s.model.mtp
        sent.append(("gather", stream * streams))
    if step == "attend" and s.mla:
        query_source = s.q_rank or s.D
        latents = query_source + s.kv_rank + s.rope
        gathered = s.T * latents * wide * other_ranks
        sent.append(("gather", gathered))
    if step in ("attend", "mlp", "shared"):
        sent.append(("sum", stream))
    traffic: list[AxisTraffic] = []
    for what, size in sent:
        if size:
            sent_both_ways = AxisTraffic(step, "tp", what, size, size)
            traffic.append(sent_both_ways)
    return traffic


def context_parallel_bytes(step: str, s: RankShapes) -> list[AxisTraffic]:
    """Bytes of context parallelism. The backward of an all-gather of keys is a reduce-scatter of their gradients."""
    cp = s.portion.cp
    context = s.portion.context
    if context == "all_gather":
        gathered = key_bytes(s) * (cp - 1)
        return [AxisTraffic(step, "cp", context, gathered, gathered)]
    if context == "ring":
        return [AxisTraffic(step, "cp", context, *ring_bytes(s, cp))]
    if context == "all_to_all":
        exchanged = swapped_bytes(s)
        return [AxisTraffic(step, "cp", context, exchanged, exchanged)]

    # An all-to-all of heads inside a node, a ring of keys between nodes.
    traffic: list[AxisTraffic] = []
    inside = s.ranks_swapping_heads
    if inside > 1:
        exchanged = swapped_bytes(s)
        traffic.append(AxisTraffic(step, "cp inside", "heads", exchanged, exchanged))
    if cp > inside:
        traffic.append(AxisTraffic(step, "cp nodes", "ring", *ring_bytes(s, cp / inside)))
    return traffic


def key_bytes(s: RankShapes) -> float:
    """Bytes of the keys and values of this rank's positions, as they are sent."""
    elements = s.C * s.G * s.kv_copies * (s.Q + s.V)
    return elements * s.recipe.wide


def swapped_bytes(s: RankShapes) -> float:
    """Bytes of the all-to-alls that swap positions for heads and back, the same in forward and backward."""
    ranks = s.ranks_swapping_heads
    results_and_queries = s.C * s.H * (s.Q + s.V) * s.recipe.wide
    whole = results_and_queries + key_bytes(s)
    return whole * (ranks - 1) / ranks


def ring_bytes(s: RankShapes, places: float) -> tuple[float, float]:
    """Bytes of a ring of so many places, forward and backward: backward sends keys and values again, with their fp32
    gradients."""
    sent = key_bytes(s)
    forward = sent * (places - 1)
    gradients = sent / s.recipe.wide * FP32_BYTES * places
    return forward, forward + gradients


def expert_parallel_bytes(step: str, s: RankShapes) -> list[AxisTraffic]:
    """Bytes of a dispatch or a combine, by dispatcher. Backward sends the gradients of the same rows in reverse."""
    wide = s.recipe.wide
    forward_bytes = wide
    if step == "dispatch" and s.choices.travel == "fp8":
        forward_bytes = FP8_ROW_BYTES
    traffic: list[AxisTraffic] = []
    for axis, what, elements in expert_parallel_elements(s):
        forward = elements * forward_bytes
        backward = elements * wide
        sent = AxisTraffic(step, axis, what, forward, backward)
        traffic.append(sent)
    return traffic


def expert_parallel_elements(s: RankShapes) -> list[SentElements]:
    """Elements sent in one dispatch or one combine."""
    p = s.portion
    expert_ranks = p.ep * p.etp
    token = s.T * dispatched_width(s.model)
    if expert_ranks == 1:
        return []
    if p.dispatcher == "all_gather":
        gathered = token * (expert_ranks - 1)
        return [("ep", "all_gather", gathered)]

    # Over ep, one copy of a token for each choice or for each distinct rank; then an all-gather over etp.
    sent: list[SentElements] = []
    experts_per_node = max(1, s.choices.node // p.etp)
    inside = min(p.ep, experts_per_node)
    nodes = p.ep / inside
    copies = s.K
    if p.dispatcher != "all_to_all":
        copies = expected_distinct(s.K, p.ep)
    if p.dispatcher == "hierarchical" and nodes > 1:
        node_copies = expected_distinct(s.K, nodes)
        between_nodes = token * node_copies * (nodes - 1) / nodes
        inside_node = token * copies * (inside - 1) / inside
        sent.append(("ep nodes", "hierarchical", between_nodes))
        sent.append(("ep inside", "hierarchical", inside_node))
    elif p.ep > 1:
        other_ranks = p.ep - 1
        to_ranks = token * copies * other_ranks / p.ep
        sent.append(("ep", p.dispatcher, to_ranks))
    if p.etp > 1:
        arrived = copies if p.ep > 1 else 1
        gathered = token * arrived * (p.etp - 1)
        sent.append(("etp", "all_gather", gathered))
    return sent
