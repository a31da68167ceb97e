"""The routed experts of a layer: two grouped products with the gated activation between them.

R rows sorted by expert, D width of a row (the stream's, or that of a latent), F inner width, e experts held here.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from moefold.anatomy.step_specs import fits_fused_expert_mlp
from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.clamped_swiglu import clamped_swiglu
from moefold.kernels.experts.expert_bias import expert_bias
from moefold.kernels.experts.expert_mlp import ExpertParts, expert_mlp
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import Placement, sharded_over_experts
from moefold.model.steps import Region
from moefold.precision.linear import GroupedLinear

EXPERT_MATRICES = sharded_over_experts(2)


class Experts(DeclaringModule):
    """`self.expert_mlp` computes all of it: a fused kernel, or the composition of `self.parts`."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(world)
        self.declare_weights(model)
        moe = model.moe
        self.kernels = kernels.with_facts(swiglu_experts=fits_fused_expert_mlp(model))
        self.up_product = GroupedLinear(self.kernels, reads_tokens=True)
        self.down_product = GroupedLinear(self.kernels)
        self.adds_bias = world.axis("etp").index == 0  # etp ranks compute summands: one of them adds the bias
        self.activate = kernels[swiglu]
        if moe.activation == "clamped_swiglu":
            self.activate = partial(kernels[clamped_swiglu], limit=moe.clamp)
        self.activation = Region("activation")
        self.parts = ExpertParts(
            gather=kernels[gather_rows],
            up=self.project_up,
            activation=partial(self.activation, self.activate),
            down=self.project_down,
            weight_inside=moe.gate == "activation",
        )
        self.bind_fused_kernel()

    def declare_weights(self, model: ModelConfig) -> None:
        moe = model.moe
        std = model.init_std
        e = moe.experts
        f = moe.ffn
        d = moe.latent or model.hidden
        down_std = std / (2 * model.layers) ** 0.5
        declare_matrices = partial(self.declare_parameter, placement=EXPERT_MATRICES, stacked=True)
        self.gate_up = declare_matrices("gate_up", e, 2, f, d, std=std)
        self.down = declare_matrices("down", e, d, f, std=down_std)
        self.gate_up_bias = self.down_bias = None
        if moe.biases:
            over_ep = Placement("expert", ((0, "ep"),))
            self.gate_up_bias = self.declare_parameter("gate_up_bias", e, 2, f, placement=EXPERT_MATRICES, std=0.0)
            self.down_bias = self.declare_parameter("down_bias", e, d, placement=over_ep, std=0.0)

    def forward(self, rows: Rows) -> Tensor:
        """Each row through its expert, times the router's weight."""
        order = rows.order
        floats = (rows.source_ND, self.gate_up, self.down, order.weight_R)
        routing = (order.index_R, order.slots_NK, order.ends_e, order.holes)
        return self.expert_mlp(*floats, *routing, self.parts)

    def bind_fused_kernel(self) -> None:
        """Choose the kernel for the recipe of both products. Where the two differ, no fused kernel fits. `fused`:
        whether one kernel runs all of it, so that there is no activation to keep or rebuild by itself."""
        up = self.up_product.recipe
        down = self.down_product.recipe
        self.recipe_name = up.name if up.name == down.name else "mixed"
        kernels = self.kernels.with_facts(recipe=self.recipe_name)
        self.expert_mlp = kernels[expert_mlp]
        self.fused = kernels.implementation_name(expert_mlp) != "reference"

    def project_up(self, x_RD: Tensor, gate_up_e2FD: Tensor, ends_e: Tensor) -> Tensor:
        h_R2F = self.up_product(x_RD, gate_up_e2FD, ends_e)
        if self.gate_up_bias is None:
            return h_R2F
        bias_eN = self.gate_up_bias.flatten(1)
        biased_RN = self.kernels[expert_bias](h_R2F.flatten(1), bias_eN, ends_e)
        return biased_RN.view_as(h_R2F)

    def project_down(self, a_RF: Tensor, down_eDF: Tensor, ends_e: Tensor, inside_R: Tensor | None) -> Tensor:
        """`inside_R`: the router's weights that the rows were multiplied by already; the bias is, too."""
        y_RD = self.down_product(a_RF, down_eDF, ends_e)
        if self.down_bias is None:
            return y_RD
        bias_eD = self.down_bias * self.adds_bias
        return self.kernels[expert_bias](y_RD, bias_eD, ends_e, inside_R)
