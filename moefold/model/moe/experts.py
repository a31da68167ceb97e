"""The routed experts of a layer: two grouped GEMMs with the gated activation between them.

R rows sorted by expert, D width of a row (the stream's, or that of a latent), F inner width, e experts held here.
"""

from __future__ import annotations

from functools import partial

import torch

from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.kernels.bind import Kernels
from moefold.kernels.expert_mlp import expert_mlp
from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.layout.placement import Placement, over_experts
from moefold.model.steps import Region


class Experts(Declaring):
    def __init__(self, model: ModelConfig, kernels: Kernels, world: World):
        super().__init__(world)
        moe, std = model.moe, model.init_std
        e, f, d = moe.experts, moe.ffn, moe.latent or model.hidden
        self.gate_up = self.declare("gate_up", e, 2, f, d, placement=over_experts(2), std=std, stacked=True)
        down_std = std / (2 * model.layers) ** 0.5
        self.down = self.declare("down", e, d, f, placement=over_experts(2), std=down_std, stacked=True)
        self.gate_up_bias = self.down_bias = None
        if moe.biases:
            self.gate_up_bias = self.declare("gate_up_bias", e, 2, f, placement=over_experts(2), std=0.0)
            self.down_bias = self.declare("down_bias", e, d, placement=Placement("expert", ((0, "ep"),)), std=0.0)
        self.adds_bias = world.axis("etp").index == 0  # the ranks of etp give summands: one of them has the bias
        self.kernels, self.gate_inside = kernels, moe.gate == "activation"
        clamped = partial(kernels.clamped_swiglu, limit=moe.clamp)
        self.act = clamped if moe.activation == "clamped_swiglu" else kernels.swiglu
        standard = moe.activation == "swiglu" and not moe.biases and self.gate_inside
        self.whole = standard and kernels.expert_mlp is not expert_mlp.reference
        self.activation = Region()

    def forward(self, rows: Rows) -> torch.Tensor:
        """Each row through its expert, times its gate. Acting before the second GEMM, which is linear, the gate saves
        keeping the expert's output for its gradient; acting behind it, it keeps low-precision GEMMs more accurate."""
        order = rows.order
        if self.whole:
            return self.kernels.expert_mlp(
                rows.source_ND,
                self.gate_up,
                self.down,
                order.gate_R,
                order.index_R,
                order.slots_NK,
                order.offsets_e,
                order.holes,
            )
        x_RD = self.kernels.gather_rows(rows.source_ND, order.index_R, order.slots_NK, order.holes)
        gate_up = self.kernels.grouped_gemm(x_RD, self.gate_up.flatten(1, 2), order.offsets_e)
        if self.gate_up_bias is not None:
            gate_up = self.kernels.expert_bias(gate_up, self.gate_up_bias.flatten(1), order.offsets_e)
        inside = order.gate_R if self.gate_inside else None
        inner_RF = self.activation(self.act, gate_up.unflatten(-1, (2, -1)), inside)
        y_RD = self.kernels.grouped_gemm(inner_RF, self.down, order.offsets_e)
        if self.down_bias is not None:
            y_RD = self.kernels.expert_bias(y_RD, self.down_bias * self.adds_bias, order.offsets_e, inside)
        return y_RD if self.gate_inside else y_RD * order.gate_R[:, None].to(y_RD.dtype)
