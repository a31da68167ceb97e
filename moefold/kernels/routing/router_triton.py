"""Top-k routing and the order of expert rows, in Triton. Imported only where Triton is.

T tokens of S sequences, E experts, K choices of a token, R = T K rows in expert order, B blocks of choices. A top-k
program has some tokens of one sequence; its sums are a line of `parts`, and lines are added up in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefold.kernels.routing.router_ops import RouterSpec, TokenSpan

BLOCK = 256  # choices that one program sorts
SCAN_EXPERTS = 8  # experts of one program of the scan over blocks
SCAN_STEP = 512  # blocks of choices that it adds up at a time


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def normalized_scores(logits, inside, SIGMOID: tl.constexpr):
    """Logs of scores, and scores as shares of one; outside, -1e30 and zero."""
    logs = tl.where(inside, log_sigmoid(logits) if SIGMOID else logits, -1e30)
    top = tl.max(logs, 1)
    powers = tl.where(inside, tl.exp(logs - top[:, None]), 0.0)
    total = tl.sum(powers, 1)
    return logs, powers / total[:, None]


@triton.jit
def log_sum_exp(logits, inside):
    """The log-sum-exp of each token's logits, and their softmax."""
    masked = tl.where(inside, logits, -1e30)
    top = tl.max(masked, 1)
    powers = tl.where(inside, tl.exp(masked - top[:, None]), 0.0)
    total = tl.maximum(tl.sum(powers, 1), 1e-30)
    return top + tl.log(total), powers / total[:, None]


@triton.jit
def program_tokens(T, length, first, blocks, TOKENS: tl.constexpr):
    """The sequence of this program, its tokens, and which of them exist."""
    sequence = tl.program_id(0) // blocks
    begin = tl.maximum(sequence * length - first, 0)
    end = tl.minimum((sequence + 1) * length - first, T)
    t = begin + tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    return sequence, t, t < end


@triton.jit
def best_candidate(score, free, e, WIDTH: tl.constexpr):
    """The highest score among the free, and its column; of equals the lowest column."""
    top = tl.max(tl.where(free, score, -float("inf")), 1)
    best = free & (score == top[:, None])
    return top, tl.min(tl.where(best, e[None, :], WIDTH), 1)


@triton.jit
def in_best_groups(
    score, inside, e, E,
    GROUPS: tl.constexpr, CHOSEN: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Which experts lie in the CHOSEN best of GROUPS groups; a group's score is that of its best, or best two."""
    group = e // (E // GROUPS)
    g = tl.arange(0, PLACES)
    # scores of groups
    score_TG = tl.zeros([TOKENS, PLACES], tl.float32)
    for number in tl.static_range(GROUPS):
        mine = inside & (group == number)[None, :]
        first, which = best_candidate(score, mine, e, WIDTH)
        if PAIRS:
            others = mine & (e[None, :] != which[:, None])
            first += best_candidate(score, others, e, WIDTH)[0]
        score_TG = tl.where((g == number)[None, :], first[:, None], score_TG)
    # the best groups, one after the other
    free = tl.zeros([TOKENS, PLACES], tl.int1) | (g < GROUPS)[None, :]
    allowed = tl.zeros([TOKENS, WIDTH], tl.int1)
    for _ in tl.static_range(CHOSEN):
        which = best_candidate(score_TG, free, g, PLACES)[1]
        free = free & (g[None, :] != which[:, None])
        allowed = allowed | (group[None, :] == which[:, None])
    return allowed & inside


@triton.jit
def router_topk_kernel(
    logits_TE, bias_E, parts, weights_TK, ids_TK, T, E, length, first, blocks, scale,
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr,
    PAIRS: tl.constexpr, IMPOSED: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Scores, then K times the best that is left, then the weights of the chosen. IMPOSED: ids_TK are given. A line of
    sums: choices of each expert, its shares, and the square of the log-sum-exp."""
    # scores
    _, t, there_t = program_tokens(T, length, first, blocks, TOKENS)
    e = tl.arange(0, WIDTH)
    inside = there_t[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    logits = tl.load(logits_TE + at, mask=inside, other=0.0)
    logs, shares = normalized_scores(logits, inside, SCORE == "sigmoid")
    # sums of shares and squares over this program's tokens
    line = parts + tl.program_id(0).to(tl.int64) * (2 * E + 1)
    tl.store(line + E + e, tl.sum(tl.where(inside, shares, 0.0), 0), mask=e < E)
    z = log_sum_exp(logits, inside)[0]
    squares = tl.where(there_t, z * z, 0.0)
    tl.store(line + 2 * E, tl.sum(squares, 0))
    # selection scores, within the best groups
    scores = tl.sigmoid(logits) if SCORE == "sigmoid" else shares
    source = logs if NORMALIZE == "chosen" else shares if NORMALIZE == "all" else scores
    selection = logits if SCORE == "softmax_chosen" else scores
    selection += tl.load(bias_E + e, mask=e < E, other=0.0)[None, :]
    free = inside
    if GROUPS > CHOSEN and not IMPOSED:
        allowed = in_best_groups(selection, inside, e, E, GROUPS, CHOSEN, PAIRS, TOKENS, WIDTH, PLACES)
        selection = tl.where(allowed, selection, -float("inf"))
    # main loop over the K choices
    k = tl.arange(0, SLOTS)
    values = tl.zeros([TOKENS, SLOTS], tl.float32)
    ids = tl.zeros([TOKENS, SLOTS], tl.int32) - 1
    counts = tl.zeros([TOKENS, WIDTH], tl.float32)
    for turn in tl.static_range(K):
        if IMPOSED:
            which = tl.load(ids_TK + t * K + turn, mask=there_t, other=-1).to(tl.int32)
        else:
            best = best_candidate(selection, free, e, WIDTH)[1]
            which = tl.minimum(best, E - 1)  # there is no best one where all scores are NaN
        taken = e[None, :] == which[:, None]
        free = free & (e[None, :] != which[:, None])
        counts += tl.where(taken & inside, 1.0, 0.0)
        here = (k == turn)[None, :]
        value = tl.sum(tl.where(taken, source, 0.0), 1)
        values = tl.where(here, value[:, None], values)
        ids = tl.where(here, which[:, None], ids)
    tl.store(line + e, tl.sum(counts, 0), mask=e < E)
    # epilogue: normalise over the chosen, scale, store
    there = ids >= 0
    if NORMALIZE == "chosen":
        values = tl.where(there, values, -1e30)
        top = tl.max(values, 1)
        powers = tl.where(there, tl.exp(values - top[:, None]), 0.0)
        total = tl.sum(powers, 1)
        values = powers / tl.where(total > 0, total, 1.0)[:, None]
    out = t[:, None] * K + k[None, :]
    real = there_t[:, None] & (k < K)[None, :]
    tl.store(weights_TK + out, tl.where(there, values * scale, 0.0), mask=real)
    if not IMPOSED:
        tl.store(ids_TK + out, ids.to(tl.int64), mask=real)


@triton.jit
def router_topk_backward_kernel(
    dweights_TK, dshares_SE, dsquares_S, logits_TE, weights_TK, ids_TK, dlogits_TE, T, E, length, first, blocks, scale,
    K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """p = softmax over the chosen logs: dlog = p (dp - p . dp); shares s likewise over all; then the logs' own
    derivative. The square of z = logsumexp(logits): 2 z softmax. Outputs that no later op used have gradient None."""
    sequence, t, there_t = program_tokens(T, length, first, blocks, TOKENS)
    e = tl.arange(0, WIDTH)
    k = tl.arange(0, SLOTS)
    inside = there_t[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    logits = tl.load(logits_TE + at, mask=inside, other=0.0)
    _, shares = normalized_scores(logits, inside, SCORE == "sigmoid")
    # gradient of the chosen scores
    chosen = t[:, None] * K + k[None, :]
    real = there_t[:, None] & (k < K)[None, :]
    d = tl.zeros([TOKENS, SLOTS], tl.float32)
    if dweights_TK is not None:
        d += tl.load(dweights_TK + chosen, mask=real, other=0.0) * scale
    if NORMALIZE == "chosen":
        probs = tl.load(weights_TK + chosen, mask=real, other=0.0) / scale
        along = tl.sum(probs * d, 1)
        d = probs * (d - along[:, None])
    # scattered to the experts' columns
    sent = tl.zeros([TOKENS, WIDTH], tl.float32)
    for turn in tl.static_range(K):
        which = tl.load(ids_TK + t * K + turn, mask=there_t, other=-1).to(tl.int32)
        mine = tl.sum(tl.where((k == turn)[None, :], d, 0.0), 1)
        sent += tl.where(e[None, :] == which[:, None], mine[:, None], 0.0)
    # gradient of the shares, then of the logs
    dshares = tl.zeros([TOKENS, WIDTH], tl.float32)
    if dshares_SE is not None:
        dshares += tl.load(dshares_SE + sequence * E + e, mask=e < E, other=0.0)[None, :]
    if NORMALIZE == "all" or (NORMALIZE == "none" and SCORE != "sigmoid"):
        dshares += sent
    dot = tl.sum(shares * dshares, 1)
    dlogs = shares * (dshares - dot[:, None])
    if NORMALIZE == "chosen":
        dlogs += sent
    if SCORE == "sigmoid":  # s = sigmoid(x): d log s = (1 - s) dx, d s = s (1 - s) dx
        s = tl.sigmoid(logits)
        dlogs = (dlogs + s * sent if NORMALIZE == "none" else dlogs) * (1 - s)
    # z-loss
    if dsquares_S is not None:
        z, powers = log_sum_exp(logits, inside)
        dlogs += tl.load(dsquares_S + sequence) * 2 * z[:, None] * powers
    tl.store(dlogits_TE + at, dlogs, mask=inside)


@triton.jit
def count_choices_kernel(ids_R, counts_BE, R, E, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """First pass of the counting sort: choices of each expert in a block."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    ids = tl.load(ids_R + r, mask=r < R, other=WIDTH).to(tl.int32)
    same = ids[:, None] == e[None, :]
    counts = tl.sum(same.to(tl.int32), 0)
    tl.store(counts_BE + tl.program_id(0) * E + e, counts, mask=e < E)


@triton.jit
def block_offsets_kernel(counts_BE, total_E, B, E, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Second pass, in place, for a few experts: the rows that each of them gets from the blocks before."""
    e = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    b = tl.arange(0, STEP)
    total = tl.zeros([WIDTH], tl.int32)
    for first in range(0, B, STEP):
        inside = (first + b < B)[:, None] & (e < E)[None, :]
        at = counts_BE + (first + b)[:, None] * E + e[None, :]
        counts = tl.load(at, mask=inside, other=0)
        before = total[None, :] + tl.cumsum(counts, 0) - counts
        tl.store(at, before, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(total_E + e, total, mask=e < E)


@triton.jit
def place_rows_kernel(
    ids_R, weights_R, base_BE, total_E, index_R, slots_R, weight_R, ends_E, R, E,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Third pass: the row of each choice, in both directions, and its weight."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    total = tl.load(total_E + e, mask=e < E, other=0)
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(ends_E + e, ends, mask=e < E)
    ids = tl.load(ids_R + r, mask=r < R, other=WIDTH).to(tl.int32)
    same = (ids[:, None] == e[None, :]).to(tl.int32)
    # an expert's first row, plus its rows of earlier blocks, plus its rows of this block
    base = ends - total + tl.load(base_BE + tl.program_id(0) * E + e, mask=e < E, other=0)
    rank = base[None, :] + tl.cumsum(same, 0) - 1
    row = tl.sum(same * rank, 1)
    tl.store(slots_R + r, row, mask=r < R)
    tl.store(index_R + row, r // K, mask=r < R)
    weight = tl.load(weights_R + r, mask=r < R, other=0.0)
    tl.store(weight_R + row, weight, mask=r < R)


def tokens_per_program(width: int) -> int:
    return max(1, 2048 // width)


def launch_router_topk(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, spec: RouterSpec, imposed_TK: torch.Tensor | None, span: TokenSpan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights and ids of the chosen experts; over sequences: counts of choices, scores as shares of one, squares."""
    t, experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(t, spec.k)
    imposed = imposed_TK is not None
    ids_TK = imposed_TK if imposed else torch.empty(t, spec.k, dtype=torch.int64, device=logits_TE.device)
    width = triton.next_power_of_2(experts)
    tokens = tokens_per_program(width)
    blocks = triton.cdiv(span.length, tokens)  # of a sequence
    parts = logits_TE.new_empty(span.sequences, blocks, 2 * experts + 1)
    pairs = spec.group_score == "best_two" and experts // spec.groups > 1
    if blocks:
        router_topk_kernel[(span.sequences * blocks,)](
            logits_TE, bias_E, parts, weights_TK, ids_TK, t, experts, span.length, span.first, blocks, spec.scale,
            spec.k, spec.score, spec.normalized_over, spec.groups, spec.groups_chosen, pairs, imposed, tokens, width,
            triton.next_power_of_2(spec.k), triton.next_power_of_2(spec.groups),
        )  # fmt: skip
    counts, shares_SE, squares = parts.sum(1).split([experts, experts, 1], dim=1)
    return weights_TK, ids_TK, counts.long(), shares_SE, squares[:, 0]


def launch_topk_backward(
    dweights_TK: torch.Tensor | None,
    dshares_SE: torch.Tensor | None,
    dsquares_S: torch.Tensor | None,
    logits_TE: torch.Tensor,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    spec: RouterSpec,
    span: TokenSpan,
) -> torch.Tensor:
    t, experts = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    width = triton.next_power_of_2(experts)
    tokens = tokens_per_program(width)
    blocks = triton.cdiv(span.length, tokens)
    if t:
        router_topk_backward_kernel[(span.sequences * blocks,)](
            dweights_TK, dshares_SE, dsquares_S, logits_TE, weights_TK, ids_TK, dlogits_TE, t, experts, span.length,
            span.first, blocks, spec.scale, spec.k, spec.score, spec.normalized_over, tokens, width,
            triton.next_power_of_2(spec.k),
        )  # fmt: skip
    return dlogits_TE


def launch_arrange_rows(
    ids_NK: torch.Tensor, weights_NK: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, stably: index_R, slots_NK, weight_R and the end of each expert. A counting sort in three
    passes (count, scan, place): the same on every run, and nothing waits for the host."""
    n, k = ids_NK.shape
    rows, device = n * k, ids_NK.device
    index_R = torch.empty(rows, dtype=torch.int32, device=device)
    slots_NK = torch.empty(n, k, dtype=torch.int32, device=device)
    ends_E = torch.zeros(experts, dtype=torch.int32, device=device)
    weight_R = weights_NK.new_empty(rows)
    if rows:
        blocks, width = triton.cdiv(rows, BLOCK), triton.next_power_of_2(experts)
        counts_BE = torch.empty(blocks, experts, dtype=torch.int32, device=device)
        total_E = torch.empty_like(ends_E)
        ids_NK = ids_NK.contiguous()
        count_choices_kernel[(blocks,)](ids_NK, counts_BE, rows, experts, width, BLOCK, num_warps=8)
        scans = (triton.cdiv(experts, SCAN_EXPERTS),)
        block_offsets_kernel[scans](counts_BE, total_E, blocks, experts, SCAN_EXPERTS, SCAN_STEP, num_warps=8)
        place_rows_kernel[(blocks,)](
            ids_NK, weights_NK.contiguous(), counts_BE, total_E, index_R, slots_NK, weight_R, ends_E, rows, experts, k,
            width, BLOCK, num_warps=8,
        )  # fmt: skip
    return index_R, slots_NK, weight_R, ends_E
