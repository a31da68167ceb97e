"""The gradients of a bucket, side by side in one flat tensor that is there only while it is needed.

It is made when the first gradient of a step arrives, without clearing it: the first gradient of a parameter is written,
the next ones are added, and what got none is zeroed at the end. So gradients take the place of activations that
backward has used up, and one that a kernel wrote in its place costs nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class GradientSums:
    def __init__(self, spans: Sequence[tuple[int, int]], size: int, like: torch.Tensor, dtype: torch.dtype):
        self.spans, self.size, self.device, self.dtype = list(spans), size, like.device, dtype
        ends = [0, *(end for _, end in self.spans)]
        starts = [*(start for start, _ in self.spans), size]
        self.gaps = [slice(a, b) for a, b in zip(ends, starts, strict=True) if a < b]
        self.release()

    def release(self) -> None:
        """Forget all gradients, and give the memory back."""
        self.reduced: torch.Tensor | None = None  # this rank's share of the sum over ranks, when that has come
        self.flat: torch.Tensor | None = None
        self.filled: set[int] = set()
        self.lent: set[int] = set()
        self.adding: set[int] = set()  # a product adds to these itself

    def place(self, number: int) -> torch.Tensor:
        """Where the gradient of a parameter lies, whatever is there."""
        if self.flat is None:
            self.flat = torch.empty(self.size, dtype=self.dtype, device=self.device)
            for gap in self.gaps:
                self.flat[gap].zero_()
        return self.flat[slice(*self.spans[number])]

    def lend_gradient_memory(self, number: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A parameter's place to write its gradient to: once, if none is there yet and the type is that of the sum."""
        if dtype != self.dtype or number in self.filled or number in self.lent:
            return None
        self.lent.add(number)
        return self.place(number)

    def running_sum(self, number: int) -> torch.Tensor | None:
        """The sum of a parameter's gradients so far, for a product to add to; autograd then gets none of it."""
        if number not in self.filled:
            return None
        self.adding.add(number)
        return self.place(number)

    def was_added_in_place(self, number: int) -> bool:
        """Whether a product has just added to this sum, once."""
        was = number in self.adding
        self.adding.discard(number)
        return was

    def add(self, number: int, gradient: torch.Tensor) -> None:
        place = self.place(number)
        if number in self.filled:
            place.view(gradient.shape).add_(gradient)
        elif gradient.data_ptr() != place.data_ptr():
            place.view(gradient.shape).copy_(gradient)
        self.filled.add(number)

    def whole(self) -> torch.Tensor:
        """All of it; zeros for a parameter that got no gradient."""
        for number in set(range(len(self.spans))) - self.filled:
            self.place(number).zero_()
            self.filled.add(number)
        assert self.flat is not None
        return self.flat
