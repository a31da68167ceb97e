"""Attention of one new position of every sequence to the positions that are kept of it, while text is generated.

Slot l of L holds the last position p with p = l modulo L, up to the new one, whose key and value are written to their
slot first. A sequence sees positions from `begin_B` on; a window is as many slots as it has positions. The number of
the new position is on the device: nothing here depends on it but values.

    position 7, 3 slots     slot 0: 6   slot 1: 7, the new one   slot 2: 5

Without a room of values, values are the first columns of keys: those of latent attention.

B sequences, L slots, H query heads, G key/value heads, D head width, V width of a value head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.kernels.facts import AttentionShape
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_in_place_op


@register_in_place_op
def cached_attention(
    out_BHV: Tensor,
    q_BHD: Tensor,
    k_BGD: Tensor,
    v_BGV: Tensor | None,
    keys_BLGD: Tensor,
    values_BLGV: Tensor | None,
    position: Tensor,
    begin_B: Tensor,
    scale: float,
    sink_H: Tensor | None = None,
) -> None:
    """Write key and value of the new position, then the softmax over all that its query sees to `out_BHV`."""
    slots = keys_BLGD.shape[1]
    slot = position % slots
    keys_BLGD.index_copy_(1, slot, k_BGD[:, None])
    width = out_BHV.shape[-1]
    if values_BLGV is None or v_BGV is None:
        values_BLGV = keys_BLGD[..., :width]
    else:
        values_BLGV.index_copy_(1, slot, v_BGV[:, None])
    wide = torch.promote_types(q_BHD.dtype, torch.float32)
    groups = k_BGD.shape[1]
    by_group = (groups, -1)
    q_BGHD = q_BHD.unflatten(1, by_group).to(wide)
    keys_BGDL = keys_BLGD.permute(0, 2, 3, 1).to(wide)
    scores_BGHL = q_BGHD @ keys_BGDL * scale
    is_seen_BL = slots_seen(slots, position, begin_B)
    scores_BGHL = scores_BGHL.where(is_seen_BL[:, None, None], -torch.inf)
    scores_BHL = scores_BGHL.flatten(1, 2)
    probs_BHL = softmax_beside_sink(scores_BHL, sink_H)
    probs_BGHL = probs_BHL.unflatten(1, by_group)
    values_BGLV = values_BLGV.transpose(1, 2).to(wide)
    y_BGHV = probs_BGHL @ values_BGLV
    out_BHV.copy_(y_BGHV.flatten(1, 2))


def slots_seen(slots: int, position: Tensor, begin_B: Tensor) -> Tensor:
    """(B, L): whether a slot holds a position of the sequence, from its begin on."""
    slot_L = torch.arange(slots, device=position.device)
    back_L = (position - slot_L) % slots
    held_L = position - back_L
    return held_L >= begin_B[:, None]


def softmax_beside_sink(scores_BHL: Tensor, sink_H: Tensor | None) -> Tensor:
    """A sink takes a share of the probability and has no value."""
    if sink_H is None:
        return scores_BHL.softmax(-1)
    wide_H = sink_H.to(scores_BHL.dtype)
    sinks_BH1 = wide_H[:, None].expand(len(scores_BHL), -1, 1)
    joined = torch.cat((scores_BHL, sinks_BH1), dim=-1)
    return joined.softmax(-1)[..., :-1]


@cached_attention.register_fast("triton")
def cached_attention_triton(
    out_BHV: Tensor,
    q_BHD: Tensor,
    k_BGD: Tensor,
    v_BGV: Tensor | None,
    keys_BLGD: Tensor,
    values_BLGV: Tensor | None,
    position: Tensor,
    begin_B: Tensor,
    scale: float,
    sink_H: Tensor | None = None,
) -> None:
    from moefold.kernels.attention.cached_attention_triton import launch_cached_attention

    new = (q_BHD, k_BGD, v_BGV)
    rooms = (keys_BLGD, values_BLGV)
    launch_cached_attention(out_BHV, *new, *rooms, position, begin_B, scale, sink_H)


CACHED_CASE_SIZES = [  # B, L, H, G, D, V (0: the first columns of keys), position
    (1, 1, 1, 1, 16, 16, 0),
    (2, 40, 4, 2, 16, 16, 17),
    (3, 7, 4, 4, 32, 16, 23),
    (2, 90, 6, 2, 64, 64, 89),
    (2, 70, 20, 1, 24, 0, 65),
    (1, 9, 4, 1, 80, 0, 31),
]


@cached_attention.register_cases
def cached_attention_cases(draw: CaseInputs) -> Cases:
    device = draw.device
    for b, slots, h, g, d, dv, number in CACHED_CASE_SIZES:
        q = draw.normal(b, h, d)
        k = draw.normal(b, g, d, seed=1)
        keys = draw.normal(b, slots, g, d, seed=2)
        v = values = None
        if dv:
            v = draw.normal(b, g, dv, seed=3)
            values = draw.normal(b, slots, g, dv, seed=4)
        width = dv or d - 8
        out = draw.normal(b, h, width, seed=5)
        position = torch.tensor([number], device=device)
        begins = [number * i // b for i in range(b)]
        begin = torch.tensor(begins, device=device)
        sink = draw.normal(h, seed=6)
        shape = AttentionShape(slots, h, g, d, width)
        tensors = (out, q, k, v, keys, values, position, begin, d**-0.5)
        name = f"{b} at {number} on {slots}, {h}/{g} heads of {d}, values of {width}"
        yield KernelCase(name, tensors, attention=shape, sees_all=False, square=False)
        yield KernelCase(f"{name}, sinks", (*tensors, sink), attention=shape, sees_all=False, square=False)
