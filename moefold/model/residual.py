"""The residual stream of a transformer, with the last layer's output not yet added to it.

    stream, h_TD = stream.normed(norm)      # adds the pending output, and normalises the sum: one pass over memory
    stream = stream.plus(attention(h_TD))   # the output waits for the next norm

Adding lazily is what lets one kernel do the addition and the norm that follows it, forward and backward. Blocks are
written as in a textbook; only this file holds the pair.

T tokens of this rank, D width.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefold.model.norm import AddNorm


class ResidualStream(NamedTuple):
    """The stream is `x_TD + pending_TD`. A named tuple, so that a carry that holds it can be flattened and cut."""

    x_TD: Tensor
    pending_TD: Tensor | None = None

    def normed(self, norm: AddNorm) -> tuple[ResidualStream, Tensor]:
        """The stream with nothing pending, and its norm."""
        x_TD, h_TD, _ = norm(self.x_TD, self.pending_TD)
        return ResidualStream(x_TD), h_TD

    def normed_for_two(self, norm: AddNorm) -> tuple[ResidualStream, Tensor, Tensor]:
        """The stream, and its norm once for each of two consumers: their gradients are then summed inside the norm's
        backward instead of in a pass of their own."""
        x_TD, first_TD, second_TD = norm(self.x_TD, self.pending_TD)
        return ResidualStream(x_TD), first_TD, second_TD

    def plus(self, output_TD: Tensor) -> ResidualStream:
        """The stream with a layer's output pending."""
        return ResidualStream(self.settled(), output_TD)

    def settled(self) -> Tensor:
        """One tensor: what a pipeline stage sends to the next."""
        return self.x_TD if self.pending_TD is None else self.x_TD + self.pending_TD
