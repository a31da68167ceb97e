"""One block of ring attention: attention to some of the keys, with a softmax that runs over the keys of all blocks.

Forward returns the block's own softmax and its log-sum-exp, by which blocks are merged. Backward takes the log-sum-exp
over all keys and delta = sum(dy * y) per query, and returns this block's summands of the gradients. The first query is
`ahead` positions behind the first key. A query sees keys up to its own position and, with a window, at most so many of
them; with documents, keys from `begins_BS` on, 0 or more, which never decreases from one query to the next. A query
that sees no key here has zeros and a log-sum-exp of -inf.

Results and gradients of a block have the type of the inputs; the ring sums them in fp32.

B sequences, S queries, L keys, H query heads, G key/value heads, D head width, V width of a value head. Not
differentiable by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.attention.attention import attention_mask, heads_first, random_document_begins
from moefold.kernels.facts import AttentionShape
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op, register_inner_op

Gradients = tuple[Tensor, Tensor, Tensor]


@register_inner_op
def attention_block(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out_BSHV, and lse_BHS in fp32 or better."""
    _, _, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window, begins_BS)
    lse_BHS = scores.logsumexp(-1)
    log_p = scores - lse_BHS[..., None]
    log_p = log_p.nan_to_num(nan=-torch.inf)  # NaN: -inf minus -inf, of a query that sees no key
    out = log_p.exp() @ v
    out_BSHV = out.transpose(1, 2)
    out_BSHV = out_BSHV.to(q_BSHD.dtype)
    return out_BSHV, lse_BHS


@attention_block.register_fast("triton")
def attention_block_triton(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from moefold.kernels.attention.ring_block_triton import block_forward

    return block_forward(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window, begins_BS)


@attention_block.register_fast("hopper")
def attention_block_hopper(
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cuDNN where the block is square and either causal or wholly visible; other blocks go to Triton."""
    if not is_plain_block(q_BSHD, k_BLGD, ahead, window, begins_BS):
        return attention_block_triton(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window, begins_BS)
    q = q_BSHD.transpose(1, 2)
    k = k_BLGD.transpose(1, 2)
    v = v_BLGV.transpose(1, 2)
    causal = ahead == 0
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(q, k, v, None, True, 0.0, causal, False, scale=scale)
    out_BSHV = out.transpose(1, 2)
    by_query = q.shape[:3]
    lse_BHS = lse.view(by_query)
    return out_BSHV, lse_BHS


def is_plain_block(q_BSHD: Tensor, k_BLGD: Tensor, ahead: int, window: int, begins_BS: Tensor | None = None) -> bool:
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


@register_inner_op
def attention_block_backward(
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None = None,
) -> Gradients:
    """dq, dk, dv of this block."""
    q, k, v, scores = masked_block_scores(q_BSHD, k_BLGD, v_BLGV, scale, ahead, window, begins_BS)
    dy_BHSV = dy_BSHV.transpose(1, 2)
    dy = dy_BHSV.to(scores.dtype)
    # Nested, so that no further block of scores is alive.
    p = (scores - lse_BHS[..., None]).exp()
    # dS = P (dP - delta)
    dp = dy @ v.mT
    ds = p * (dp - delta_BHS[..., None]) * scale
    # dQ = dS K, dK = dS^T Q, dV = P^T dO
    dq_BHSD = ds @ k
    dq = dq_BHSD.transpose(1, 2)
    groups = k_BLGD.shape[2]
    dk_BHLD = ds.mT @ q
    dk = sum_over_groups(dk_BHLD, groups)
    dv_BHLV = p.mT @ dy
    dv = sum_over_groups(dv_BHLV, groups)
    dq = dq.to(q_BSHD.dtype)
    dk = dk.to(k_BLGD.dtype)
    dv = dv.to(v_BLGV.dtype)
    return dq, dk, dv


@attention_block_backward.register_fast("triton")
def attention_block_backward_triton(
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None = None,
) -> Gradients:
    from moefold.kernels.attention.ring_block_triton import block_backward

    return block_backward(dy_BSHV, q_BSHD, k_BLGD, v_BLGV, lse_BHS, delta_BHS, scale, ahead, window, begins_BS)


@attention_block_backward.register_fast("hopper")
def attention_block_backward_hopper(
    dy_BSHV: Tensor,
    q_BSHD: Tensor,
    k_BLGD: Tensor,
    v_BLGV: Tensor,
    lse_BHS: Tensor,
    delta_BHS: Tensor,
    scale: float,
    ahead: int,
    window: int,
    begins_BS: Tensor | None = None,
) -> Gradients:
    """The kernels of causal attention's backward, causal or over all keys; long blocks by chunks of them; other blocks
    go to Triton."""
    from moefold.kernels.attention.backward_hopper_launch import (
        hopper_backward_applies,
        hopper_block_backward,
        hopper_chunks,
        launch_hopper_chunks,
    )

    heads = (dy_BSHV, q_BSHD, k_BLGD, v_BLGV)
    sums = (lse_BHS, delta_BHS)
    causal = ahead == 0
    plan = None
    if is_plain_block(q_BSHD, k_BLGD, ahead, window, begins_BS):
        if hopper_backward_applies(q_BSHD, k_BLGD, scale, causal):
            return hopper_block_backward(scale, *heads, *sums, causal)
        plan = hopper_chunks(q_BSHD, k_BLGD, scale)
    if plan is None:
        return attention_block_backward_triton(*heads, *sums, scale, ahead, window, begins_BS)
    return launch_hopper_chunks(*heads, *sums, scale, plan, causal)


@register_in_place_op
def merge_attention_block(out_BSHV: Tensor, lse_BHS: Tensor, part_BSHV: Tensor, part_lse_BHS: Tensor) -> None:
    """Add a block to what earlier blocks gave: softmax over both sets of keys. Neither may have seen any key: then both
    weights are zero."""
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


@merge_attention_block.register_fast("triton")
def merge_attention_block_triton(out_BSHV: Tensor, lse_BHS: Tensor, part_BSHV: Tensor, part_lse_BHS: Tensor) -> None:
    from moefold.kernels.attention.ring_block_triton import merge_block

    merge_block(out_BSHV, lse_BHS, part_BSHV, part_lse_BHS)


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
    begins_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v with heads first, and the scores, -inf where a key is not visible."""
    wide = torch.promote_types(q_BSHD.dtype, torch.float32)
    q, k, v = heads_first(q_BSHD, k_BLGD, v_BLGV, wide)
    scores = q @ k.mT * scale
    _, _, queries, keys = scores.shape
    device = q.device
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
    for b, s, length, h, g, d, dv, ahead, window in BLOCK_CASE_SIZES:
        q = draw.normal(b, s, h, d)
        k = draw.normal(b, length, g, d, seed=1)
        v = draw.normal(b, length, g, dv, seed=2)
        name = f"{b}x{s} on {length}, {h}/{g} heads of {d}, {ahead} ahead"
        if window:
            name += f", window {window}"
        scale = d**-0.5
        inputs = (q, k, v, scale, ahead, window)
        shape = AttentionShape(length, h, g, d, dv)
        yield KernelCase(name, inputs, attention=shape)
        begins = begins_in_block(draw.device, b, s, ahead)
        yield KernelCase(f"{name}, documents", (*inputs, begins), attention=shape)


def begins_in_block(device: str, sequences: int, queries: int, ahead: int) -> Tensor:
    """Document begins among the keys of a block: before, within and behind them."""
    positions = ahead + queries
    begins = random_document_begins(device, sequences, positions)
    return begins[:, -queries:]


@attention_block_backward.register_cases
def attention_block_backward_cases(draw: CaseInputs) -> Cases:
    for case in attention_block.cases(*draw):
        q, k, v, *setting = case.inputs
        out, lse = attention_block.reference(*case.inputs)
        shape = out.shape
        dy = draw.normal(*shape, seed=3)
        lse = lse.clamp(min=-30)  # a query that sees no key here sees some in other blocks
        wide = lse.dtype
        wide_dy = dy.to(wide)
        products = wide_dy * out.to(wide)
        delta_BSH = products.sum(-1)
        delta = delta_BSH.transpose(1, 2)
        inputs = (dy, q, k, v, lse, delta, *setting)
        yield KernelCase(case.name, inputs, attention=case.attention)


MERGE_CASE_SIZES = [  # B, S, H, V
    (1, 1, 1, 8),
    (2, 33, 4, 24),
    (1, 130, 6, 128),
]


@merge_attention_block.register_cases
def merge_attention_block_cases(draw: CaseInputs) -> Cases:
    for b, s, h, width in MERGE_CASE_SIZES:
        out = draw.wide(b, s, h, width)
        part = draw.normal(b, s, h, width, seed=1)
        lse = draw.wide(b, h, s, seed=2, scale=4.0)
        part_lse = draw.wide(b, h, s, seed=3, scale=4.0)
        shape = AttentionShape(s, h, h, width, width)
        name = f"{b}x{s}, {h} heads of {width}"
        inputs = (out, lse, part, part_lse)
        yield KernelCase(name, inputs, attention=shape)
        some = lse.masked_fill(lse < 0, -torch.inf)
        some_too = part_lse.masked_fill(part_lse < 0, -torch.inf)
        seen_BHS = some.isfinite()
        seen_BSH = seen_BHS.transpose(1, 2)
        seen_out = out * seen_BSH[..., None]
        inputs = (seen_out, some, part, some_too)
        yield KernelCase(f"{name}, some without keys", inputs, attention=shape)
