"""The largest logits of a layer's heads, noted where queries meet keys in training (optim/qk_clip.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moefold.model.steps import inside_recompute


@dataclass
class LogitWatch:
    """The largest logit of each head of this rank since it was taken last. `op`: kernels/attention/largest_logit.py."""

    op: Callable[..., Tensor]
    largest_H: Tensor | None = None

    @torch.no_grad()
    def note(self, *inputs: object) -> None:
        """Inputs of the op. A forward that is run again for its backward has been noted."""
        if inside_recompute():
            return
        largest_H = self.op(*inputs)
        self.add(largest_H)

    def add(self, largest_H: Tensor) -> None:
        if self.largest_H is not None:
            largest_H = self.largest_H.maximum(largest_H)
        self.largest_H = largest_H

    def take(self) -> Tensor:
        assert self.largest_H is not None, "no microbatch has passed"
        largest_H = self.largest_H
        self.largest_H = None
        return largest_H

    def share(self, index: int, ranks: int) -> LogitWatch:
        """The watch of one of equal shares of the heads. Other shares are noted by other ranks."""
        return WatchOfShare(self.op, whole=self, index=index, ranks=ranks)


@dataclass(kw_only=True)
class WatchOfShare(LogitWatch):
    whole: LogitWatch
    index: int
    ranks: int

    def add(self, largest_H: Tensor) -> None:
        heads = len(largest_H)
        largest_RH = largest_H.new_full((self.ranks, heads), -torch.inf)
        largest_RH[self.index] = largest_H
        self.whole.add(largest_RH.flatten())
