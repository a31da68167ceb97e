"""The router's choice and the order of rows it asks for, in Triton. Imported only where Triton is.

T tokens of S sequences, E experts, K choices of a token, R = T K rows in expert order, B blocks of choices. A program
that chooses has some tokens of one sequence: its sums are a line of `parts`, and lines are added up in their order.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# pyright: reportReturnType=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moefold.kernels.routing.router_spec import RouterSpec, TokenSpan

BLOCK = 256  # choices that one program sorts


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def normalized_scores(logits, inside, SIGMOID: tl.constexpr):
    """Logs of scores, and scores as shares of one; where there is no expert, -1e30 and zero."""
    logs = tl.where(inside, log_sigmoid(logits) if SIGMOID else logits, -1e30)
    powers = tl.where(inside, tl.exp(logs - tl.max(logs, 1)[:, None]), 0.0)
    return logs, powers / tl.sum(powers, 1)[:, None]


@triton.jit
def log_sum_exp(logits, inside):
    """Of each token, and the exponentials as shares of their sum."""
    masked = tl.where(inside, logits, -1e30)
    top = tl.max(masked, 1)
    powers = tl.where(inside, tl.exp(masked - top[:, None]), 0.0)
    total = tl.maximum(tl.sum(powers, 1), 1e-30)
    return top + tl.log(total), powers / total[:, None]


@triton.jit
def program_tokens(T, length, first, blocks, TOKENS: tl.constexpr):
    """The sequence of this program, its tokens, and which of them are there."""
    sequence = tl.program_id(0) // blocks
    begin = tl.maximum(sequence * length - first, 0)
    end = tl.minimum((sequence + 1) * length - first, T)
    t = begin + tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    return sequence, t, t < end


@triton.jit
def best_candidate(worth, free, e, WIDTH: tl.constexpr):
    """The highest of what is free, and of equals the lowest number."""
    top = tl.max(tl.where(free, worth, -float("inf")), 1)
    return top, tl.min(tl.where(free & (worth == top[:, None]), e[None, :], WIDTH), 1)


@triton.jit
def in_best_groups(
    worth, inside, e, E,
    GROUPS: tl.constexpr, CHOSEN: tl.constexpr, PAIRS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Which experts lie in the CHOSEN best of GROUPS groups; a group is worth its best expert, or its best two."""
    group = e // (E // GROUPS)
    g = tl.arange(0, PLACES)
    worth_TG = tl.zeros([TOKENS, PLACES], tl.float32)
    for number in tl.static_range(GROUPS):
        mine = inside & (group == number)[None, :]
        first, which = best_candidate(worth, mine, e, WIDTH)
        if PAIRS:
            first += best_candidate(worth, mine & (e[None, :] != which[:, None]), e, WIDTH)[0]
        worth_TG = tl.where((g == number)[None, :], first[:, None], worth_TG)
    free = tl.zeros([TOKENS, PLACES], tl.int1) | (g < GROUPS)[None, :]
    allowed = tl.zeros([TOKENS, WIDTH], tl.int1)
    for _ in tl.static_range(CHOSEN):
        which = best_candidate(worth_TG, free, g, PLACES)[1]
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
    """Scores, then K times the best of what is left, then the weights of those. IMPOSED: ids_TK are given. A line of
    sums: choices of each expert, its shares, and the square of the log of the sum of exponentials."""
    _, t, there_t = program_tokens(T, length, first, blocks, TOKENS)
    e = tl.arange(0, WIDTH)
    inside = there_t[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    logits = tl.load(logits_TE + at, mask=inside, other=0.0)
    logs, shares = normalized_scores(logits, inside, SCORE == "sigmoid")
    line = parts + tl.program_id(0).to(tl.int64) * (2 * E + 1)
    tl.store(line + E + e, tl.sum(tl.where(inside, shares, 0.0), 0), mask=e < E)
    squares = log_sum_exp(logits, inside)[0]
    tl.store(line + 2 * E, tl.sum(tl.where(there_t, squares * squares, 0.0), 0))
    scores = tl.sigmoid(logits) if SCORE == "sigmoid" else shares
    source = logs if NORMALIZE == "chosen" else shares if NORMALIZE == "all" else scores
    worth = logits if SCORE == "softmax_chosen" else scores
    worth += tl.load(bias_E + e, mask=e < E, other=0.0)[None, :]
    free = inside
    if GROUPS > CHOSEN and not IMPOSED:
        allowed = in_best_groups(worth, inside, e, E, GROUPS, CHOSEN, PAIRS, TOKENS, WIDTH, PLACES)
        worth = tl.where(allowed, worth, -float("inf"))
    k = tl.arange(0, SLOTS)
    values = tl.zeros([TOKENS, SLOTS], tl.float32)
    ids = tl.zeros([TOKENS, SLOTS], tl.int32) - 1
    counts = tl.zeros([TOKENS, WIDTH], tl.float32)
    for turn in tl.static_range(K):
        if IMPOSED:
            which = tl.load(ids_TK + t * K + turn, mask=there_t, other=-1).to(tl.int32)
        else:
            which = tl.minimum(
                best_candidate(worth, free, e, WIDTH)[1], E - 1
            )  # nobody is best where all are not a number
        taken = e[None, :] == which[:, None]
        free = free & (e[None, :] != which[:, None])
        counts += tl.where(taken & inside, 1.0, 0.0)
        here = (k == turn)[None, :]
        values = tl.where(here, tl.sum(tl.where(taken, source, 0.0), 1)[:, None], values)
        ids = tl.where(here, which[:, None], ids)
    tl.store(line + e, tl.sum(counts, 0), mask=e < E)
    there = ids >= 0
    if NORMALIZE == "chosen":
        values = tl.where(there, values, -1e30)
        powers = tl.where(there, tl.exp(values - tl.max(values, 1)[:, None]), 0.0)
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
    """Of p = softmax over the chosen logs: dlog = p (dp - p . dp); of shares s likewise over all; then of the logs. Of
    the square of z = log sum exp of the logits: 2 z softmax. What nobody read has None for a gradient."""
    sequence, t, there_t = program_tokens(T, length, first, blocks, TOKENS)
    e = tl.arange(0, WIDTH)
    k = tl.arange(0, SLOTS)
    inside = there_t[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    logits = tl.load(logits_TE + at, mask=inside, other=0.0)
    _, shares = normalized_scores(logits, inside, SCORE == "sigmoid")
    chosen = t[:, None] * K + k[None, :]
    real = there_t[:, None] & (k < K)[None, :]
    d = tl.zeros([TOKENS, SLOTS], tl.float32)
    if dweights_TK is not None:
        d += tl.load(dweights_TK + chosen, mask=real, other=0.0) * scale
    if NORMALIZE == "chosen":
        probs = tl.load(weights_TK + chosen, mask=real, other=0.0) / scale
        d = probs * (d - tl.sum(probs * d, 1)[:, None])
    sent = tl.zeros([TOKENS, WIDTH], tl.float32)
    for turn in tl.static_range(K):
        which = tl.load(ids_TK + t * K + turn, mask=there_t, other=-1).to(tl.int32)
        mine = tl.sum(tl.where((k == turn)[None, :], d, 0.0), 1)
        sent += tl.where(e[None, :] == which[:, None], mine[:, None], 0.0)
    dshares = tl.zeros([TOKENS, WIDTH], tl.float32)
    if dshares_SE is not None:
        dshares += tl.load(dshares_SE + sequence * E + e, mask=e < E, other=0.0)[None, :]
    if NORMALIZE == "all" or (NORMALIZE == "none" and SCORE != "sigmoid"):
        dshares += sent
    dlogs = shares * (dshares - tl.sum(shares * dshares, 1)[:, None])
    if NORMALIZE == "chosen":
        dlogs += sent
    if SCORE == "sigmoid":  # s = sigmoid(x): d log s = (1 - s) dx, d s = s (1 - s) dx
        s = tl.sigmoid(logits)
        dlogs = (dlogs + s * sent if NORMALIZE == "none" else dlogs) * (1 - s)
    if dsquares_S is not None:
        z, powers = log_sum_exp(logits, inside)
        dlogs += tl.load(dsquares_S + sequence) * 2 * z[:, None] * powers
    tl.store(dlogits_TE + at, dlogs, mask=inside)


@triton.jit
def count_choices_kernel(ids_R, counts_BE, R, E, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    ids = tl.load(ids_R + r, mask=r < R, other=WIDTH).to(tl.int32)
    counts = tl.sum((ids[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_BE + tl.program_id(0) * E + e, counts, mask=e < E)


@triton.jit
def block_offsets_kernel(counts_BE, total_E, B, E, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """In place, for a few experts: how many rows each of them gets from the blocks before."""
    e = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    b = tl.arange(0, STEP)
    total = tl.zeros([WIDTH], tl.int32)
    for first in range(0, B, STEP):
        mask = (first + b < B)[:, None] & (e < E)[None, :]
        at = counts_BE + (first + b)[:, None] * E + e[None, :]
        counts = tl.load(at, mask=mask, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        total += tl.sum(counts, 0)
    tl.store(total_E + e, total, mask=e < E)


@triton.jit
def place_rows_kernel(
    ids_R, weights_R, base_BE, total_E, index_R, slots_R, weight_R, ends_E, R, E,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    total = tl.load(total_E + e, mask=e < E, other=0)
    ends = tl.cumsum(total, 0)
    if tl.program_id(0) == 0:
        tl.store(ends_E + e, ends, mask=e < E)
    ids = tl.load(ids_R + r, mask=r < R, other=WIDTH).to(tl.int32)
    same = (ids[:, None] == e[None, :]).to(tl.int32)
    base = ends - total + tl.load(base_BE + tl.program_id(0) * E + e, mask=e < E, other=0)
    row = tl.sum(same * (base[None, :] + tl.cumsum(same, 0) - 1), 1)
    tl.store(slots_R + r, row, mask=r < R)
    tl.store(index_R + row, r // K, mask=r < R)
    tl.store(weight_R + row, tl.load(weights_R + r, mask=r < R, other=0.0), mask=r < R)


def tokens_per_program(width: int) -> int:
    return max(1, 2048 // width)


def blocks_per_sequence(tokens: int, span: TokenSpan) -> int:
    """Programs that a sequence may need."""
    return triton.cdiv(span.length, tokens)


def launch_router_topk(
    logits_TE: torch.Tensor, bias_E: torch.Tensor, how: RouterSpec, imposed_TK: torch.Tensor | None, span: TokenSpan
):
    """Weights and numbers of the chosen experts; over sequences, choices, scores as shares of one, and squares."""
    t, experts = logits_TE.shape
    weights_TK = logits_TE.new_empty(t, how.k)
    ids_TK = torch.empty(t, how.k, dtype=torch.int64, device=logits_TE.device) if imposed_TK is None else imposed_TK
    width = triton.next_power_of_2(experts)
    tokens = tokens_per_program(width)
    blocks = blocks_per_sequence(tokens, span)
    parts = logits_TE.new_empty(span.sequences, blocks, 2 * experts + 1)
    pairs = how.group_score == "best_two" and experts // how.groups > 1
    if blocks:
        router_topk_kernel[(span.sequences * blocks,)](
            logits_TE, bias_E, parts, weights_TK, ids_TK, t, experts, span.length, span.first, blocks, how.scale,
            how.k, how.score, how.normalized_over, how.groups, how.groups_chosen, pairs, imposed_TK is not None, tokens, width,
            triton.next_power_of_2(how.k), triton.next_power_of_2(how.groups),
        )  # fmt: skip
    counts, shares_SE, squares = parts.sum(1).split([experts, experts, 1], dim=1)
    return weights_TK, ids_TK, counts.long(), shares_SE, squares[:, 0]


def launch_topk_backward(
    dweights_TK, dshares_SE, dsquares_S, logits_TE, weights_TK, ids_TK, how: RouterSpec, span: TokenSpan
):
    t, experts = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    width = triton.next_power_of_2(experts)
    tokens = tokens_per_program(width)
    blocks = blocks_per_sequence(tokens, span)
    if t:
        router_topk_backward_kernel[(span.sequences * blocks,)](
            dweights_TK, dshares_SE, dsquares_S, logits_TE, weights_TK, ids_TK, dlogits_TE, t, experts, span.length,
            span.first, blocks, how.scale, how.k, how.score, how.normalized_over, tokens, width, triton.next_power_of_2(how.k),
        )  # fmt: skip
    return dlogits_TE


def launch_arrange_rows(ids_NK: torch.Tensor, weights_NK: torch.Tensor, experts: int):
    """Rows sorted by expert and, within one, as they came: index_R, slots_NK, gate_R and where each expert ends. Blocks
    count, experts add up, blocks place: the same on every run, and nothing waits for the host."""
    (n, k), device = ids_NK.shape, ids_NK.device
    rows, blocks, width = n * k, triton.cdiv(n * k, BLOCK), triton.next_power_of_2(experts)
    index_R, slots_NK = (torch.empty(shape, dtype=torch.int32, device=device) for shape in ((rows,), (n, k)))
    ends_E = torch.zeros(experts, dtype=torch.int32, device=device)
    weight_R = weights_NK.new_empty(rows)
    if rows:
        counts_BE = torch.empty(blocks, experts, dtype=torch.int32, device=device)
        ids_NK = ids_NK.contiguous()
        count_choices_kernel[(blocks,)](ids_NK, counts_BE, rows, experts, width, BLOCK, num_warps=8)
        total_E = torch.empty_like(ends_E)
        block_offsets_kernel[(triton.cdiv(experts, 8),)](counts_BE, total_E, blocks, experts, 8, 512, num_warps=8)
        place_rows_kernel[(blocks,)](
            ids_NK, weights_NK.contiguous(), counts_BE, total_E, index_R, slots_NK, weight_R, ends_E, rows, experts, k,
            width, BLOCK,
            num_warps=8,
        )  # fmt: skip
    return index_R, slots_NK, weight_R, ends_E
