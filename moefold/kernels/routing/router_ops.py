"""The router's ops: logits, and the top-k choice of experts with their weights.

    logits     h_TD w_ED^T, in fp32 or better whatever the model's precision
    score      softmax over all experts | over the chosen ones | a sigmoid of each
    choose     the K best of score + bias, within the best few groups of experts where there are groups
    normalise  over the chosen | over all | not, then times a factor

and the sums over each sequence that a layer's balance losses need: choices of each expert, its scores as shares of one,
and the square of the log-sum-exp of a token's logits.

T tokens of B sequences, D width, E experts, K chosen, G groups of experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.linear.matmul import tiled_product
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.kernels.routing.router_spec import RouterSpec, TokenSpan
from moefold.layout.gradient_sink import memory_for_gradient


@register_op
def router_logits(h_TD: Tensor, w_ED: Tensor) -> Tensor:
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    wide_h_TD = h_TD.to(wide)
    wide_w_ED = w_ED.to(wide)
    return wide_h_TD @ wide_w_ED.T


@router_logits.register_fast("invariant")
def router_logits_invariant(h_TD: Tensor, w_ED: Tensor) -> Tensor:
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    wide_h_TD = h_TD.to(wide)
    wide_w_ED = w_ED.to(wide)
    return tiled_product(wide_h_TD, wide_w_ED)


@router_logits.register_fast("bf16_exact")
def router_logits_bf16_exact(h_TD: Tensor, w_ED: Tensor) -> Tensor:
    return ExactRouterLogits.apply(h_TD, w_ED)  # pyright: ignore[reportReturnType]


class ExactRouterLogits(torch.autograd.Function):
    """Products of bf16 numbers are exact in fp32, so the tensor cores lose nothing that an fp32 GEMM would keep. The
    gradient of the logits is fp32; as the sum of two bf16 numbers it keeps 16 bits, and both go through one GEMM."""

    @staticmethod
    def forward(ctx, h_TD, w_ED):
        ctx.save_for_backward(h_TD)
        ctx.weight = w_ED  # the Parameter object, not a saved tensor: its gradient sink is an attribute
        w_DE = w_ED.T
        return torch.mm(h_TD, w_DE, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, d_TE):
        (h_TD,) = ctx.saved_tensors
        w_ED = ctx.weight
        # d = high + low, two bf16 numbers
        tokens, experts = d_TE.shape
        both_T2E = h_TD.new_empty(tokens, 2, experts)
        high_TE, low_TE = both_T2E.unbind(1)
        high_TE.copy_(d_TE)
        torch.sub(d_TE, high_TE, out=low_TE)
        both_Te = both_T2E.flatten(1)
        w_eD = w_ED.repeat(2, 1)
        dh_TD = both_Te @ w_eD
        both_eT = both_Te.T
        dw_eD = torch.mm(both_eT, h_TD, out_dtype=torch.float32)
        high_ED, low_ED = dw_eD.chunk(2)
        dw_ED = memory_for_gradient(w_ED)
        torch.add(high_ED, low_ED, out=dw_ED)
        return dh_TD, dw_ED


LOGITS_CASE_SIZES = [  # T, D, E
    (1, 8, 2),
    (33, 64, 8),
    (0, 16, 4),
    (256, 128, 64),
]


@router_logits.register_cases
def router_logits_cases(draw: CaseInputs) -> Cases:
    for t, d, e in LOGITS_CASE_SIZES:
        h = draw.normal(t, d)
        scale = d**-0.5
        w = draw.normal(e, d, seed=1, scale=scale)
        name = f"{t} tokens of {d}, {e} experts"
        inputs = (h, w)
        yield KernelCase(name, inputs, hidden=d)


TopkOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@register_op
def router_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    spec: RouterSpec,
    imposed_TK: Tensor | None = None,
    span: TokenSpan | None = None,
) -> TopkOutputs:
    """Weights and ids of the chosen experts; counts_BE, shares_BE and squares_B over sequences, or over all tokens.

    The bias takes part in the choice only, never in the weights. Ties go to the lower expert id: a stable sort
    guarantees it on every device, torch.topk on none. `imposed_TK` replaces the choice; gradients still flow through
    the weights. Where an id is -1, no expert, the weight is zero.
    """
    tokens, experts = logits_TE.shape
    span = span or TokenSpan(1, tokens)
    logs_TE = log_scores(logits_TE, spec)
    shares_TE = logs_TE.softmax(-1)  # of sigmoids too: by their logs, so that tiny scores keep their shares
    scores_TE = expert_scores(logits_TE, shares_TE, spec)
    ids_TK = imposed_TK
    if ids_TK is None:
        selection_TE = selection_scores(logits_TE, scores_TE, spec)
        biased_TE = selection_TE + bias_E
        ids_TK = top_k_experts(biased_TE, spec)
    sources = {"chosen": logs_TE, "all": shares_TE, "none": scores_TE}
    normalize = spec.normalize
    source_TE = sources[normalize]
    are_logs = normalize == "chosen"
    weights_TK = expert_weights(source_TE, ids_TK, are_logs)
    # Sums for the balance losses.
    counts_TE = count_choices(ids_TK, experts)
    counts_BE = sum_by_sequence(counts_TE, span)
    shares_BE = sum_by_sequence(shares_TE, span)
    z_T1 = logits_TE.logsumexp(-1, keepdim=True)
    squares_T1 = z_T1.square()
    squares_B1 = sum_by_sequence(squares_T1, span)
    squares_B = squares_B1[:, 0]
    weights_TK = weights_TK * spec.scale
    return weights_TK, ids_TK, counts_BE, shares_BE, squares_B


def sum_by_sequence(x_TN: Tensor, span: TokenSpan) -> Tensor:
    """N sums over the tokens of each sequence: (B, N)."""
    before = span.first
    all_tokens = span.sequences * span.length
    behind = all_tokens - before - len(x_TN)
    if before or behind:
        around = (0, 0, before, behind)
        x_TN = F.pad(x_TN, around)
    shape = (span.sequences, span.length)
    by_sequence = x_TN.unflatten(0, shape)
    return by_sequence.sum(1)


def log_scores(logits_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Logarithms of the scores, up to a summand for each token."""
    if spec.score_function is not None:
        scores_TE = spec.score_function(logits_TE)
        smallest = torch.finfo(scores_TE.dtype).tiny
        positive_TE = scores_TE.clamp(min=smallest)
        return positive_TE.log()
    if spec.score == "sigmoid":
        return F.logsigmoid(logits_TE)
    return logits_TE


def expert_scores(logits_TE: Tensor, shares_TE: Tensor, spec: RouterSpec) -> Tensor:
    if spec.score_function is not None:
        return spec.score_function(logits_TE)
    if spec.score == "sigmoid":
        return logits_TE.sigmoid()
    return shares_TE


def count_choices(ids_NK: Tensor, experts: int) -> Tensor:
    """How often each expert occurs in each row: (N, E). The id -1 is not counted."""
    shape = (len(ids_NK), experts)
    zeros = ids_NK.new_zeros(shape, dtype=torch.int64)
    chosen = ids_NK >= 0
    ones = chosen.long()
    columns = ids_NK.clamp(min=0)
    return zeros.scatter_add_(1, columns, ones)


def selection_scores(logits_TE: Tensor, scores_TE: Tensor, spec: RouterSpec) -> Tensor:
    """The scores that experts are selected by, before the bias."""
    by_logit = spec.score == "softmax_chosen"
    selection_TE = logits_TE if by_logit else scores_TE
    return selection_TE.detach()


def top_k_experts(selection_TE: Tensor, spec: RouterSpec) -> Tensor:
    if spec.groups > spec.groups_chosen:
        allowed_TE = in_best_groups(selection_TE, spec)
        excluded_TE = ~allowed_TE
        selection_TE = selection_TE.masked_fill(excluded_TE, -torch.inf)
    order_TE = stable_order(selection_TE)
    return order_TE[:, : spec.k]


def stable_order(scores: Tensor) -> Tensor:
    """Columns by falling score, ties by column."""
    by_score = scores.sort(dim=-1, descending=True, stable=True)
    return by_score.indices


def in_best_groups(selection_TE: Tensor, spec: RouterSpec) -> Tensor:
    """Which experts lie in the groups that a token may choose from."""
    shape = (spec.groups, -1)
    by_group_TGe = selection_TE.unflatten(-1, shape)
    group_size = by_group_TGe.shape[-1]
    wanted = 1
    if spec.group_score == "best_two":
        wanted = min(2, group_size)
    best_experts = by_group_TGe.topk(wanted, dim=-1)
    best_scores = best_experts.values
    score_TG = best_scores.sum(-1)
    order_TG = stable_order(score_TG)
    best_groups = order_TG[:, : spec.groups_chosen]
    allowed_TG = torch.zeros_like(score_TG, dtype=torch.bool)
    allowed_TG.scatter_(1, best_groups, True)
    return allowed_TG.repeat_interleave(group_size, dim=1)


def expert_weights(source_TE: Tensor, ids_TK: Tensor, logs: bool) -> Tensor:
    """The chosen experts' scores; from `logs` of scores, their softmax over the chosen."""
    none_TK = ids_TK < 0
    column_TK = ids_TK.clamp(min=0)
    weights_TK = source_TE.gather(-1, column_TK)
    if logs:
        lowest = torch.finfo(weights_TK.dtype).min
        logs_TK = weights_TK.masked_fill(none_TK, lowest)
        weights_TK = logs_TK.softmax(-1)
    return weights_TK.masked_fill(none_TK, 0)


@router_topk.register_fast("triton")
def router_topk_triton(
    logits_TE: Tensor,
    bias_E: Tensor,
    spec: RouterSpec,
    imposed_TK: Tensor | None = None,
    span: TokenSpan | None = None,
) -> TopkOutputs:
    tokens = len(logits_TE)
    k = spec.k
    columns = k if imposed_TK is None else imposed_TK.shape[1]
    if columns != k:  # expert choice: as many columns as experts
        return router_topk.reference(logits_TE, bias_E, spec, imposed_TK, span)
    span = span or TokenSpan(1, tokens)
    return RouterTopkFunction.apply(logits_TE, bias_E, spec, imposed_TK, span)  # pyright: ignore[reportReturnType]


class RouterTopkFunction(torch.autograd.Function):
    """One pass each way. Saves the logits, and the ids and weights of the chosen experts."""

    @staticmethod
    def forward(ctx, logits_TE, bias_E, spec, imposed_TK, span):
        from moefold.kernels.routing.router_triton import launch_router_topk

        logits_TE = logits_TE.contiguous()
        if imposed_TK is not None:
            imposed_TK = imposed_TK.contiguous()
        outputs = launch_router_topk(logits_TE, bias_E, spec, imposed_TK, span)
        weights_TK, ids_TK, counts_BE, *_ = outputs
        ctx.save_for_backward(logits_TE, weights_TK, ids_TK)
        ctx.spec = spec
        ctx.span = span
        ctx.mark_non_differentiable(ids_TK, counts_BE)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.routing.router_triton import launch_topk_backward

        dweights_TK, _, _, dshares_BE, dsquares_B = gradients
        dweights_TK = contiguous_or_none(dweights_TK)
        dshares_BE = contiguous_or_none(dshares_BE)
        dsquares_B = contiguous_or_none(dsquares_B)
        outputs = (dweights_TK, dshares_BE, dsquares_B)
        logits_TE, weights_TK, ids_TK = ctx.saved_tensors
        inputs = (logits_TE, weights_TK, ids_TK)
        spec = ctx.spec
        span = ctx.span
        dlogits_TE = launch_topk_backward(*outputs, *inputs, spec, span)
        return dlogits_TE, None, None, None, None


def contiguous_or_none(gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return None
    return gradient.contiguous()


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


TOPK_CASE_SIZES = [  # T, E
    (1, 8),
    (33, 8),
    (64, 128),
    (0, 8),
]


@router_topk.register_cases
def router_topk_cases(draw: CaseInputs) -> Cases:
    for t, e in TOPK_CASE_SIZES:
        logits = draw.wide(t, e)
        bias = draw.wide(e, seed=1, scale=0.01)
        scores = (logits, bias.detach())
        name = f"{t} tokens, {e} experts"
        for spec in ROUTER_SPECS:
            yield KernelCase(f"{name}, {spec}", (*scores, spec))
        common = (*scores, RouterSpec(2))
        device = draw.device
        imposed = imposed_ids(t, e, device)
        yield KernelCase(f"{name}, imposed", (*common, imposed))
        twice = torch.cat((imposed, imposed), dim=1)
        sliced = twice[:, :2]  # not contiguous
        yield KernelCase(f"{name}, a slice imposed", (*common, sliced))
        any_number = expert_choice_ids(t, e, device)
        yield KernelCase(f"{name}, any number imposed", (*common, any_number))
        half = t // 2
        span = TokenSpan(3, t, half)  # a part of the first sequence, a part of the second, nothing of the third
        yield KernelCase(f"{name}, of sequences", (*common, imposed, span))


def imposed_ids(tokens: int, experts: int, device: str) -> Tensor:
    """Two experts for each token; every fifth token has none."""
    count = tokens * 2
    numbers = torch.arange(count, device=device)
    pairs = numbers.view(tokens, 2)
    ids = pairs % experts
    token = torch.arange(tokens, device=device)
    is_fifth = token % 5 == 4
    is_fifth = is_fifth[:, None]
    return ids.masked_fill(is_fifth, -1)


def expert_choice_ids(tokens: int, experts: int, device: str) -> Tensor:
    """A third of all experts for each token, in columns of their own; -1 elsewhere."""
    expert = torch.arange(experts, device=device)
    ids = expert.expand(tokens, experts)
    token = torch.arange(tokens, device=device)
    number = ids + token[:, None]
    is_third = number % 3 == 0
    return torch.where(is_third, ids, -1)
