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


@router_topk.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for t, e, k in [(1, 2, 1), (33, 8, 2), (64, 128, 8), (0, 4, 2), (5, 4, 4)]:
        logits, bias = random(device, wide, t, e), random(device, wide, e, seed=1, scale=0.01)
        for normalize in (True, False):
            yield Case(
                f"{t} tokens, {k} of {e}{', normalised' if normalize else ''}", (logits, bias.detach(), k, normalize)
            )
