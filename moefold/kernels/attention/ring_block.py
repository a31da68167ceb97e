"""One block of ring attention: attention to some of the keys, with a softmax that runs over the keys of all blocks.

Forward merges the block's softmax into the result and the log-sum-exp of earlier blocks. Backward takes the log-sum-exp
over all keys and adds this block's summands to the gradients. All of these are in fp32 or better.

The first query is `ahead` positions behind the first key. A query sees keys up to its own position and, with a window,
at most so many of them; with documents, keys from `begins_BS` on, which never decrease from one query to the next. They
count from the first query: a document that began before it is below zero. A query that sees no key here keeps its sums.

The first block that some queries meet is `fresh`. It reads neither their result nor dQ, which may be uninitialised
memory, but writes them; in backward also delta = sum(dy * y) of each query, for the blocks that follow. Log-sum-exps
are there from the start (minus infinity, or those of sinks), as are sums of dK and dV.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head. Not
differentiable by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.attention.attention import attention_mask, heads_first, random_document_begins
from moefold.kernels.facts import AttentionShape
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


@register_in_place_op
def attention_block(
    out_BSHV: Tensor,
    lse_BHS: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
    fresh: bool,
) -> None:
    """Attend to these keys: the result and its log-sum-exp become those of the softmax over earlier keys and these."""
    _, _, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window, begins_BS)
    part_lse_BHS = scores.logsumexp(-1)
    log_p = scores - part_lse_BHS[..., None]
    log_p = log_p.nan_to_num(nan=-torch.inf)  # NaN: -inf minus -inf, of a query that sees no key
    part = log_p.exp() @ v
    part_BSHV = part.transpose(1, 2)
    if fresh:
        out_BSHV.zero_()
    # Neither side may have seen any key: then both weights are zero.
    joint_BHS = torch.logaddexp(lse_BHS, part_lse_BHS)
    old = share_of_sum(lse_BHS, joint_BHS)
    new = share_of_sum(part_lse_BHS, joint_BHS)
    added = part_BSHV * new
    out_BSHV.mul_(old)
    out_BSHV.add_(added)
    lse_BHS.copy_(joint_BHS)


def share_of_sum(lse_BHS: Tensor, joint_BHS: Tensor) -> Tensor:
    """exp(lse - joint), to be broadcast over values (B, S, H, 1); zero where both are minus infinity."""
    difference_BHS = lse_BHS - joint_BHS
    log_share_BHS = difference_BHS.nan_to_num(nan=-torch.inf)
    share_BHS = log_share_BHS.exp()
    share_BSH = share_BHS.transpose(1, 2)
    return share_BSH[..., None]


@attention_block.register_fast("triton")
def attention_block_triton(
    out_BSHV: Tensor,
    lse_BHS: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
    fresh: bool,
) -> None:
    from moefold.kernels.attention.masked_triton import Visible, merge_masked_attention

    visible = Visible(ahead, window, begins_BS, shift=ahead)
    merge_masked_attention(q_BSHD, k_BLGD, v_BLGV, visible, out_BSHV, lse_BHS, scale, fresh)


@attention_block.register_fast("hopper")
def attention_block_hopper(
    out_BSHV: Tensor,
    lse_BHS: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
    fresh: bool,
) -> None:
    """cuDNN and a merge where the block is square and either causal or wholly visible; other blocks go to Triton."""
    from moefold.kernels.attention.ring_block_triton import merge_block

    sums = (out_BSHV, lse_BHS)
    if not is_plain_block(q_BSHD, k_BLGD, ahead, window, begins_BS):
        mask = (ahead, window, begins_BS)
        return attention_block_triton(*sums, q_BSHD, k_BLGD, v_BLGV, scale, *mask, fresh)
    q = q_BSHD.transpose(1, 2)
    k = k_BLGD.transpose(1, 2)
    v = v_BLGV.transpose(1, 2)
    causal = ahead == 0
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    part, part_lse, *_ = attend(q, k, v, None, True, 0.0, causal, False, scale=scale)
    part_BSHV = part.transpose(1, 2)
    by_query = q.shape[:3]
    part_lse_BHS = part_lse.view(by_query)
    return merge_block(*sums, part_BSHV, part_lse_BHS, fresh)


def is_plain_block(q_BSHD: Tensor, k_BLGD: Tensor, ahead: int, window: int, begins_BS: Tensor | None) -> bool:
    """Whether a block is square, without documents, no window ends within it, and it is causal or wholly visible. One
    position, which cuDNN refuses, is not plain."""
    queries = q_BSHD.shape[1]
    keys = k_BLGD.shape[1]
    if begins_BS is not None or queries != keys or keys == 1:
        return False
    farthest = ahead + queries - 1
    window_ends_here = 0 < window <= farthest
    if window_ends_here:
        return False
    sees_all = ahead >= keys - 1
    return ahead == 0 or sees_all


@register_in_place_op
def attention_block_backward(
    dq_BSHD: Tensor,
    dk_BLGD: Tensor,
    dv_BLGV: Tensor,
    delta_BHS: Tensor,
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    y_BSHV: Tensor,
    lse_BHS: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
    fresh: bool,
) -> None:
    """Add this block's dQ, dK and dV. `y`: the result over all keys, of which a fresh block makes delta."""
    q, k, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window, begins_BS)
    wide = scores.dtype
    dy_BHSV = dy_BSHV.transpose(1, 2)
    dy = dy_BHSV.to(wide)
    if fresh:
        y_BHSV = y_BSHV.transpose(1, 2)
        products = dy * y_BHSV.to(wide)
        delta = products.sum(-1)
        delta_BHS.copy_(delta)
        dq_BSHD.zero_()
    # Nested, so that no further block of scores is alive.
    p = (scores - lse_BHS[..., None]).exp()
    # dS = P (dP - delta)
    dp = dy @ v.mT
    ds = p * (dp - delta_BHS[..., None]) * scale
    # dQ = dS K, dK = dS^T Q, dV = P^T dO
    of_queries = ds @ k
    dq_BSHD += of_queries.transpose(1, 2)
    groups = k_BLGD.shape[2]
    of_keys = ds.mT @ q
    dk_BLGD += sum_over_groups(of_keys, groups)
    of_values = p.mT @ dy
    dv_BLGV += sum_over_groups(of_values, groups)


@attention_block_backward.register_fast("triton")
def attention_block_backward_triton(
    dq_BSHD: Tensor,
    dk_BLGD: Tensor,
    dv_BLGV: Tensor,
    delta_BHS: Tensor,
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    y_BSHV: Tensor,
    lse_BHS: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
    fresh: bool,
) -> None:
    from moefold.kernels.attention.masked_triton import AttentionGradients, Visible, add_masked_gradients

    sums = AttentionGradients(dq_BSHD, dk_BLGD, dv_BLGV)
    heads = (dy_BSHV, q_BSHD, k_BLGD, v_BLGV)
    visible = Visible(ahead, window, begins_BS, shift=ahead)
    y = y_BSHV if fresh else None
    add_masked_gradients(sums, *heads, visible, y, lse_BHS, delta_BHS, scale, fresh)


@attention_block_backward.register_fast("hopper")
def attention_block_backward_hopper(
    dq_BSHD: Tensor,
    dk_BLGD: Tensor,
    dv_BLGV: Tensor,
    delta_BHS: Tensor,
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    y_BSHV: Tensor,
    lse_BHS: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
    fresh: bool,
) -> None:
    """The kernels of causal attention's backward, causal or over all keys, whose gradients are then added; other blocks
    go to Triton."""
    from moefold.kernels.attention.backward_hopper_launch import hopper_backward_applies, hopper_block_backward
    from moefold.kernels.attention.backward_triton import delta_of_queries
    from moefold.kernels.attention.heads_triton import contiguous_heads

    sums = (dq_BSHD, dk_BLGD, dv_BLGV)
    heads = (dy_BSHV, q_BSHD, k_BLGD, v_BLGV)
    causal = ahead == 0
    is_plain = is_plain_block(q_BSHD, k_BLGD, ahead, window, begins_BS)
    if not (is_plain and hopper_backward_applies(q_BSHD, k_BLGD, v_BLGV, scale, causal)):
        return attention_block_backward_triton(
            *sums, delta_BHS, *heads, y_BSHV, lse_BHS, scale, ahead, window, begins_BS, fresh
        )
    if fresh:
        y = contiguous_heads(y_BSHV)
        dy = contiguous_heads(dy_BSHV)
        delta = delta_of_queries(y, dy)
        delta_BHS.copy_(delta)
    dq, dk, dv = hopper_block_backward(*heads, lse_BHS, delta_BHS, scale, causal)
    if fresh:
        dq_BSHD.copy_(dq)
    else:
        dq_BSHD += dq
    dk_BLGD += dk
    dv_BLGV += dv
    return None


def begins_among_keys(begins_BS: Tensor | None, ahead: int) -> Tensor | None:
    """Begins of documents that count from the first query, as positions of keys: 0, of documents that began before."""
    if begins_BS is None:
        return None
    from_keys = begins_BS + ahead
    return from_keys.clamp(min=0)


def sum_over_groups(gradient: Tensor, groups: int) -> Tensor:
    """(B, H, L, width) summed over the query heads of each key/value head: (B, L, G, width)."""
    shape = (groups, -1)
    by_group = gradient.unflatten(1, shape)
    sum_BGLD = by_group.sum(2)
    return sum_BGLD.transpose(1, 2)


def masked_block_scores(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v with heads first, and the scores, -inf where a key is not visible."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    scores = q @ k.mT * scale
    _, _, queries, keys = scores.shape
    device = q.device
    begins_BS = begins_among_keys(begins_BS, ahead)
    visible = attention_mask(queries, keys, ahead, window, device, begins_BS)
    hidden = ~visible
    scores = scores.masked_fill(hidden, -torch.inf)
    return q, k, v, scores


BLOCK_CASE_SIZES = [  # B, S, L, H, G, D, V, ahead, window
    (1, 1, 2, 1, 1, 8, 8, 2, 0),
    (2, 8, 8, 4, 2, 16, 16, 0, 0),
    (2, 8, 24, 4, 1, 16, 16, 24, 0),
    (1, 8, 8, 2, 2, 24, 16, 0, 3),
    (2, 8, 8, 4, 2, 16, 16, 8, 5),
    (1, 8, 8, 1, 1, 8, 8, 32, 4),
    (1, 33, 33, 2, 1, 16, 16, 0, 0),
    (1, 17, 17, 1, 1, 8, 8, 17, 0),
    (1, 19, 37, 1, 1, 16, 24, 20, 11),
    (1, 200, 200, 4, 2, 64, 64, 0, 0),
    (2, 200, 200, 2, 1, 64, 64, 400, 0),
    (1, 256, 256, 4, 2, 128, 128, 256, 0),
    (1, 192, 192, 2, 1, 128, 128, 192, 100),
]


@attention_block.register_cases
def attention_block_cases(draw: CaseInputs) -> Cases:
    """Blocks of other queries' keys and, of those on the diagonal, also fresh ones."""
    for b, s, length, h, g, d, dv, ahead, window in BLOCK_CASE_SIZES:
        q = draw.normal(b, s, h, d)
        k = draw.normal(b, length, g, d, seed=1)
        v = draw.normal(b, length, g, dv, seed=2)
        out = draw.wide(b, s, h, dv, seed=3)
        lse = draw.wide(b, h, s, seed=4, scale=4.0)
        lse = lse.masked_fill(lse < -4, -torch.inf)  # queries that have seen no key yet
        out = out * seen_before(lse)
        name = f"{b}x{s} on {length}, {h}/{g} heads of {d}, {ahead} ahead"
        if window:
            name += f", window {window}"
        setting = (q, k, v, d**-0.5, ahead, window)
        shape = AttentionShape(length, h, g, d, dv)
        begins = begins_in_block(draw.device, b, s, ahead)
        yield KernelCase(name, (out, lse, *setting, None, False), attention=shape)
        yield KernelCase(f"{name}, documents", (out, lse, *setting, begins, False), attention=shape)
        if ahead == 0:
            nothing = torch.full_like(out, torch.nan)
            none_seen = torch.full_like(lse, -torch.inf)
            yield KernelCase(f"{name}, fresh", (nothing, none_seen, *setting, None, True), attention=shape)
            yield KernelCase(
                f"{name}, fresh with sinks, documents", (nothing, lse, *setting, begins, True), attention=shape
            )


def seen_before(lse_BHS: Tensor) -> Tensor:
    """Whether queries have seen keys, to be multiplied with results (B, S, H, 1)."""
    seen_BHS = lse_BHS.isfinite()
    seen_BSH = seen_BHS.transpose(1, 2)
    return seen_BSH[..., None]


def begins_in_block(device: str, sequences: int, queries: int, ahead: int) -> Tensor:
    """Begins of documents before, among and behind the keys of a block, counted from the first query."""
    positions = ahead + queries
    begins = random_document_begins(device, sequences, positions)
    return begins[:, -queries:] - ahead


@attention_block_backward.register_cases
def attention_block_backward_cases(draw: CaseInputs) -> Cases:
    for case in attention_block.cases(*draw):
        out, lse, *heads, scale, ahead, window, begins, fresh = case.inputs
        setting = (scale, ahead, window, begins, fresh)
        q, k, v = heads
        dy = draw.normal(*out.shape, seed=5)
        y = draw.normal(*out.shape, seed=6)
        # over all keys, those of other blocks too
        *_, scores = masked_block_scores(q, k, v, scale, ahead, window, begins)
        over_these = scores.logsumexp(-1)
        over_all = over_these.logaddexp(lse).clamp(min=-4)
        sums = [draw.wide(*x.shape, seed=7 + i) for i, x in enumerate(heads)]
        delta = draw.wide(*lse.shape, seed=10)
        if fresh:
            sums[0].fill_(torch.nan)
            delta.fill_(torch.nan)
        inputs = (*sums, delta, dy, *heads, y, over_all, *setting)
        yield KernelCase(case.name, inputs, attention=case.attention)
