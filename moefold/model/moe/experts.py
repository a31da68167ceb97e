"""The routed experts of a layer: two grouped GEMMs with the gated activation between them.

R rows sorted by expert, D width, F inner width, e experts held here.
"""

from __future__ import annotations

import torch

from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.kernels.bind import Kernels
from moefold.layout.declare import Declaring
from moefold.layout.placement import EXPERTS
from moefold.model.steps import Region


class Experts(Declaring):
    def __init__(self, model: ModelConfig, kernels: Kernels):
        super().__init__()
        e, f, d, std = model.moe.experts, model.moe.ffn, model.hidden, model.init_std
        self.gate_up = self.declare("gate_up", e, 2, f, d, placement=EXPERTS, std=std, stacked=True)
        down_std = std / (2 * model.layers) ** 0.5
        self.down = self.declare("down", e, d, f, placement=EXPERTS, std=down_std, stacked=True)
        self.kernels = kernels
        self.activation = Region()

    def forward(self, rows: Rows) -> torch.Tensor:
        """Each row through its expert, times its gate. The gate acts before the second GEMM, which is linear, so that
        the expert's output need not be kept for the gate's gradient."""
        x_RD = self.kernels.gather_rows(rows.source_ND, rows.index_R, rows.slots_NK)
        gate_up_R2F = self.kernels.grouped_gemm(x_RD, self.gate_up.flatten(1, 2), rows.offsets_e).unflatten(-1, (2, -1))
        inner_RF = self.activation(self.kernels.swiglu, gate_up_R2F, rows.gate_R)
        return self.kernels.grouped_gemm(inner_RF, self.down, rows.offsets_e)
