"""The routed experts of a layer: two grouped GEMMs with the gated activation between them.

R rows sorted by expert, D width of a row (the stream's, or that of a latent), F inner width, e experts held here.
"""

from __future__ import annotations

from functools import partial

import torch

from moefold.anatomy.step_specs import fits_fused_expert_mlp
from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.clamped_swiglu import clamped_swiglu
from moefold.kernels.experts.expert_bias import expert_bias
from moefold.kernels.experts.expert_mlp import expert_mlp
from moefold.kernels.experts.grouped_gemm import grouped_gemm
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.routing.gather_rows import gather_rows
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import Placement, sharded_over_experts
from moefold.model.steps import Region


class Experts(DeclaringModule):
    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(world)
        moe, std = model.moe, model.init_std
        e, f, d = moe.experts, moe.ffn, moe.latent or model.hidden
        self.gate_up = self.declare_parameter(
            "gate_up", e, 2, f, d, placement=sharded_over_experts(2), std=std, stacked=True
        )
        down_std = std / (2 * model.layers) ** 0.5
        self.down = self.declare_parameter(
            "down", e, d, f, placement=sharded_over_experts(2), std=down_std, stacked=True
        )
        self.gate_up_bias = self.down_bias = None
        if moe.biases:
            self.gate_up_bias = self.declare_parameter(
                "gate_up_bias", e, 2, f, placement=sharded_over_experts(2), std=0.0
            )
            self.down_bias = self.declare_parameter(
                "down_bias", e, d, placement=Placement("expert", ((0, "ep"),)), std=0.0
            )
        self.adds_bias = world.axis("etp").index == 0  # the ranks of etp give summands: one of them has the bias
        self.kernels, self.gate_inside = kernels, moe.gate == "activation"
        clamped = partial(kernels[clamped_swiglu], limit=moe.clamp)
        self.act = clamped if moe.activation == "clamped_swiglu" else kernels[swiglu]
        self.whole = fits_fused_expert_mlp(model) and kernels[expert_mlp] is not expert_mlp.reference
        if not self.whole:
            self.activation = Region("activation")

    def forward(self, rows: Rows) -> torch.Tensor:
        """Each row through its expert, times its gate. Acting before the second GEMM, which is linear, the gate saves
        keeping the expert's output for its gradient; acting behind it, it keeps low-precision GEMMs more accurate."""
        order = rows.order
        if self.whole:
            return self.kernels[expert_mlp](
                rows.source_ND,
                self.gate_up,
                self.down,
                order.weight_R,
                order.index_R,
                order.slots_NK,
                order.ends_e,
                order.holes,
            )
        x_RD = self.kernels[gather_rows](rows.source_ND, order.index_R, order.slots_NK, order.holes)
        gate_up = self.kernels[grouped_gemm](x_RD, self.gate_up.flatten(1, 2), order.ends_e)
        if self.gate_up_bias is not None:
            gate_up = self.kernels[expert_bias](gate_up, self.gate_up_bias.flatten(1), order.ends_e)
        inside = order.weight_R if self.gate_inside else None
        inner_RF = self.activation(self.act, gate_up.unflatten(-1, (2, -1)), inside)
        y_RD = self.kernels[grouped_gemm](inner_RF, self.down, order.ends_e)
        if self.down_bias is not None:
            y_RD = self.kernels[expert_bias](y_RD, self.down_bias * self.adds_bias, order.ends_e, inside)
        return y_RD if self.gate_inside else y_RD * order.weight_R[:, None].to(y_RD.dtype)
