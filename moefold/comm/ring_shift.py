"""A turn of the ring: hand a tensor to the next rank and take the previous rank's, while something else is computed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moefold.comm import byte_counters
from moefold.comm.check_collectives import check_agreement
from moefold.comm.p2p import staged_through_host
from moefold.layout.axes import Axis


class RingShift:
    """Starts sending at once; `arrived` waits. On an axis of size one the tensor itself arrives."""

    def __init__(self, x: torch.Tensor, axis: Axis):
        self.sent, self.device = staged_through_host(x.contiguous(), axis), x.device
        self.received, self.waits = self.sent, []
        if axis.size > 1:
            check_agreement("turn", axis, x)
            byte_counters.note_bytes_sent("turn", axis, x.nbytes)
            self.received = torch.empty_like(self.sent)
            after, before = axis.ranks[(axis.index + 1) % axis.size], axis.ranks[axis.index - 1]
            self.waits = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, self.sent, after, axis.group),
                    dist.P2POp(dist.irecv, self.received, before, axis.group),
                ]
            )

    def arrived(self) -> torch.Tensor:
        for wait in self.waits:
            wait.wait()
        return self.received.to(self.device)
