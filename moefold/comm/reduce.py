"""Summing gradients over ranks, each rank keeping its part, without waiting until the result is needed.

As fp32: one reduce-scatter. As bf16: every rank sends each other rank its part in bf16 and sums what it gets in fp32;
half the bytes of fp32, and one rounding of each summand where a bf16 ring would round at every hop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moefold.comm import traffic
from moefold.comm.collectives import REDUCE_SCATTER
from moefold.comm.contract import agree
from moefold.layout.axes import Axis


@dataclass
class Reduction:
    """A sum under way; `arrived` waits for it."""

    wait: Callable[[], object]
    result: Callable[[], torch.Tensor]

    def arrived(self) -> torch.Tensor:
        self.wait()
        return self.result()


def nothing() -> None: ...


def reduce_fp32(x: torch.Tensor, axis: Axis) -> Reduction:
    if axis.size == 1:
        return Reduction(nothing, lambda: x)
    agree("reduce", axis, x)
    traffic.note("reduce", axis, x.nbytes * (axis.size - 1) // axis.size)
    out = x.new_empty(len(x) // axis.size)
    work = REDUCE_SCATTER(out, x, group=axis.group, async_op=True)
    return Reduction(work.wait, lambda: out)  # pyright: ignore[reportOptionalMemberAccess]


def reduce_bf16(x: torch.Tensor, axis: Axis) -> Reduction:
    if axis.size == 1:
        return Reduction(nothing, lambda: x)
    sent = x.to(torch.bfloat16)
    agree("reduce", axis, sent)
    traffic.note("reduce", axis, sent.nbytes * (axis.size - 1) // axis.size)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=axis.group, async_op=True)
    return Reduction(work.wait, lambda: received.view(axis.size, -1).sum(0, dtype=x.dtype))  # pyright: ignore[reportOptionalMemberAccess]
