"""Top-k routing and the order of expert rows, in Triton. Imported only where Triton is.

T tokens of S sequences, E experts, K choices of a token, R = T K rows in expert order, B blocks of choices, P programs
of a sequence. A top-k program has some of its tokens; its counts and its sums are lines, added up in their order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.routing.router_spec import RouterSpec, TokenSpan
from moefold.kernels.tile_triton import (
    fp32_zeros,
    load_or_zero,
    numbers_from,
    program_block,
    store_inside,
    tile_mask,
    tile_offsets,
    tile_pointers,
    wide_program_id,
    zero_outside,
)

BLOCK = 256  # choices that one program sorts, at most
SCAN_EXPERTS = 8  # experts of one program of the scan over blocks
SCAN_STEP = 512  # blocks of choices that it adds up at a time


@triton.jit
def log_sigmoid(x):
    size = tl.abs(x)
    smallness = tl.exp(-size)
    correction = tl.log(1.0 + smallness)
    return tl.minimum(x, 0.0) - correction


@triton.jit
def powers_below_top(logs, inside):
    """Of each token: its largest log, the powers of all relative to it (outside, zero), and their sum."""
    top = tl.max(logs, 1)
    below = logs - top[:, None]
    powers = tl.exp(below)
    powers = zero_outside(powers, inside)
    total = tl.sum(powers, 1)
    return top, powers, total


@triton.jit
def normalized_scores(logits, inside, SIGMOID: constexpr):
    """Logs of scores, and scores as shares of one; outside, -1e30 and zero."""
    logs = log_sigmoid(logits) if SIGMOID else logits
    logs = tl.where(inside, logs, -1e30)
    _, powers, total = powers_below_top(logs, inside)
    shares = powers / total[:, None]
    return logs, shares


@triton.jit
def log_sum_exp(logits, inside):
    """The log-sum-exp of each token's logits, and their softmax."""
    masked = tl.where(inside, logits, -1e30)
    top, powers, total = powers_below_top(masked, inside)
    total = tl.maximum(total, 1e-30)
    z = top + tl.log(total)
    softmax = powers / total[:, None]
    return z, softmax


@triton.jit
def program_tokens(T, length, first, blocks, TOKENS: constexpr):
    """The sequence of this program, its tokens, and which of them exist."""
    sequence = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    # the sequence's tokens that are here
    begin = sequence * length - first
    end = tl.minimum(begin + length, T)
    begin = tl.maximum(begin, 0)
    first_here = begin + block * TOKENS
    t = numbers_from(first_here, TOKENS)
    return sequence, t, t < end


@triton.jit
def is_column(e, which):
    """Where the column is the one named for its row."""
    return e[None, :] == which[:, None]


@triton.jit
def put_column(matrix, e, number, value):
    """The matrix with a value for each row in the column of that number."""
    here = e == number
    here = here[None, :]
    value = value[:, None]
    return tl.where(here, value, matrix)


@triton.jit
def best_candidate(score, free, e, WIDTH: constexpr):
    """The highest score among the free, and its column; of equals the lowest column."""
    free_score = tl.where(free, score, -float("inf"))
    top = tl.max(free_score, 1)
    is_top = score == top[:, None]
    best = free & is_top
    columns = tl.where(best, e[None, :], WIDTH)
    column = tl.min(columns, 1)
    return top, column


@triton.jit
def score_of_group(score, mine, e, PAIRS: constexpr, WIDTH: constexpr):
    """The score of a group's best expert; with PAIRS, of its best two together."""
    first, which = best_candidate(score, mine, e, WIDTH)
    if PAIRS:
        others = mine & ~is_column(e, which)
        second, _ = best_candidate(score, others, e, WIDTH)
        first += second
    return first


@triton.jit
def in_best_groups(
    score, inside, e, E,
    GROUPS: constexpr, CHOSEN: constexpr, PAIRS: constexpr,
    TOKENS: constexpr, WIDTH: constexpr, PLACES: constexpr,
):  # fmt: skip
    """Which experts lie in the CHOSEN best of GROUPS groups."""
    group_size = E // GROUPS
    group = e // group_size
    g = tl.arange(0, PLACES)
    # scores of groups
    score_TG = fp32_zeros(TOKENS, PLACES)
    for number in tl.static_range(GROUPS):
        in_group = group == number
        mine = inside & in_group[None, :]
        value = score_of_group(score, mine, e, PAIRS, WIDTH)
        score_TG = put_column(score_TG, g, number, value)
    # the best groups, one after the other
    is_group = g < GROUPS
    free = tl.zeros([TOKENS, PLACES], tl.int1)
    free = free | is_group[None, :]
    allowed = tl.zeros([TOKENS, WIDTH], tl.int1)
    for _ in tl.static_range(CHOSEN):
        _, which = best_candidate(score_TG, free, g, PLACES)
        free = free & ~is_column(g, which)
        allowed = allowed | is_column(group, which)
    return allowed & inside


@triton.jit
def chosen_expert(ids_TK, t, there_t, turn, K: constexpr):
    """Each token's choice of that number, -1 for a token that does not exist."""
    at = ids_TK + t * K + turn
    ids = tl.load(at, mask=there_t, other=-1)
    return ids.to(tl.int32)


@triton.jit
def softmax_over_chosen(logs, there):
    """Shares of one among the chosen; of a token without any, zeros."""
    masked = tl.where(there, logs, -1e30)
    _, powers, total = powers_below_top(masked, there)
    has_any = total > 0
    divisor = tl.where(has_any, total, 1.0)
    return powers / divisor[:, None]


@triton.jit
def router_topk_kernel(
    logits_TE, bias_E, counts, sums, weights_TK, ids_TK,
    T, E, length, first, blocks, scale,
    K: constexpr, SCORE: constexpr, NORMALIZE: constexpr,
    GROUPS: constexpr, CHOSEN: constexpr, PAIRS: constexpr,
    IMPOSED: constexpr,
    TOKENS: constexpr, WIDTH: constexpr, SLOTS: constexpr, PLACES: constexpr,
):  # fmt: skip
    """Scores, then K times the best that is left, then the weights of the chosen. IMPOSED: ids_TK are given. A line of
    counts: choices of each expert. A line of sums: its shares, and the square of the log-sum-exp."""
    # scores
    _, t, there_t = program_tokens(T, length, first, blocks, TOKENS)
    e = tl.arange(0, WIDTH)
    real_e = e < E
    inside = tile_mask(there_t, real_e)
    at = tile_offsets(t, e, E)
    logits = load_or_zero(logits_TE + at, inside)
    IS_SIGMOID: constexpr = SCORE == "sigmoid"
    logs, shares = normalized_scores(logits, inside, IS_SIGMOID)
    # sums of shares and squares over this program's tokens
    program = wide_program_id(0)
    width = E + 1
    line = sums + program * width
    real_shares = zero_outside(shares, inside)
    shares_E = tl.sum(real_shares, 0)
    store_inside(line + e, shares_E, real_e)
    z, _ = log_sum_exp(logits, inside)
    squares = z * z
    squares = zero_outside(squares, there_t)
    square = tl.sum(squares, 0)
    tl.store(line + E, square)
    # what the weights are made from
    scores = tl.sigmoid(logits) if IS_SIGMOID else shares
    if NORMALIZE == "chosen":
        source = logs
    elif NORMALIZE == "all":
        source = shares
    else:
        source = scores
    # selection scores, within the best groups
    selection = logits if SCORE == "softmax_chosen" else scores
    bias = load_or_zero(bias_E + e, real_e)
    selection += bias[None, :]
    if GROUPS > CHOSEN and not IMPOSED:
        allowed = in_best_groups(selection, inside, e, E, GROUPS, CHOSEN, PAIRS, TOKENS, WIDTH, PLACES)
        selection = tl.where(allowed, selection, -float("inf"))
    # main loop over the K choices
    k = tl.arange(0, SLOTS)
    free = inside
    values = fp32_zeros(TOKENS, SLOTS)
    zeros = tl.zeros([TOKENS, SLOTS], tl.int32)
    ids = zeros - 1
    chosen = fp32_zeros(TOKENS, WIDTH)
    for turn in tl.static_range(K):
        # the expert of this turn
        if IMPOSED:
            which = chosen_expert(ids_TK, t, there_t, turn, K)
        else:
            _, best = best_candidate(selection, free, e, WIDTH)
            which = tl.minimum(best, E - 1)  # there is no best one where all scores are NaN
        taken = is_column(e, which)
        free = free & ~taken
        counted = taken & inside
        chosen += tl.where(counted, 1.0, 0.0)
        # its place among the chosen
        taken_source = zero_outside(source, taken)
        value = tl.sum(taken_source, 1)
        values = put_column(values, k, turn, value)
        ids = put_column(ids, k, turn, which)
    chosen_E = tl.sum(chosen, 0)
    counts_E = chosen_E.to(tl.int64)
    store_inside(counts + program * E + e, counts_E, real_e)
    # epilogue: normalise over the chosen, scale, store
    there = ids >= 0
    if NORMALIZE == "chosen":
        values = softmax_over_chosen(values, there)
    scaled = values * scale
    weights = zero_outside(scaled, there)
    out = tile_offsets(t, k, K)
    real = tile_mask(there_t, k < K)
    store_inside(weights_TK + out, weights, real)
    if not IMPOSED:
        ids = ids.to(tl.int64)
        store_inside(ids_TK + out, ids, real)


@triton.jit
def scatter_to_experts(d, ids_TK, t, there_t, e, k, K: constexpr, TOKENS: constexpr, WIDTH: constexpr):
    """Values of the choices, in the columns of the experts chosen."""
    sent = fp32_zeros(TOKENS, WIDTH)
    for turn in tl.static_range(K):
        which = chosen_expert(ids_TK, t, there_t, turn, K)
        is_turn = k == turn
        is_turn = is_turn[None, :]
        of_turn = zero_outside(d, is_turn)
        value = tl.sum(of_turn, 1)
        mine = is_column(e, which)
        value = value[:, None]
        sent += zero_outside(value, mine)
    return sent


@triton.jit
def softmax_backward(probs, d):
    """dlog = p (dp - p . dp)."""
    products = probs * d
    along = tl.sum(products, 1)
    excess = d - along[:, None]
    return probs * excess


@triton.jit
def router_topk_backward_kernel(
    dweights_TK, dshares_SE, dsquares_S,
    logits_TE, weights_TK, ids_TK, dlogits_TE,
    T, E, length, first, blocks, scale,
    K: constexpr, SCORE: constexpr, NORMALIZE: constexpr,
    TOKENS: constexpr, WIDTH: constexpr, SLOTS: constexpr,
):  # fmt: skip
    """The weights' softmax over the chosen logs, the shares' over all, then the logs' own derivative. The square of
    z = logsumexp(logits): 2 z softmax. Outputs that no later op used have gradient None."""
    # scores again
    sequence, t, there_t = program_tokens(T, length, first, blocks, TOKENS)
    e = tl.arange(0, WIDTH)
    k = tl.arange(0, SLOTS)
    inside = tile_mask(there_t, e < E)
    at = tile_offsets(t, e, E)
    logits = load_or_zero(logits_TE + at, inside)
    IS_SIGMOID: constexpr = SCORE == "sigmoid"
    _, shares = normalized_scores(logits, inside, IS_SIGMOID)
    # gradient of the chosen scores
    chosen = tile_offsets(t, k, K)
    real = tile_mask(there_t, k < K)
    d = fp32_zeros(TOKENS, SLOTS)
    if dweights_TK is not None:
        dweights = load_or_zero(dweights_TK + chosen, real)
        d += dweights * scale
    if NORMALIZE == "chosen":
        weights = load_or_zero(weights_TK + chosen, real)
        probs = weights / scale
        d = softmax_backward(probs, d)
    sent = scatter_to_experts(d, ids_TK, t, there_t, e, k, K, TOKENS, WIDTH)
    # gradient of the shares, then of the logs
    dshares = fp32_zeros(TOKENS, WIDTH)
    if dshares_SE is not None:
        line = dshares_SE + sequence * E
        from_losses = load_or_zero(line + e, e < E)
        dshares += from_losses[None, :]
    FROM_SHARES: constexpr = NORMALIZE == "none" and not IS_SIGMOID
    if NORMALIZE == "all" or FROM_SHARES:
        dshares += sent
    dlogs = softmax_backward(shares, dshares)
    if NORMALIZE == "chosen":
        dlogs += sent
    # gradient of the logits; s = sigmoid(x): d log s = (1 - s) dx, d s = s (1 - s) dx
    if IS_SIGMOID:
        s = tl.sigmoid(logits)
        if NORMALIZE == "none":
            dlogs += s * sent
        dlogs = dlogs * (1 - s)
    # z-loss
    if dsquares_S is not None:
        z, powers = log_sum_exp(logits, inside)
        dsquare = tl.load(dsquares_S + sequence)
        twice = dsquare * 2
        dlogs += twice * z[:, None] * powers
    store_inside(dlogits_TE + at, dlogs, inside)


@triton.jit
def load_choices(ids_R, e, R, WIDTH: constexpr, BLOCK: constexpr):
    """This block's choices, and for each of them a line of experts with a one in its column."""
    r = program_block(0, BLOCK)
    real = r < R
    ids = tl.load(ids_R + r, mask=real, other=WIDTH)
    ids = ids.to(tl.int32)
    same = is_column(e, ids)
    return r, same.to(tl.int32)


@triton.jit
def count_choices_kernel(ids_R, counts_BE, R, E, WIDTH: constexpr, BLOCK: constexpr):
    """First pass of the counting sort: choices of each expert in a block."""
    e = tl.arange(0, WIDTH)
    _, same = load_choices(ids_R, e, R, WIDTH, BLOCK)
    counts = tl.sum(same, 0)
    line = counts_BE + tl.program_id(0) * E
    real_e = e < E
    store_inside(line + e, counts, real_e)


@triton.jit
def block_offsets_kernel(counts_BE, total_E, B, E, WIDTH: constexpr, STEP: constexpr):
    """Second pass, in place, for a few experts: the rows that each of them gets from the blocks before."""
    e = program_block(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    for first in range(0, B, STEP):
        b = numbers_from(first, STEP)
        inside = tile_mask(b < B, e < E)
        at = tile_pointers(counts_BE, b, e, E)
        counts = load_or_zero(at, inside)
        up_to = tl.cumsum(counts, 0)
        before = up_to - counts
        offsets = total[None, :] + before
        store_inside(at, offsets, inside)
        total += tl.sum(counts, 0)
    real_e = e < E
    store_inside(total_E + e, total, real_e)


@triton.jit
def place_rows_kernel(
    ids_R, weights_R, base_BE, total_E,
    index_R, slots_R, weight_R, ends_E,
    R, E,
    K: constexpr, WIDTH: constexpr, BLOCK: constexpr, ALONE: constexpr,
):  # fmt: skip
    """Third pass: the row of each choice, in both directions, and its weight. ALONE: one block has all choices, and
    there are no passes before."""
    # where each expert's rows begin and end
    e = tl.arange(0, WIDTH)
    r, same = load_choices(ids_R, e, R, WIDTH, BLOCK)
    if ALONE:
        total = tl.sum(same, 0)
    else:
        total = load_or_zero(total_E + e, e < E)
    ends = tl.cumsum(total, 0)
    begins = ends - total
    if tl.program_id(0) == 0:
        real_e = e < E
        store_inside(ends_E + e, ends, real_e)
    # an expert's first row, plus its rows of earlier blocks, plus its rows of this block
    base = begins
    if not ALONE:
        line = base_BE + tl.program_id(0) * E
        base += load_or_zero(line + e, e < E)
    up_to = tl.cumsum(same, 0)
    before = up_to - 1
    rank = base[None, :] + before
    own_rank = same * rank
    row = tl.sum(own_rank, 1)
    # the row's token, the choice's row, the row's weight
    real = r < R
    store_inside(slots_R + r, row, real)
    at = index_R + row
    token = r // K
    store_inside(at, token, real)
    weight = load_or_zero(weights_R + r, real)
    store_inside(weight_R + row, weight, real)


def topk_tile_shape(experts: int, choices: int, length: int) -> dict[str, int]:
    """Tokens and experts of a program, and places for a token's choices. A row lies in as many threads of few tokens as
    of many: its sums have the same order, and the same bits. Where rows begin at multiples of 16 scores, a thread has
    at least four of them, elsewhere one, so that a row lies in as many warps as it has 32 scores."""
    width = triton.next_power_of_2(experts)
    least = max(1, 128 // width)
    most = max(1, 2048 // width)
    tokens = triton.next_power_of_2(length)
    tokens = min(max(least, tokens), most)
    warps_of_row = width // 32 if experts % 16 else 1
    warps = max(1, tokens * width // 128, warps_of_row)
    slots = triton.next_power_of_2(choices)
    return {"TOKENS": tokens, "WIDTH": width, "SLOTS": slots, "num_warps": min(warps, 4)}


def launch_router_topk(
    logits_TE: Tensor,
    bias_E: Tensor,
    spec: RouterSpec,
    imposed_TK: Tensor | None,
    span: TokenSpan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weights and ids of the chosen experts; over sequences: counts of choices, scores as shares of one, squares."""
    t, experts = logits_TE.shape
    k = spec.k
    weights_TK = logits_TE.new_empty(t, k)
    ids_TK = imposed_TK
    if ids_TK is None:
        ids_TK = torch.empty_like(weights_TK, dtype=torch.int64)
    length = span.length
    tile = topk_tile_shape(experts, k, length)
    sequences = span.sequences
    blocks = triton.cdiv(length, tile["TOKENS"])  # of a sequence
    counts_SPE = ids_TK.new_empty(sequences, blocks, experts, dtype=torch.int64)
    sums_SPe = logits_TE.new_empty(sequences, blocks, experts + 1)
    if blocks:
        grid = (sequences * blocks,)
        tensors = (logits_TE, bias_E, counts_SPE, sums_SPe, weights_TK, ids_TK)
        sizes = (t, experts, length, span.first, blocks, spec.scale)
        groups = spec.groups
        rule = (k, spec.score, spec.normalize, groups, spec.groups_chosen)
        has_pairs = experts // groups > 1
        pairs = spec.group_score == "best_two" and has_pairs
        imposed = imposed_TK is not None
        places = triton.next_power_of_2(groups)
        launch = router_topk_kernel[grid]
        launch(*tensors, *sizes, *rule, PAIRS=pairs, IMPOSED=imposed, PLACES=places, **tile)
    counts_SE = add_up_lines(counts_SPE)
    sums_Se = add_up_lines(sums_SPe)
    shares_SE = sums_Se[:, :experts]
    squares_S = sums_Se[:, experts]
    return weights_TK, ids_TK, counts_SE, shares_SE, squares_S


def add_up_lines(lines_SPN: Tensor) -> Tensor:
    """Sums over the programs of each sequence; of one program, its line."""
    return lines_SPN[:, 0] if lines_SPN.shape[1] == 1 else lines_SPN.sum(1)


def launch_topk_backward(
    dweights_TK: Tensor | None,
    dshares_SE: Tensor | None,
    dsquares_S: Tensor | None,
    logits_TE: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    spec: RouterSpec,
    span: TokenSpan,
) -> Tensor:
    t, experts = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    k = spec.k
    length = span.length
    tile = topk_tile_shape(experts, k, length)
    blocks = triton.cdiv(length, tile["TOKENS"])
    if t:
        grid = (span.sequences * blocks,)
        gradients = (dweights_TK, dshares_SE, dsquares_S)
        tensors = (logits_TE, weights_TK, ids_TK, dlogits_TE)
        sizes = (t, experts, length, span.first, blocks, spec.scale)
        rule = (k, spec.score, spec.normalize)
        launch = router_topk_backward_kernel[grid]
        launch(*gradients, *tensors, *sizes, *rule, **tile)
    return dlogits_TE


def launch_arrange_rows(ids_NK: Tensor, weights_NK: Tensor, experts: int) -> tuple[Tensor, ...]:
    """Rows sorted by expert, stably: index_R, slots_NK, weight_R and the end of each expert. A counting sort in three
    passes (count, scan, place), or in the last one alone where one block has all choices: the same on every run, and
    nothing waits for the host."""
    n, k = ids_NK.shape
    rows = n * k
    integers = ids_NK.new_empty(0, dtype=torch.int32)
    index_R = integers.new_empty(rows)
    slots_NK = integers.new_empty(n, k)
    ends_E = integers.new_empty(experts)
    weight_R = weights_NK.new_empty(rows)
    if not rows:
        ends_E.zero_()
        return index_R, slots_NK, weight_R, ends_E
    ids_NK = ids_NK.contiguous()
    weights_NK = weights_NK.contiguous()
    blocks = triton.cdiv(rows, BLOCK)
    alone = blocks == 1
    counted = (None, None) if alone else count_before_blocks(ids_NK, blocks, experts)
    inputs = (ids_NK, weights_NK, *counted)
    outputs = (index_R, slots_NK, weight_R, ends_E)
    tile = place_tile_shape(experts, rows)
    place = place_rows_kernel[(blocks,)]
    place(*inputs, *outputs, rows, experts, k, ALONE=alone, **tile)
    return outputs


def place_tile_shape(experts: int, rows: int) -> dict[str, int]:
    """Experts and choices of a program, and as many warps as these keep busy."""
    width = triton.next_power_of_2(experts)
    block = min(BLOCK, triton.next_power_of_2(rows))
    warps = min(max(1, block * width // 512), 8)
    return {"WIDTH": width, "BLOCK": block, "num_warps": warps}


def count_before_blocks(ids_NK: Tensor, blocks: int, experts: int) -> tuple[Tensor, Tensor]:
    """The rows that each expert gets from the blocks before each block, and from all."""
    rows = ids_NK.numel()
    width = triton.next_power_of_2(experts)
    counts_BE = ids_NK.new_empty(blocks, experts, dtype=torch.int32)
    count = count_choices_kernel[(blocks,)]
    count(ids_NK, counts_BE, rows, experts, width, BLOCK, num_warps=8)
    total_E = counts_BE.new_empty(experts)
    scans = triton.cdiv(experts, SCAN_EXPERTS)
    scan = block_offsets_kernel[(scans,)]
    scan(counts_BE, total_E, blocks, experts, SCAN_EXPERTS, SCAN_STEP, num_warps=8)
    return counts_BE, total_E
