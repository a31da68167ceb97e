"""Time of an MoE layer in row chunks: exchanges on one lane, shared and routed experts on the other.

    compute    shared       experts.0  experts.1  experts.2
    comm       DISPATCH.0 DISPATCH.1 DISPATCH.2  COMBINE.0  COMBINE.1  COMBINE.2

Backward is the same against the order: gradients of results are sent first, gradients of tokens last. Exposed are the
exchanges in which nothing computes, and of the hidden ones what their kernels take from the device.
"""

from __future__ import annotations

from typing import NamedTuple

OVERLAP_FRICTION = 0.45  # share of overlapped communication that compute still loses: its kernels occupy SMs


class ChunkedPass(NamedTuple):
    """Seconds of one pass through a layer: of one exchange of one chunk, of routed experts, and of what may run while
    the first chunk is sent."""

    exchange: float
    experts: float
    beside: float
    chunks: int

    @property
    def sending(self) -> float:
        """Seconds of all exchanges."""
        return 2 * self.chunks * self.exchange

    @property
    def end(self) -> float:
        """Seconds until the last chunk is back."""
        computed = self.beside
        returned = self.chunks * self.exchange  # the lane has sent all chunks
        for chunk in range(self.chunks):
            arrived = (chunk + 1) * self.exchange
            begun = max(computed, arrived)
            computed = begun + self.experts / self.chunks
            sent = max(returned, computed)
            returned = sent + self.exchange
        return returned

    @property
    def exposed(self) -> float:
        """Seconds that the exchanges add to those of compute."""
        waiting = self.end - self.beside - self.experts
        hidden = self.sending - waiting
        return waiting + OVERLAP_FRICTION * hidden
