"""The routed experts of a layer: two grouped products with the activation between them.

R rows sorted by expert, D width of a row (the stream's, or that of a latent), F inner width, e experts held here. The
first weight and its product have gate and up (e2FD, R2F), or without a gate up alone (eFD, RF).
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from moefold.anatomy.activations import expert_kind
from moefold.anatomy.step_specs import unfused_experts_reason
from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.clamped_swiglu import clamped_swiglu
from moefold.kernels.experts.expert_bias import expert_bias
from moefold.kernels.experts.expert_mlp import ExpertParts, expert_mlp
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import Placement, sharded_over_experts
from moefold.layout.token_numbers import computing_tokens
from moefold.model.mlp import Activate, bind_activation
from moefold.model.steps import Region
from moefold.precision.linear import GroupedLinear, PlacedWeight


def bind_expert_activation(model: ModelConfig, kernels: BoundKernels) -> Activate:
    moe = model.moe
    if moe.activation == "clamped_swiglu":
        return partial(kernels[clamped_swiglu], limit=moe.clamp)
    return bind_activation(moe.activation, kernels)


class Experts(DeclaringModule):
    """`self.expert_mlp` computes all of it: a fused kernel, or the composition of `self.parts`."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(world)
        self.declare_weights(model)
        moe = model.moe
        self.kernels = kernels.with_facts(unfused_experts=unfused_experts_reason(model))
        up_weight = PlacedWeight(self.declared[self.up_name], world)
        down_weight = PlacedWeight(self.declared["down"], world)
        self.up_product = GroupedLinear(self.kernels, reads_tokens=True, placed_weight=up_weight)
        self.down_product = GroupedLinear(self.kernels, placed_weight=down_weight)
        self.adds_bias = world.axis("etp").index == 0  # etp ranks compute summands: one of them adds the bias
        self.activate = bind_expert_activation(model, kernels)
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
        kind = expert_kind(model)
        outputs = kind.up_outputs(f)
        over_inner = sharded_over_experts(len(outputs))
        self.up_name = kind.up_name
        up = self.declare_parameter(self.up_name, e, *outputs, d, placement=over_inner, std=std, stacked=True)
        self.register_parameter(self.up_name, up)
        over_columns = sharded_over_experts(2)
        self.down = self.declare_parameter("down", e, d, f, placement=over_columns, std=down_std, stacked=True)
        self.down_bias = None
        if moe.biases:
            over_ep = Placement("expert", ((0, "ep"),))
            bias_name = f"{self.up_name}_bias"
            bias = self.declare_parameter(bias_name, e, *outputs, placement=over_inner, std=0.0)
            self.register_parameter(bias_name, bias)
            self.down_bias = self.declare_parameter("down_bias", e, d, placement=over_ep, std=0.0)

    @property
    def first_weight(self) -> nn.Parameter:
        return getattr(self, self.up_name)

    @property
    def first_bias(self) -> nn.Parameter | None:
        return getattr(self, f"{self.up_name}_bias", None)

    @property
    def rounds_by_token(self) -> bool:
        """Whether a product asks for the numbers of its rows' tokens."""
        return self.up_product.recipe.rounds_by_token or self.down_product.recipe.rounds_by_token

    def forward(self, rows: Rows) -> Tensor:
        """Each row through its expert, times the router's weight."""
        if rows.number_N is None:
            return self.run_experts(rows)
        number_R = rows.number_N[rows.order.index_R.long()]
        with computing_tokens(lambda _: number_R):
            return self.run_experts(rows)

    def run_experts(self, rows: Rows) -> Tensor:
        order = rows.order
        floats = (rows.source_ND, self.first_weight, self.down, order.weight_R)
        routing = (order.index_R, order.slots_NK, order.ends_e, order.holes)
        return self.expert_mlp(*floats, *routing, self.parts)

    def bind_fused_kernel(self) -> None:
        """Choose the kernel for the recipe of both products. Where the two differ, no fused kernel fits. `fused`:
        whether one kernel runs all of it, so that there is no activation to keep or rebuild by itself."""
        up = self.up_product.recipe
        down = self.down_product.recipe
        self.recipe_name = up.name if up.name == down.name else "mixed"
        kernels = self.kernels.with_facts(recipe=self.recipe_name)
        self.parts = self.parts._replace(recipe=up, down_recipe=down)
        self.expert_mlp = kernels[expert_mlp]
        self.fused = kernels.implementation_name(expert_mlp) != "reference"

    def project_up(self, x_RD: Tensor, gate_up_e2FD: Tensor, ends_e: Tensor) -> Tensor:
        h_R2F = self.up_product(x_RD, gate_up_e2FD, ends_e)
        bias = self.first_bias
        if bias is None:
            return h_R2F
        biased_RN = self.kernels[expert_bias](h_R2F.flatten(1), bias.flatten(1), ends_e)
        return biased_RN.view_as(h_R2F)

    def project_down(self, a_RF: Tensor, down_eDF: Tensor, ends_e: Tensor, inside_R: Tensor | None) -> Tensor:
        """`inside_R`: the router's weights that the rows were multiplied by already; the bias is, too."""
        y_RD = self.down_product(a_RF, down_eDF, ends_e)
        if self.down_bias is None:
            return y_RD
        bias_eD = self.down_bias * self.adds_bias
        return self.kernels[expert_bias](y_RD, bias_eD, ends_e, inside_R)
