"""Ring shift: send a tensor to the next rank and receive the previous rank's, overlapped with compute."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from moefold.comm.blocked_times import blocked
from moefold.comm.collectives import announce
from moefold.comm.p2p import staged_through_host
from moefold.layout.axes import Axis


class RingShift:
    """Starts to send when it is made; `arrived` waits. On an axis of size one the tensor itself arrives."""

    def __init__(self, x: Tensor, axis: Axis):
        self.device = x.device
        whole = x.contiguous()
        self.sent = staged_through_host(whole, axis)
        self.received = self.sent
        self.works = []
        if not axis.is_alone:
            announce("turn", axis, x, x.nbytes)
            self.received = torch.empty_like(self.sent)
            self.works = self.start_exchange(axis)

    def start_exchange(self, axis: Axis) -> list[dist.Work]:
        group = axis.group
        following = (axis.index + 1) % axis.size
        after = axis.ranks[following]
        before = axis.ranks[axis.index - 1]
        send = dist.P2POp(dist.isend, self.sent, after, group)
        receive = dist.P2POp(dist.irecv, self.received, before, group)
        return dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        with blocked():
            for work in self.works:
                work.wait()
        return self.received.to(self.device)
