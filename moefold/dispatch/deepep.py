"""The DeepEP hop: tokens are sent by DeepEP's kernels, where that package is installed. No other file uses the package.

One copy of a token is sent for each distinct rank of its experts, over NVLink and RDMA, initiated by kernels. `plan`
sends choices and router weights, with a token of the least width; the returned handle is used to send hidden states in
both directions. Dispatch is the backward of combine, and the reverse.

T tokens, N tokens that arrive, K choices, D width. Written to the package's documented interface (`Buffer.dispatch`,
`combine`, `get_dispatch_layout`) and tested with a stand-in of the same interface over gloo; never run on its hardware.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefold.config.errors import UserError
from moefold.dispatch.base import HopPlan, Routing
from moefold.dispatch.expert_placement import ExpertPlacement
from moefold.dispatch.traffic import Traffic
from moefold.layout.axes import Axis

LEAST_ROW_WIDTH = 512  # bf16 elements: the kernels send a kilobyte of a token at a time


def require_deepep(device: str, dtype: torch.dtype, row_width: int) -> Any:
    """The package, or a refusal with the missing requirement."""
    instead = "; set parallel.dispatcher to auto, dedup or hierarchical, which need nothing"
    if device != "cuda":
        raise UserError(f"parallel.dispatcher = deepep needs CUDA devices, but this run is on {device}{instead}")
    if dtype != torch.bfloat16 or row_width % LEAST_ROW_WIDTH:
        dtype_name = str(dtype).removeprefix("torch.")
        raise UserError(
            f"parallel.dispatcher = deepep moves bf16 rows of a multiple of {LEAST_ROW_WIDTH} elements, but this run "
            f"has {dtype_name} rows of {row_width}{instead}"
        )
    try:
        import deep_ep  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"parallel.dispatcher = deepep, but the package deep_ep cannot be imported ({error}); install it{instead}"
        ) from None
    return deep_ep


def make_deepep_buffer(deep_ep: Any, ep: Axis, row_bytes: int) -> Any:
    """Staging memory of the size that the package recommends for rows of this many bytes."""
    dispatch_config = deep_ep.Buffer.get_dispatch_config(ep.size)
    combine_config = deep_ep.Buffer.get_combine_config(ep.size)
    nvlink_bytes = 0
    rdma_bytes = 0
    for config in (dispatch_config, combine_config):
        nvlink = config.get_nvl_buffer_size_hint(row_bytes, ep.size)
        rdma = config.get_rdma_buffer_size_hint(row_bytes, ep.size)
        nvlink_bytes = max(nvlink_bytes, nvlink)
        rdma_bytes = max(rdma_bytes, rdma)
    return deep_ep.Buffer(ep.group, nvlink_bytes, rdma_bytes)


class DeepEpHop:
    """A hop over ep with one parcel per rank. The package numbers experts rank by rank: ids are mapped to positions of
    the placement and back. Rows sent are not counted, since their number is not copied to the host."""

    def __init__(self, buffer: Any, ep: Axis, experts: ExpertPlacement):
        self.buffer = buffer
        self.experts = experts
        self.first = ep.index * experts.held

    def plan(self, routing: Routing, traffic: Traffic | None) -> HopPlan:
        weights_TK, ids_TK = routing
        positions_TK = self.experts.position_of(ids_TK)
        positions_TK = torch.where(ids_TK >= 0, positions_TK, -1)
        count = self.experts.experts
        sent = SendRouting.apply(weights_TK, positions_TK, self.buffer, count)
        weights_NK, local_NK, handle, choices = sent  # pyright: ignore[reportGeneralTypeIssues]
        # Experts of the receiving rank are numbered from zero; -1 is no choice.
        positions_NK = local_NK + self.first
        positions_NK = positions_NK.clamp(min=0)
        arrived_NK = self.experts.expert_at(positions_NK)
        ids_NK = torch.where(local_NK >= 0, arrived_NK, -1)
        arrivals = Routing(weights_NK, ids_NK)
        return HopPlan(handle, arrivals, choices=choices)

    def out(self, h_TD: Tensor, leg: Any) -> Tensor:
        return DispatchTokens.apply(h_TD, self.buffer, leg)  # pyright: ignore[reportReturnType]

    def back(self, y_ND: Tensor, leg: Any) -> Tensor:
        return CombineTokens.apply(y_ND, self.buffer, leg)  # pyright: ignore[reportReturnType]


class SendRouting(torch.autograd.Function):
    """Choices and router weights are sent to the ranks that get the tokens; backward returns the weights' gradients."""

    @staticmethod
    def forward(ctx, weights_TK, ids_TK, buffer, experts):
        per_rank, per_node, per_expert, goes_Tn, _ = buffer.get_dispatch_layout(ids_TK, experts)
        stub = make_stub_rows(ids_TK)
        _, ids_NK, weights_NK, rows_per_expert, handle, _ = buffer.dispatch(
            stub,
            topk_idx=ids_TK,
            topk_weights=weights_TK.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_Tn,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer = buffer
        ctx.handle = handle
        ctx.dtype = weights_TK.dtype
        ctx.mark_non_differentiable(ids_NK)
        weights_NK = weights_NK.to(weights_TK.dtype)
        rows = sum(rows_per_expert)
        return weights_NK, ids_NK, handle, rows

    @staticmethod
    def backward(ctx, *gradients):
        weights_NK = gradients[0].float().contiguous()
        stub = make_stub_rows(weights_NK)
        _, weights_TK, _ = ctx.buffer.combine(stub, ctx.handle, topk_weights=weights_NK)
        weights_TK = weights_TK.to(ctx.dtype)
        return weights_TK, None, None, None


def make_stub_rows(like: Tensor) -> Tensor:
    """Rows of the least width, sent with choices and weights."""
    return like.new_zeros(len(like), LEAST_ROW_WIDTH, dtype=torch.bfloat16)


class DispatchTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_TD, buffer, handle):
        ctx.buffer = buffer
        ctx.handle = handle
        h_ND, *_ = buffer.dispatch(h_TD.contiguous(), handle=handle)
        return h_ND

    @staticmethod
    def backward(ctx, *gradients):
        dy_ND = gradients[0].contiguous()
        dh_TD, *_ = ctx.buffer.combine(dy_ND, ctx.handle)
        return dh_TD, None, None


class CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_ND, buffer, handle):
        ctx.buffer = buffer
        ctx.handle = handle
        y_TD, *_ = buffer.combine(y_ND.contiguous(), handle)
        return y_TD

    @staticmethod
    def backward(ctx, *gradients):
        dy_TD = gradients[0].contiguous()
        dy_ND, *_ = ctx.buffer.dispatch(dy_TD, handle=ctx.handle)
        return dy_ND, None, None
