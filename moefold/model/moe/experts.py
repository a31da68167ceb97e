"""The routed experts of a layer: two grouped products with the activation between them.

R rows sorted by expert, D width of a row (the stream's, or that of a latent), F inner width, e experts held here. The
first weight and its product have gate and up (e2FD, R2F), or without a gate up alone (eFD, RF).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from moefold.anatomy.activations import expert_kind
from moefold.anatomy.adapters import unfused_adapter
from moefold.anatomy.step_specs import unfused_experts_reason
from moefold.config.run import ModelConfig
from moefold.dispatch.base import Rows
from moefold.dispatch.clone_rows import split_rows
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.clamped_swiglu import clamped_swiglu
from moefold.kernels.experts.expert_bias import expert_bias
from moefold.kernels.experts.expert_mlp import ExpertParts, expert_mlp
from moefold.kernels.routing.expert_rows import gather_rows
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import Placement, sharded_over_experts
from moefold.layout.token_numbers import computing_tokens
from moefold.model.initialise import output_std
from moefold.model.mlp import Activate, bind_activation
from moefold.model.steps import Region, call_directly
from moefold.precision.linear import GroupedLinear, PlacedWeight, product_draws_by_token


def bind_expert_activation(model: ModelConfig, kernels: BoundKernels) -> Activate:
    moe = model.moe
    if moe.activation == "clamped_swiglu":
        activate = kernels[clamped_swiglu]
        return partial(activate, limit=moe.clamp)
    return bind_activation(moe.activation, kernels)


def kernels_beside_adapter(kernels: BoundKernels, product: GroupedLinear) -> BoundKernels:
    """The kernels of experts of which this product has its adapter, or none."""
    adapter = product.adapter
    if adapter is None:
        return kernels
    rank = adapter.a.shape[-2]
    unfused = unfused_adapter(rank, product.drops_inputs)
    kernels = kernels.with_facts(adapted_experts="lora.rank")
    return kernels.with_facts(unfused_experts=unfused) if unfused else kernels


class Experts(DeclaringModule):
    """`self.expert_mlp` computes all of it: a fused kernel, or the composition of `self.parts`."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(world)
        self.declare_weights(model)
        unfused = unfused_experts_reason(model)
        self.kernels = kernels.with_facts(unfused_experts=unfused)
        declared = self.declared
        up = declared[self.up_name]
        up_weight = PlacedWeight(up, world)
        down = declared["down"]
        down_weight = PlacedWeight(down, world)
        self.up_product = GroupedLinear(self.kernels, reads_tokens=True, placed_weight=up_weight)
        self.down_product = GroupedLinear(self.kernels, placed_weight=down_weight)
        etp = world.axis("etp")
        self.adds_bias = etp.index == 0  # etp ranks compute summands: one of them adds the bias
        self.activate = bind_expert_activation(model, kernels)
        self.activation = Region("activation")
        self.gathering = Region("dispatch")
        self.around_rows: Callable[..., Tensor] = call_directly  # or in chunks (memory/expert_chunks.py)
        activation = partial(self.activation, self.activate)
        gather = partial(self.gathering, kernels[gather_rows])
        weight_inside = model.moe.gate == "activation"
        self.parts = ExpertParts(
            gather=gather,
            up=self.project_up,
            activation=activation,
            down=self.project_down,
            weight_inside=weight_inside,
        )
        self.bind_fused_kernel()

    def declare_weights(self, model: ModelConfig) -> None:
        moe = model.moe
        std = model.init_std
        e = moe.experts
        f = moe.ffn
        d = moe.latent or model.hidden
        # up, and with a gate the gate beside it
        kind = expert_kind(model)
        outputs = kind.up_outputs(f)
        over_inner = sharded_over_experts(len(outputs))
        up_name = kind.up_name
        self.up_name = up_name
        shape = (e, *outputs, d)
        rows = kind.up_rows
        up = self.declare_parameter(up_name, *shape, placement=over_inner, std=std, stacked=True, rows=rows)
        self.register_parameter(up_name, up)
        # down
        over_columns = sharded_over_experts(2)
        shape = (e, d, f)
        std = output_std(model)
        down = self.declare_parameter("down", *shape, placement=over_columns, std=std, stacked=True)
        self.down = down
        self.down_bias = None
        if moe.biases:
            by_expert = (0, "ep")
            over_ep = Placement("expert", (by_expert,))
            bias_name = f"{up_name}_bias"
            bias = self.declare_parameter(bias_name, e, *outputs, placement=over_inner, std=0.0)
            self.register_parameter(bias_name, bias)
            self.down_bias = self.declare_parameter("down_bias", e, d, placement=over_ep, std=0.0)

    def parameters_read(self) -> Iterator[nn.Parameter]:
        """Those of adapters too, whose matrices a fused kernel reads without a call of the adapters."""
        return self.parameters()

    @property
    def first_weight(self) -> nn.Parameter:
        return getattr(self, self.up_name)

    @property
    def first_bias(self) -> nn.Parameter | None:
        return getattr(self, f"{self.up_name}_bias", None)

    @property
    def draws_by_token(self) -> bool:
        """Whether a product asks for the numbers of its rows' tokens."""
        products = self.up_product, self.down_product
        return any(map(product_draws_by_token, products))

    def forward(self, rows: Rows) -> Tensor:
        """Each row through its expert, times the router's weight."""
        clones = rows.clones
        if clones is None:
            return self.around_rows(self.run_numbered, rows)
        spare_slots = len(clones.up)
        own, cloned = split_rows(rows, clones.first_row, spare_slots)
        own_RD = self.run_experts(own)
        cloned_RD = self.run_weights(cloned, clones.up, clones.down)
        return torch.cat((own_RD, cloned_RD))

    def run_numbered(self, rows: Rows) -> Tensor:
        if rows.number_N is None:
            return self.run_experts(rows)
        index_R = rows.order.index_R
        number_R = rows.number_N[index_R.long()]
        with computing_tokens(lambda _: number_R):
            return self.run_experts(rows)

    def run_experts(self, rows: Rows) -> Tensor:
        return self.run_weights(rows, self.first_weight, self.down)

    def run_weights(self, rows: Rows, up: Tensor, down: Tensor) -> Tensor:
        order = rows.order
        source_ND = rows.source_ND
        weights = (up, down)
        weight_R = order.weight_R
        links = (order.index_R, order.slots_NK)
        ends_e = order.ends_e
        parts = self.parts._replace(up_adapter=self.up_product.adapter, down_adapter=self.down_product.adapter)
        inputs = (source_ND, *weights, weight_R, *links, ends_e, order.holes, parts)
        if rows.around is None:
            return self.expert_mlp(*inputs)
        return rows.around(self.expert_mlp, *inputs)

    def bind_fused_kernel(self) -> None:
        """Choose the kernel for the recipe of both products. Where the two differ, no fused kernel fits. `fused`:
        whether one kernel runs all of it, so that there is no activation to keep or rebuild by itself."""
        up = self.up_product.recipe
        down = self.down_product.recipe
        is_same = up.name == down.name
        self.recipe_name = up.name if is_same else "mixed"
        name = self.recipe_name
        kernels = self.kernels.with_facts(recipe=name, adapted_experts="")
        for product in (self.up_product, self.down_product):
            kernels = kernels_beside_adapter(kernels, product)
        parts = self.parts
        self.parts = parts._replace(recipe=up, down_recipe=down)
        self.expert_mlp = kernels[expert_mlp]
        chosen = kernels.implementation_name(expert_mlp)
        self.fused = chosen != "reference"

    def project_up(self, x_RD: Tensor, gate_up_e2FD: Tensor, ends_e: Tensor) -> Tensor:
        h_R2F = self.up_product(x_RD, gate_up_e2FD, ends_e)
        bias = self.first_bias
        if bias is None:
            return h_R2F
        h_RN = h_R2F.flatten(1)
        bias_eN = bias.flatten(1)
        add_bias = self.kernels[expert_bias]
        biased_RN = add_bias(h_RN, bias_eN, ends_e)
        return biased_RN.view_as(h_R2F)

    def project_down(self, a_RF: Tensor, down_eDF: Tensor, ends_e: Tensor, inside_R: Tensor | None) -> Tensor:
        """`inside_R`: the router's weights that the rows were multiplied by already; the bias is, too."""
        y_RD = self.down_product(a_RF, down_eDF, ends_e)
        bias_eD = self.down_bias
        if bias_eD is None:
            return y_RD
        bias_eD = bias_eD * self.adds_bias
        add_bias = self.kernels[expert_bias]
        return add_bias(y_RD, bias_eD, ends_e, inside_R)
