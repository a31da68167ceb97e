"""The second table of `moefold bench dispatch`: an MoE layer's experts, forward and backward, spread over ranks by the
symmetric dispatcher, beside one rank that has as many rows and experts as each of them.

One process plays the ranks, one behind the other. What travels moves at the speed of the device's memory, and time is
that of kernels: plan, dispatch, experts and combine, and their gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from moefold.bench.clock import busy_milliseconds
from moefold.bench.options import DispatchOptions
from moefold.bench.played_layer import LAYER_SIZES, DispatchCase, PlayedLayer, draw_expert_weights, measure_phase
from moefold.bench.report import Row, add_number_columns, report_table
from moefold.dispatch.base import Dispatcher, Routing, RowPolicy
from moefold.dispatch.expert_placement import contiguous_placement
from moefold.dispatch.local import LocalDispatcher
from moefold.dispatch.tiled_experts import ExpertWeights
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_mlp import expert_mlp

FFN_OF_HIDDEN = dict(LAYER_SIZES.values())  # others have a quarter of their width
MOST_OVER_LOCAL = 1.15

Gradients = tuple[Tensor, ...]


class LayerPass(NamedTuple):
    """What a layer gives: its result, and gradients of tokens, router weights, gate and up, and down."""

    y_TD: Tensor
    gradients: Gradients


class SpreadLayer:
    """The experts of a layer on all ranks."""

    def __init__(self, layer: PlayedLayer, ffn: int):
        self.layer = layer
        self.kernels = layer.kernels.with_facts(ffn=ffn)
        ranks = range(layer.case.ranks)
        self.weights = [draw_expert_weights(layer, ffn, rank) for rank in ranks]

    def run(self, rank: int) -> LayerPass:
        dispatcher = self.layer.dispatchers[rank]
        return run_layer(dispatcher, self.layer.h_TD, self.layer.routings[rank], self.weights[rank], self.kernels)


def run_layer(
    dispatcher: Dispatcher,
    h_TD: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    kernels: BoundKernels,
) -> LayerPass:
    """Forward and backward, with ones as the gradient of the result. Backward runs on the rank's thread, in turns."""
    weights_TK, ids_TK = routing
    inputs = [x.detach().requires_grad_() for x in (h_TD, weights_TK, *weights)]
    tokens, scores, gate_up, down = inputs
    receipt = dispatcher.plan(Routing(scores, ids_TK))
    rows = dispatcher.dispatch(tokens, receipt)
    order = rows.order
    places = (order.weight_R, order.index_R, order.slots_NK, order.ends_e, order.holes)
    y_RD = kernels[expert_mlp](rows.source_ND, gate_up, down, *places)
    y_TD = dispatcher.combine(y_RD, receipt)
    with torch.autograd.set_multithreading_enabled(False):
        gradients = torch.autograd.grad(y_TD, inputs, torch.ones_like(y_TD))
    return LayerPass(y_TD.detach(), gradients)


def layer_row(options: DispatchOptions, ranks: int, hidden: int, device: str) -> Row:
    """Milliseconds of a rank of several, and of one rank with as many rows and experts. All experts are liked alike."""
    case = DispatchCase(ranks, hidden, zipf=0.0)
    ffn = FFN_OF_HIDDEN.get(hidden, hidden // 4)
    layer = PlayedLayer(options, case, device)
    spread = SpreadLayer(layer, ffn)
    milliseconds = measure_phase(layer, spread.run, options.repeat).seconds * 1e3
    local = local_milliseconds(options, spread)
    row: Row = {"ranks": ranks, "hidden": hidden, "ffn": ffn}
    row["layer_ms"] = milliseconds
    row["local_ms"] = local
    row["over_local"] = milliseconds / local
    return row


def local_milliseconds(options: DispatchOptions, spread: SpreadLayer) -> float:
    layer = spread.layer
    weights = spread.weights[0]
    held = len(weights.gate_up_E2FD)
    policy = RowPolicy(contiguous_placement(held, 1))
    dispatcher = LocalDispatcher(policy, spread.kernels)
    random = torch.Generator().manual_seed(0)
    liking_TE = torch.ones(options.tokens, held)
    ids_TK = torch.multinomial(liking_TE, options.top_k, generator=random).to(layer.device)
    routing = Routing(layer.routings[0].weights_TK, ids_TK)

    def run_alone() -> LayerPass:
        return run_layer(dispatcher, layer.h_TD, routing, weights, spread.kernels)

    run_alone()
    return busy_milliseconds(run_alone, layer.device, options.repeat)


def layer_table(rows: list[Row]) -> Table:
    title = f"A layer's experts, forward and backward; at most {MOST_OVER_LOCAL} of the same rows on one rank"
    table = report_table(title, "ranks", caption="ms of kernels of a rank")
    add_number_columns(table, "hidden", "ffn", "spread", "one rank", "ratio")
    for row in rows:
        sizes = (str(row["hidden"]), str(row["ffn"]))
        times = (f"{row['layer_ms']:.3f}", f"{row['local_ms']:.3f}", f"{row['over_local']:.2f}")
        table.add_row(str(row["ranks"]), *sizes, *times)
    return table
