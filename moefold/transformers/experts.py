"""The experts of transformers' MoE models, by moefold's ops: `experts_implementation="moefold"`.

Weights stay where transformers keeps them: the ops read views of `gate_up_proj` (or `up_proj`) and `down_proj`.

N tokens, K experts a token, R = N x K rows in expert order, D width, F inner width, M outputs of the first product (2F
with a gate), E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefold.anatomy.activations import ActivationKind
from moefold.dispatch.base import RowOrder
from moefold.kernels.bound import BoundKernels
from moefold.kernels.experts.expert_bias import expert_bias
from moefold.kernels.experts.expert_mlp import ExpertParts, expert_mlp
from moefold.kernels.experts.grouped_gemm import grouped_gemm
from moefold.kernels.experts.mlp_activation import mlp_activation
from moefold.kernels.experts.swiglu import swiglu
from moefold.kernels.routing.expert_rows import arrange_rows, gather_rows, sum_rows
from moefold.transformers.kernels import expert_kernels

Activate = Callable[[Tensor, Tensor | None], Tensor]
SILU_GATE = ActivationKind("silu", gated=True)


class HostedExperts:
    """A transformers module of experts, as moefold's ops see it: its weights as views, in the dtype of the products."""

    def __init__(self, module: Any, kind: ActivationKind | None, dtype: torch.dtype):
        """`kind`: the activation as moefold's ops know it; None: the module's own."""
        self.module = module
        self.dtype = dtype
        self.has_norm = getattr(module, "has_post_expert_norm", False)  # unknown to transformers before 5.19
        # A norm enlarges small differences: in front of it the module's own activation rounds as in transformers.
        self.kind = kind = None if self.has_norm else kind
        is_gated = module.has_gate
        name = "gate_up_proj" if is_gated else "up_proj"
        self.up_bias = self.bias(f"{name}_bias")
        self.down_bias = self.bias("down_proj_bias")
        up_EMD = self.weight(name)
        if kind is not None and kind.gated:
            up_EMD = up_EMD.unflatten(1, (2, -1))
        self.up_weight = up_EMD
        self.down_EDF = self.weight("down_proj")

    def weight(self, name: str) -> Tensor:
        """(E, outputs, inputs)."""
        stored = getattr(self.module, name)
        weight = stored.mT if self.module.is_transposed else stored
        return weight.to(self.dtype)

    def bias(self, name: str) -> Tensor | None:
        if not self.module.has_bias:
            return None
        return getattr(self.module, name).to(self.dtype)

    @property
    def weight_inside(self) -> bool:
        """Whether the router's weight joins the activation; otherwise it acts last and rounds as in transformers."""
        return self.kind is not None

    def unfused(self) -> str:
        """What keeps these experts off the fused kernel, or nothing."""
        module = self.module
        if self.has_norm:
            return "experts with a norm"
        if self.kind != SILU_GATE:
            return "experts without SwiGLU"
        if module.has_bias:
            return "experts with biases"
        if module.is_transposed:
            return "transposed weights"
        return ""

    def kernels(self, device: torch.device) -> BoundKernels:
        _, d, f = self.down_EDF.shape
        return expert_kernels(device, self.dtype, d, f, self.unfused())

    def parts(self, kernels: BoundKernels) -> ExpertParts:
        """The composition that the reference of `expert_mlp` runs."""
        multiply = kernels[grouped_gemm]
        add_bias = kernels[expert_bias]
        module = self.module

        def project_up(x_RD: Tensor, weight: Tensor, ends_E: Tensor) -> Tensor:
            outputs = weight.shape[1:-1]
            weight_EMD = weight.flatten(1, -2)
            h_RM = multiply(x_RD, weight_EMD, ends_E)
            if self.up_bias is not None:
                h_RM = add_bias(h_RM, self.up_bias, ends_E)
            return h_RM.unflatten(-1, outputs)

        def project_down(a_RF: Tensor, weight_EDF: Tensor, ends_E: Tensor, inside_R: Tensor | None) -> Tensor:
            y_RD = multiply(a_RF, weight_EDF, ends_E)
            if self.down_bias is not None:
                y_RD = add_bias(y_RD, self.down_bias, ends_E, inside_R)
            if self.has_norm:
                y_RD = module.post_expert_norm(y_RD)
            return y_RD

        return ExpertParts(
            gather=kernels[gather_rows],
            up=project_up,
            activation=self.activation(kernels),
            down=project_down,
            weight_inside=self.weight_inside,
        )

    def activation(self, kernels: BoundKernels) -> Activate:
        kind = self.kind
        if kind is None:
            return self.own_activation
        if kind == SILU_GATE:
            return kernels[swiglu]
        activate = kernels[mlp_activation]
        return lambda h, weight_R: activate(h, weight_R, kind)

    def own_activation(self, h_RM: Tensor, weight_R: Tensor | None) -> Tensor:
        assert weight_R is None, "the weight acts behind the second product"
        module = self.module
        own = module._apply_gate if module.has_gate else module.act_fn
        return own(h_RM)


def product_dtype(module: nn.Module, device: torch.device) -> torch.dtype:
    """The dtype of the experts' products: autocast's, as for linear layers, or that of the weights."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    down: Any = module.down_proj
    return down.dtype


def may_be_expert_parallel(module: Any) -> bool:
    """Whether choices may be of other ranks' experts. Transformers before 5.19 does not tell: where there are other
    ranks, choices may be theirs."""
    known = getattr(module, "_is_expert_parallel", None)
    if known is not None:
        return known
    has_ranks = dist.is_available() and dist.is_initialized()
    return has_ranks and dist.get_world_size() > 1


def arrange(kernels: BoundKernels, ids_NK: Tensor, weights_NK: Tensor, module: Any) -> RowOrder:
    experts = module.num_experts
    if not may_be_expert_parallel(module):
        arranged = kernels[arrange_rows](ids_NK, weights_NK, experts)
        return RowOrder(*arranged, holes=False)
    # Choices of other ranks' experts have the number E: their rows are the last, and nothing may read them.
    index_R, slots_NK, weight_R, ends_E = arrange_rows.reference(ids_NK, weights_NK, experts)
    end = ends_E[-1]
    row_R = torch.arange(len(index_R), device=index_R.device)
    elsewhere_R = row_R >= end
    index_R = index_R.masked_fill(elsewhere_R, -1)
    weight_R = weight_R.masked_fill(elsewhere_R, 0)
    slots_NK = slots_NK.masked_fill(slots_NK >= end, -1)
    return RowOrder(index_R, slots_NK, weight_R, ends_E, holes=True)


def run_experts(experts: HostedExperts, hidden_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor) -> Tensor:
    source_ND = hidden_ND.to(experts.dtype)
    kernels = experts.kernels(source_ND.device)
    rows = arrange(kernels, ids_NK, weights_NK, experts.module)
    links = (rows.index_R, rows.slots_NK)
    weights = (experts.up_weight, experts.down_EDF)
    parts = experts.parts(kernels)
    mlp = kernels[expert_mlp]
    y_RD = mlp(source_ND, *weights, rows.weight_R, *links, rows.ends_e, rows.holes, parts)
    y_ND = kernels[sum_rows](y_RD, *links, rows.holes)
    return y_ND.to(hidden_ND.dtype)
