"""Ratios and counts of a layout in closed form: compute over travel of experts, synchronisation between nodes over
inside them, and the number of CUDA graphs."""

from __future__ import annotations

from moefold.anatomy.activations import expert_kind
from moefold.anatomy.step_specs import is_moe_layer
from moefold.plan.machine.gpu import Gpu
from moefold.plan.memory.peak_memory import RunSetting, layer_count
from moefold.plan.memory.rank_stages import stages_by_rank

PASSES = 2  # a graph of forward and one of backward


def expert_ranks(s: RunSetting) -> int:
    """Ranks that hold one copy of a layer's experts together."""
    return s.parallel.ep * s.parallel.etp


def crosses_domain(s: RunSetting, gpu: Gpu) -> bool:
    return expert_ranks(s) > gpu.domain


def compute_over_travel(
    ffn: float, bandwidth: float, peak: float, ranks: int, sent: float = 4.0, gemms: int = 3
) -> float:
    """R of MegaScale-MoE, eq. 5 to 9: seconds of the experts' FLOPs at the peak over seconds of their tokens' bytes.

    Compute: 3 GEMMs x 2 FLOP x k tokens x h x ffn / n, over the peak; 2 GEMMs where experts have no gate. Travel: k
    tokens x h x (n - 1) / n / n, times the bytes that an element takes there and back (`sent`), over the bandwidth.
    Experts, top-k, h and the number of tokens cancel. With bf16 both ways, `sent` is 4 and
    R = 3/2 x ffn x bandwidth / peak x n / (n - 1), as in eq. 8; other bytes or peaks need no other formula. Overlap can
    hide the travel where R is above 1.
    """
    flops = 2.0 * gemms * ffn
    away = (ranks - 1) / ranks
    computing = flops / peak
    travelling = sent * away / bandwidth
    return computing / travelling


def plan_compute_over_travel(s: RunSetting, gpu: Gpu, bandwidth: float) -> float:
    """R of a plan: an etp rank has its share of an expert's width."""
    wide = s.recipe.wide
    dispatched = wide
    if s.choices.travel == "fp8":
        dispatched = 1.0
    sent = dispatched + wide
    ffn = s.model.moe.ffn / s.parallel.etp
    peak = gpu.peak_flops(s.product_precision)
    ranks = expert_ranks(s)
    gemms = expert_kind(s.model).parts + 1
    return compute_over_travel(ffn, bandwidth, peak, ranks, sent, gemms)


def between_over_inside(inside: float, between: float, copies: int, replicas: int) -> float:
    """Eq. 10 of MegaScale-MoE: seconds of synchronising replicated attention weights between nodes, over those inside a
    node. `copies` (n) of a weight are in a node, `replicas` (d) on as many nodes.

    Between nodes each rank sends 2 P / n x (d - 1) / d bytes, inside 2 P x (n - 1) / n. Above 1, the part inside a
    node hides behind the part between nodes, so that replication costs memory and no time.
    """
    outer_bytes = (replicas - 1) / replicas / copies
    inner_bytes = (copies - 1) / copies
    outer_seconds = outer_bytes / between
    inner_seconds = inner_bytes / inside
    return outer_seconds / inner_seconds


def graph_count(s: RunSetting) -> int:
    """CUDA graphs of the rank with the most layers (Megatron-Core MoE report, section 4.3.6): layers x microbatches x 2
    with a pipeline, where the forward of a later microbatch runs before the backward of an earlier one and would
    overwrite its saved tensors; layers x 2 without, where all microbatches share their graphs. Static graphs leave out
    the experts, but a layer still has one graph a pass."""
    layers = 0
    for rank in stages_by_rank(s.config):
        held = sum(layer_count(pieces) for pieces in rank.pieces)
        layers = max(layers, held)
    graphs = layers * PASSES
    if s.parallel.pp > 1:
        graphs *= s.microbatches
    return graphs


def has_experts(s: RunSetting) -> bool:
    model = s.model
    layers = range(model.layers)
    return any(is_moe_layer(model, layer) for layer in layers)
