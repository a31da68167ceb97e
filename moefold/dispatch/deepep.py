"""Tokens travel by DeepEP's kernels, where that package is installed: the only file that touches it.

A hop like any other: one parcel for each distinct rank among a token's experts, sent over NVLink and RDMA by kernels
that the device starts itself. `plan` sends choices and gates, with a token of the least width; what comes back is a
handle with which hidden states then travel both ways. Each of dispatch and combine is the other's backward.

T tokens, N tokens that arrive, K choices, D width. Written to the package's documented interface (`Buffer.dispatch`,
`combine`, `get_dispatch_layout`) and tested with a stand-in of the same interface over gloo; never run on its hardware.
"""

from __future__ import annotations

from typing import Any

import torch

from moefold.config.errors import UserError
from moefold.layout.axes import Axis

LEAST_ROW_WIDTH = 512  # bf16 elements: its kernels move a kilobyte of a token at a time


def require_deepep(device: str, dtype: torch.dtype, hidden: int) -> Any:
    """The package, or a refusal that says what is missing."""
    instead = "; set parallel.dispatcher to auto, dedup or hierarchical, which need nothing"
    if device != "cuda":
        raise UserError(f"parallel.dispatcher = deepep needs CUDA devices, but this run is on {device}{instead}")
    if dtype != torch.bfloat16 or hidden % LEAST_ROW_WIDTH:
        raise UserError(
            f"parallel.dispatcher = deepep moves bf16 rows of a multiple of {LEAST_ROW_WIDTH} elements, but this run has "
            f"{str(dtype).removeprefix('torch.')} rows of {hidden}{instead}"
        )
    try:
        import deep_ep  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"parallel.dispatcher = deepep, but the package deep_ep cannot be imported ({error}); install it{instead}"
        ) from None
    return deep_ep


def make_deepep_buffer(deep_ep: Any, ep: Axis, row_bytes: int) -> Any:
    """Staging memory of the size that the package itself advises for rows of so many bytes."""
    configs = (deep_ep.Buffer.get_dispatch_config(ep.size), deep_ep.Buffer.get_combine_config(ep.size))
    inside = max(config.get_nvl_buffer_size_hint(row_bytes, ep.size) for config in configs)
    across = max(config.get_rdma_buffer_size_hint(row_bytes, ep.size) for config in configs)
    return deep_ep.Buffer(ep.group, inside, across)


class DeepEpHop:
    """Takes the place of a `Hop` over ep whose parcels are per rank."""

    def __init__(self, buffer: Any, ep: Axis, held: int):
        self.buffer, self.first, self.experts = buffer, ep.index * held, ep.size * held

    def plan(self, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
        weights_NK, ids_NK, handle = SendRouting.apply(weights_TK, ids_TK, self.buffer, self.experts)  # pyright: ignore
        here_NK = torch.where(ids_NK >= 0, ids_NK + self.first, -1)  # it numbers the experts of a rank from zero
        return handle, here_NK, weights_NK

    def out(self, h_TD: torch.Tensor, handle: Any) -> torch.Tensor:
        return DispatchTokens.apply(h_TD, self.buffer, handle)  # pyright: ignore[reportReturnType]

    def back(self, y_ND: torch.Tensor, handle: Any) -> torch.Tensor:
        return CombineTokens.apply(y_ND, self.buffer, handle)  # pyright: ignore[reportReturnType]


class SendRouting(torch.autograd.Function):
    """Choices and gates to the ranks that will see the tokens; gradients of the gates come home."""

    @staticmethod
    def forward(ctx, weights_TK, ids_TK, buffer, experts):
        per_rank, per_node, per_expert, goes_Tn, _ = buffer.get_dispatch_layout(ids_TK, experts)
        stub = torch.zeros(len(ids_TK), LEAST_ROW_WIDTH, dtype=torch.bfloat16, device=ids_TK.device)
        _, ids_NK, weights_NK, _, handle, _ = buffer.dispatch(
            stub,
            topk_idx=ids_TK,
            topk_weights=weights_TK.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_Tn,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle, ctx.dtype = buffer, handle, weights_TK.dtype
        ctx.mark_non_differentiable(ids_NK)
        return weights_NK.to(weights_TK.dtype), ids_NK, handle

    @staticmethod
    def backward(ctx, *gradients):
        weights_NK = gradients[0].float().contiguous()
        stub = torch.zeros(len(weights_NK), LEAST_ROW_WIDTH, dtype=torch.bfloat16, device=weights_NK.device)
        _, weights_TK, _ = ctx.buffer.combine(stub, ctx.handle, topk_weights=weights_NK)
        return weights_TK.to(ctx.dtype), None, None, None


class DispatchTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_TD, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.dispatch(h_TD.contiguous(), handle=handle)[0]

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.buffer.combine(gradients[0].contiguous(), ctx.handle)[0], None, None


class CombineTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_ND, buffer, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(y_ND.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx, *gradients):
        return ctx.buffer.dispatch(gradients[0].contiguous(), handle=ctx.handle)[0], None, None
