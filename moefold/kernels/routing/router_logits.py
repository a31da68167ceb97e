"""Router logits: logits_TE = h_TD w_ED^T in fp32 or better, whatever the model's precision.

T tokens, D width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.layout.gradient_sink import memory_for_gradient


@register_op
def router_logits(h_TD: torch.Tensor, w_ED: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    return h_TD.to(wide) @ w_ED.to(wide).T


@router_logits.register_fast("bf16_exact")
def router_logits_bf16_exact(h_TD: torch.Tensor, w_ED: torch.Tensor) -> torch.Tensor:
    return ExactRouterLogits.apply(h_TD, w_ED)  # pyright: ignore[reportReturnType]


class ExactRouterLogits(torch.autograd.Function):
    """Products of bf16 numbers are exact in fp32, so the tensor cores lose nothing that an fp32 GEMM would keep. The
    gradient of the logits is fp32; as the sum of two bf16 numbers it keeps 16 bits, and both go through one GEMM."""

    @staticmethod
    def forward(ctx, h_TD, w_ED):
        ctx.save_for_backward(h_TD)
        ctx.weight = w_ED  # the Parameter object, not a saved tensor: its gradient sink is an attribute
        return torch.mm(h_TD, w_ED.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, d_TE):
        (h_TD,) = ctx.saved_tensors
        w_ED = ctx.weight
        # d = high + low, two bf16 numbers
        both_T2E = torch.empty(len(d_TE), 2, len(w_ED), dtype=h_TD.dtype, device=h_TD.device)
        high_TE, low_TE = both_T2E.unbind(1)
        high_TE.copy_(d_TE)
        torch.sub(d_TE, high_TE, out=low_TE)
        both_Te = both_T2E.flatten(1)
        dh_TD = both_Te @ w_ED.repeat(2, 1)
        dw_eD = torch.mm(both_Te.T, h_TD, out_dtype=torch.float32)
        high_ED, low_ED = dw_eD.unflatten(0, (2, -1))
        dw_ED = torch.add(high_ED, low_ED, out=memory_for_gradient(w_ED))
        return dh_TD, dw_ED


@router_logits.register_cases
def router_logits_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    for t, d, e in [(1, 8, 2), (33, 64, 8), (0, 16, 4), (256, 128, 64)]:
        h = seeded_randn(device, dtype, t, d)
        w = seeded_randn(device, dtype, e, d, seed=1, scale=d**-0.5)
        yield KernelCase(f"{t} tokens of {d}, {e} experts", (h, w), hidden=d)
