"""FP8 sums of gradients over replicas: as a reduce-scatter, each rank keeps its part of the sum.

    send    every rank's part in E4M3, an fp32 scale for 128 gradients, by all-to-all
    sum     what arrives is dequantised and added in fp32, in the order of ranks

So each summand is rounded once and no sum is, where a reduce-scatter in FP8 would round partial sums again and again. A
rank's own part is quantised too: a sum does not depend on the rank that takes it. Payloads lie in the memory of the
gradients, which they overwrite: two of them take little more than half of it.

    fp32    | part 0        | part 1        | part 2        | part 3        |
    fp8     | 0 | 1 | 2 | 3 | from 0 | from 1 ..

n ranks, S gradients of a part, B bytes of its payload.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.grad_reduce import Allocator, PendingReduction, exchange_parts, wait_for_nothing
from moefold.kernels.quantise.fp8 import BLOCK, ScaleRule
from moefold.kernels.quantise.fp8_payload import row_payload_bytes
from moefold.kernels.quantise.payload_ops import REFERENCES, PayloadOps
from moefold.layout.axes import Axis

AT_ONCE = 8192 * BLOCK  # gradients that are quantised at once, so that temporary tensors stay small
NEAREST_SCALES = ScaleRule()


class PayloadMemory(NamedTuple):
    """Bytes (n, B) that are sent, a part for each rank, and bytes that arrive."""

    sent_nB: Tensor
    received_nB: Tensor


def reduce_scatter_fp8(
    x: Tensor,
    axis: Axis,
    allocate: Allocator = torch.empty,
    *,
    rule: ScaleRule = NEAREST_SCALES,
    payloads: PayloadOps = REFERENCES,
) -> PendingReduction:
    """Start to sum x over the axis; x itself is overwritten."""
    if axis.is_alone:
        return PendingReduction(wait_for_nothing, lambda: x)
    parts_nS = x.view(axis.size, -1)
    size = parts_nS.shape[1]
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    memory = memory_of_payloads(x, axis.size, allocate)
    for part_S, payload_B in zip(parts_nS, memory.sent_nB, strict=True):
        write_payload(part_S, payload_B, rule, payloads)
    wait = exchange_parts(memory.sent_nB, memory.received_nB, axis)

    def sum_of_payloads() -> Tensor:
        total_S = allocate(size, dtype=sum_dtype, device=x.device)
        payloads.sum_rows(total_S[None], memory.received_nB[:, None], rule.format)
        return total_S

    return PendingReduction(wait, sum_of_payloads)


def memory_of_payloads(
    x: Tensor,
    ranks: int,
    allocate: Allocator,
) -> PayloadMemory:
    """Memory of x itself where it is large enough: for fp32, but not for bf16."""
    size = len(x) // ranks
    each = row_payload_bytes(size)
    needed = 2 * ranks * each
    if needed <= x.nbytes and x.itemsize >= 4:
        memory = x.view(torch.uint8)
    else:
        memory = allocate(needed, dtype=torch.uint8, device=x.device)
    both = memory[:needed].view(2, ranks, each)
    return PayloadMemory(both[0], both[1])


def write_payload(
    part_S: Tensor,
    payload_B: Tensor,
    rule: ScaleRule,
    payloads: PayloadOps,
) -> None:
    """Write the bytes of a part, then its scales. The payload may lie in memory of this part or of parts before it:
    bytes are written where gradients have been read."""
    end = 0
    scales: list[Tensor] = []
    for piece in part_S.split(AT_ONCE):
        size = len(piece)
        packed_B = payloads.pack_rows(piece[None], rule)[0]
        begin, end = end, end + size
        payload_B[begin:end] = packed_B[:size]
        scales.append(packed_B[size:])
    payload_B[end:] = torch.cat(scales)
