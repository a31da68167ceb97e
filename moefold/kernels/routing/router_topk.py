"""From router logits to each token's experts and their weights.

    score      softmax over all experts | over the chosen ones | a sigmoid of each
    choose     the K best of score + bias, within the best few groups of experts where there are groups
    normalise  over the chosen | over all | not, then times a factor

and what the balance losses of a layer need to know of its tokens, added up over each sequence: choices of each expert,
its scores as shares of one, and the square of the log of the sum of exponentials of a token's logits.

T tokens of B sequences, E experts, K chosen, G groups of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.kernels.routing.router_spec import RouterSpec, TokenSpan


@register_op
def router_topk(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor,
    how: RouterSpec,
    imposed_TK: torch.Tensor | None = None,
    span: TokenSpan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and numbers of the chosen experts; counts_BE, shares_BE and squares_B over sequences, or over all tokens.

    The bias takes part in the choice only, never in the weights. Ties go to the lower expert number: a stable sort
    says so on every device, torch.topk on none. `imposed_TK` takes the place of the choice; gradients still flow
    through the weights. Where it is -1, no expert, the weight is zero.
    """
    logs_TE = F.logsigmoid(logits_TE) if how.score == "sigmoid" else logits_TE
    shares_TE = logs_TE.softmax(-1)  # of sigmoids too: in logs, so that they keep their shares when all are tiny
    scores_TE = logits_TE.sigmoid() if how.score == "sigmoid" else shares_TE
    ids_TK = (
        imposed_TK
        if imposed_TK is not None
        else top_k_experts(selection_scores(logits_TE, scores_TE, how) + bias_E, how)
    )
    source_TE = {"chosen": logs_TE, "all": shares_TE, "none": scores_TE}[how.normalized_over]
    weights_TK = expert_weights(source_TE, ids_TK, how.normalized_over == "chosen") * how.scale
    span = span or TokenSpan(1, len(logits_TE))
    squares_B = span.sum(logits_TE.logsumexp(-1, keepdim=True).square())[:, 0]
    return weights_TK, ids_TK, span.sum(count_choices(ids_TK, logits_TE.shape[1])), span.sum(shares_TE), squares_B


def count_choices(ids_NK: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert stands in each row: (N, E). -1 is none."""
    zeros = torch.zeros(len(ids_NK), experts, dtype=torch.int64, device=ids_NK.device)
    return zeros.scatter_add_(1, ids_NK.clamp(min=0), (ids_NK >= 0).long())


def selection_scores(logits_TE: torch.Tensor, scores_TE: torch.Tensor, how: RouterSpec) -> torch.Tensor:
    """What the choice goes by."""
    return (logits_TE if how.score == "softmax_chosen" else scores_TE).detach()


def top_k_experts(worth_TE: torch.Tensor, how: RouterSpec) -> torch.Tensor:
    if how.groups > how.groups_chosen:
        worth_TE = worth_TE.masked_fill(~in_best_groups(worth_TE, how), -torch.inf)
    return worth_TE.sort(dim=-1, descending=True, stable=True).indices[:, : how.k]


def in_best_groups(worth_TE: torch.Tensor, how: RouterSpec) -> torch.Tensor:
    """Which experts lie in the groups that a token may choose from."""
    worth_TGe = worth_TE.unflatten(-1, (how.groups, -1))
    count = min(2 if how.group_score == "best_two" else 1, worth_TGe.shape[-1])
    worth_TG = worth_TGe.topk(count, dim=-1).values.sum(-1)
    best = worth_TG.sort(dim=-1, descending=True, stable=True).indices[:, : how.groups_chosen]
    allowed_TG = torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, best, True)
    return allowed_TG.repeat_interleave(worth_TGe.shape[-1], dim=1)


def expert_weights(source_TE: torch.Tensor, ids_TK: torch.Tensor, logs: bool) -> torch.Tensor:
    """What the chosen experts weigh: their scores, or with `logs` of scores these as shares of their sum."""
    none_TK = ids_TK < 0
    weights_TK = source_TE.gather(-1, ids_TK.clamp(min=0))
    if logs:
        weights_TK = weights_TK.masked_fill(none_TK, torch.finfo(weights_TK.dtype).min).softmax(-1)
    return weights_TK.masked_fill(none_TK, 0)


ROUTER_SPECS = [
    RouterSpec(2),
    RouterSpec(2, normalize="none", scale=2.5),
    RouterSpec(3, score="softmax_chosen"),
    RouterSpec(2, score="sigmoid", scale=2.5),
    RouterSpec(2, score="sigmoid", normalize="all"),
    RouterSpec(2, score="sigmoid", normalize="none"),
    RouterSpec(3, score="sigmoid", groups=4, groups_chosen=2),
    RouterSpec(2, groups=4, groups_chosen=1, group_score="best"),
]


@router_topk.register_fast("triton")
def _(logits_TE, bias_E, how, imposed_TK=None, span=None):
    if imposed_TK is not None and imposed_TK.shape[1] != how.k:  # where experts choose: as many places as experts
        return router_topk.reference(logits_TE, bias_E, how, imposed_TK, span)
    return RouterTopkFunction.apply(logits_TE, bias_E, how, imposed_TK, span or TokenSpan(1, len(logits_TE)))


class RouterTopkFunction(torch.autograd.Function):
    """One pass each way. Keeps the logits and what was chosen."""

    @staticmethod
    def forward(ctx, logits_TE, bias_E, how, imposed_TK, span):
        from moefold.kernels.routing import router_triton

        logits_TE, imposed_TK = logits_TE.contiguous(), None if imposed_TK is None else imposed_TK.contiguous()
        weights_TK, ids_TK, *sums = router_triton.launch_router_topk(logits_TE, bias_E, how, imposed_TK, span)
        ctx.save_for_backward(logits_TE, weights_TK, ids_TK)
        ctx.how, ctx.span = how, span
        ctx.mark_non_differentiable(ids_TK, sums[0])
        ctx.set_materialize_grads(False)
        return weights_TK, ids_TK, *sums

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.routing import router_triton

        logits_TE, weights_TK, ids_TK = ctx.saved_tensors
        dweights_TK, _, _, dshares_BE, dsquares_B = (None if d is None else d.contiguous() for d in gradients)
        kept = (logits_TE, weights_TK, ids_TK, ctx.how, ctx.span)
        return router_triton.launch_topk_backward(dweights_TK, dshares_BE, dsquares_B, *kept), None, None, None, None


@router_topk.register_cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for t, e in [(1, 8), (33, 8), (64, 128), (0, 8)]:
        logits, bias = seeded_randn(device, wide, t, e), seeded_randn(device, wide, e, seed=1, scale=0.01)
        for how in ROUTER_SPECS:
            yield KernelCase(f"{t} tokens, {e} experts, {how}", (logits, bias.detach(), how))
        imposed = (
            torch.arange(t * 2, device=device).view(t, 2) % e - (torch.arange(t, device=device)[:, None] % 5 == 4) * e
        )
        imposed = imposed.clamp(min=-1)
        yield KernelCase(f"{t} tokens, {e} experts, imposed", (logits, bias.detach(), RouterSpec(2), imposed))
        apart = torch.cat((imposed, imposed), dim=1)[:, :2]  # a slice, as of choices in order of worth
        yield KernelCase(f"{t} tokens, {e} experts, a slice imposed", (logits, bias.detach(), RouterSpec(2), apart))
        every = torch.arange(e, device=device).expand(t, e)
        every = torch.where((every + torch.arange(t, device=device)[:, None]) % 3 == 0, every, -1)  # experts chose
        yield KernelCase(f"{t} tokens, {e} experts, any number imposed", (logits, bias.detach(), RouterSpec(2), every))
        span = TokenSpan(3, t, t // 2)  # a part of the first sequence, a part of the second, nothing of the third
        yield KernelCase(
            f"{t} tokens, {e} experts, of sequences", (logits, bias.detach(), RouterSpec(2), imposed, span)
        )
