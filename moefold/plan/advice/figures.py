"""Figures of a layout as sentences: R and eq. 10 of MegaScale-MoE, CUDA graphs, and ring attention where
no kernel runs it."""

from __future__ import annotations

from collections.abc import Iterator

from moefold.plan.advice.ratios import (
    between_over_inside,
    crosses_domain,
    expert_ranks,
    graph_count,
    has_experts,
    plan_compute_over_travel,
)
from moefold.plan.advice.sentences import Advice, propose
from moefold.plan.advice.situation import Change, Situation
from moefold.plan.layer.ring_blocks import builds_ring_scores
from moefold.plan.memory.peak_memory import GIB

TRAINER_GRAPHS = {  # by `graphs`: those of moefold, which captures no single layers
    "static": "CUDA graphs of this layout: 3 for each captured run of steps, of each layer and microbatch in flight",
    "whole": "one CUDA graph, of the whole step",
}


def expert_ratio(plan: Situation) -> Iterator[Advice]:
    """R of eq. 5 to 9."""
    s, gpu = plan.setting, plan.gpu
    if not has_experts(s) or expert_ranks(s) == 1:
        return
    inside = plan_compute_over_travel(s, gpu, gpu.inside)
    if not crosses_domain(s, gpu):
        yield Advice("communication", describe_ratio(inside, "NVLink"), "eq. 8")
        return
    between = plan_compute_over_travel(s, gpu, gpu.network)
    text = f"{describe_ratio(between, 'the network')}; inside a domain R would be {inside:.2f}"
    yield Advice("communication", text, "eq. 8")


def describe_ratio(ratio: float, links: str) -> str:
    if ratio >= 1:
        return f"R = {ratio:.2f}: experts compute {ratio:.1f} times as long as their tokens travel over {links}"
    longer = 1 / ratio
    travel = f"tokens travel {longer:.1f} times as long over {links} as experts compute"
    return f"R = {ratio:.2f}: {travel}, more than their compute can hide"


def replicated_attention(plan: Situation) -> Iterator[Advice]:
    """Eq. 10, for weights that the ranks of a sequence hold in copies."""
    s = plan.setting
    gpu = plan.gpu
    p = s.parallel
    replicas = s.degrees["dp"]
    if p.cp == 1 or replicas == 1:
        return
    if p.cp * p.tp > gpu.domain or s.world <= gpu.domain:
        return
    ratio = between_over_inside(gpu.inside, gpu.network, p.cp, replicas)
    cost = "hides behind the network" if ratio >= 1 else f"takes {1 / ratio:.1f} times as long as the network"
    text = f"attention weights are held {p.cp} times in a node; synchronising them there {cost} (ratio {ratio:.2f})"
    yield Advice("communication", text, "eq. 10")


def graphs_needed(plan: Situation) -> Iterator[Advice]:
    s = plan.setting
    choices = s.choices
    factors = "layers x 2"
    if s.parallel.pp > 1:
        factors = f"layers x {s.microbatches} microbatches x 2"
    graphs = graph_count(s)
    count = f"{graphs:,} on a rank ({factors})"
    text = f"CUDA graphs of single layers would be {count}"
    if choices.graphs != "none":
        text = f"CUDA graphs of this layout: {count}"
    if choices.stack == "moefold":
        text = TRAINER_GRAPHS.get(choices.graphs, text)
    yield Advice("host", text, "section 4.3.6")


def plain_ring(plan: Situation) -> Iterator[Advice]:
    shapes = plan.setting.layer_shapes(0)
    if plan.choices.stack != "moefold" or not builds_ring_scores(shapes):
        return
    working = plan.fullest.working / GIB
    text = f"no kernel runs ring attention here: blocks of scores in fp32 are most of {working:.1f} GiB of temporaries"
    change: Change = {"parallel.context": "all_gather"}
    other = plan.changed(change)
    if other:
        saved = plan.gib - other.gib
        text += f"; {propose(change, f'{saved:.1f} GiB less')}"
    yield Advice("memory", text, "this trainer")
