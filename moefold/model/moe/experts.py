"""The routed experts of a layer: two grouped GEMMs with the gated activation between them.

R rows sorted by expert, D width, F inner width, e experts held here.
"""

from __future__ import annotations

import torch

from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.kernels.bind import Kernels
from moefold.kernels.expert_mlp import expert_mlp
from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.layout.placement import over_experts
from moefold.model.steps import Region


class Experts(Declaring):
    def __init__(self, model: ModelConfig, kernels: Kernels, world: World):
        super().__init__(world)
        e, f, d, std = model.moe.experts, model.moe.ffn, model.hidden, model.init_std
        self.gate_up = self.declare("gate_up", e, 2, f, d, placement=over_experts(2), std=std, stacked=True)
        down_std = std / (2 * model.layers) ** 0.5
        self.down = self.declare("down", e, d, f, placement=over_experts(2), std=down_std, stacked=True)
        self.kernels, self.gate_inside = kernels, model.moe.gate == "activation"
        self.whole = self.gate_inside and kernels.expert_mlp is not expert_mlp.reference
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
        gate_up_R2F = self.kernels.grouped_gemm(x_RD, self.gate_up.flatten(1, 2), order.offsets_e).unflatten(
            -1, (2, -1)
        )
        inside = order.gate_R if self.gate_inside else None
        inner_RF = self.activation(self.kernels.swiglu, gate_up_R2F, inside)
        y_RD = self.kernels.grouped_gemm(inner_RF, self.down, order.offsets_e)
        return y_RD if self.gate_inside else y_RD * order.gate_R[:, None].to(y_RD.dtype)
