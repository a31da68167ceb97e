"""From router logits to each token's experts and their weights: softmax over all, the K best, optionally renormalised.

T tokens, E experts, K chosen.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random


@op
def router_topk(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, k: int, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and numbers of the chosen experts, and all scores.

    The bias takes part in the choice only, never in the weights. Ties go to the lower expert number: a stable sort
    says so on every device, torch.topk on none.
    """
    scores_TE = logits_TE.softmax(-1)
    order_TE = (scores_TE.detach() + bias_E).sort(dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, :k]
    probs_TK = scores_TE.gather(-1, ids_TK)
    if normalize:
        probs_TK = probs_TK / probs_TK.sum(-1, keepdim=True)
    return probs_TK, ids_TK, scores_TE


@router_topk.fast("triton")
def _(logits_TE: torch.Tensor, bias_E: torch.Tensor, k: int, normalize: bool):
    return Choose.apply(logits_TE, bias_E, k, normalize)


class Choose(torch.autograd.Function):
    """One pass each way. Keeps the scores and what was chosen."""

    @staticmethod
    def forward(ctx, logits_TE, bias_E, k, normalize):
        from moefold.kernels import router_kernels

        probs_TK, ids_TK, scores_TE = router_kernels.choose(logits_TE.contiguous(), bias_E, k, normalize)
        ctx.save_for_backward(scores_TE, probs_TK, ids_TK)
        ctx.normalize = normalize
        ctx.mark_non_differentiable(ids_TK)
        return probs_TK, ids_TK, scores_TE

    @staticmethod
    def backward(ctx, dprobs_TK, _ids, dscores_TE):
        from moefold.kernels import router_kernels

        scores_TE, probs_TK, ids_TK = ctx.saved_tensors
        gradients = (dprobs_TK.contiguous(), dscores_TE.contiguous())
        return router_kernels.choose_backward(*gradients, scores_TE, probs_TK, ids_TK, ctx.normalize), None, None, None


@router_topk.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for t, e, k in [(1, 2, 1), (33, 8, 2), (64, 128, 8), (0, 4, 2), (5, 4, 4)]:
        logits, bias = random(device, wide, t, e), random(device, wide, e, seed=1, scale=0.01)
        for normalize in (True, False):
            yield Case(
                f"{t} tokens, {k} of {e}{', normalised' if normalize else ''}", (logits, bias.detach(), k, normalize)
            )
