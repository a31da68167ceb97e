"""How well each token suits each expert: logits_TE = h_TD w_ED^T in fp32 or better, whatever the model's precision.

T tokens, D width, E experts.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random


@op
def router_logits(h_TD: torch.Tensor, w_ED: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    return h_TD.to(wide) @ w_ED.to(wide).T


@router_logits.fast("bf16_exact")
def _(h_TD: torch.Tensor, w_ED: torch.Tensor) -> torch.Tensor:
    return Exact.apply(h_TD, w_ED)  # pyright: ignore[reportReturnType]


class Exact(torch.autograd.Function):
    """Products of bf16 numbers are exact in fp32, so the tensor cores lose nothing that a GEMM in fp32 would keep. The
    gradient of the logits is fp32; as the sum of two bf16 numbers it keeps 16 bits, and both go through one GEMM."""

    @staticmethod
    def forward(ctx, h_TD, w_ED):
        ctx.save_for_backward(h_TD, w_ED)
        return torch.mm(h_TD, w_ED.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, d_TE):
        h_TD, w_ED = ctx.saved_tensors
        high = d_TE.to(h_TD.dtype)
        both_Te = torch.cat((high, (d_TE - high).to(h_TD.dtype)), dim=1)
        dh_TD = both_Te @ w_ED.repeat(2, 1)
        dw_eD = torch.mm(both_Te.T, h_TD, out_dtype=torch.float32)
        return dh_TD, dw_eD.unflatten(0, (2, -1)).sum(0).to(w_ED.dtype)


@router_logits.cases
def _(device: str, dtype: torch.dtype):
    for t, d, e in [(1, 8, 2), (33, 64, 8), (0, 16, 4), (256, 128, 64)]:
        h, w = random(device, dtype, t, d), random(device, dtype, e, d, seed=1, scale=d**-0.5)
        yield Case(f"{t} tokens of {d}, {e} experts", (h, w), hidden=d)
