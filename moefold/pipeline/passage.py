"""One microbatch's way through the steps of a stage, forward and, from the other end, backward.

The way is one piece, or cut at every step: then each step can be run, and later run backward, by itself, while another
microbatch's steps run between. At a cut the carry's tensors become leaves, and their gradients are handed over.

    forward    step 0 | cut | step 1 | cut | step 2 ...
    backward   step 0 <- grads <- step 1 <- grads <- step 2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefold.model.steps import Carry, Step, run_step_sequence


def is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


class SegmentRun:
    """A segment that has been run: the leaves it began with, and what came out."""

    def __init__(self, carry: Carry, steps: Sequence[Step]):
        flat, shape = tree_flatten(carry)
        leaves: dict[int, torch.Tensor] = {}  # a tensor that is in the carry twice stays one
        for leaf in flat:
            if is_differentiable(leaf) and id(leaf) not in leaves:
                leaves[id(leaf)] = leaf.detach().requires_grad_()
        self.leaves = leaves
        self.began = [leaves.get(id(leaf), leaf) if is_differentiable(leaf) else leaf for leaf in flat]
        self.out = run_step_sequence(steps, tree_unflatten(self.began, shape))

    def backward(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        torch.autograd.backward(list(outputs), list(gradients))

    def gradients(self) -> list[torch.Tensor | None]:
        """Of what it began with, by place in the flattened carry; each tensor's once."""
        seen: set[int] = set()
        found: list[torch.Tensor | None] = []
        for leaf in self.began:
            again = id(leaf) in seen
            seen.add(id(leaf))
            found.append(leaf.grad if isinstance(leaf, torch.Tensor) and leaf.is_leaf and not again else None)
        return found


class Passage:
    def __init__(self, steps: Sequence[Step], cut: bool):
        self.segments = [[step] for step in steps] if cut else [list(steps)]
        self.cuts: list[SegmentRun] = []
        self.entry: SegmentRun | None = None
        self.handed: list[tuple[torch.Tensor, torch.Tensor]] = []  # outputs and their gradients, for the next backward

    def forward(self, carry: Carry) -> Carry:
        """The next segment."""
        cut = SegmentRun(carry, self.segments[len(self.cuts)])
        self.cuts.append(cut)
        self.entry = self.entry or cut
        return cut.out

    @property
    def out(self) -> Carry:
        """What came out of the last segment."""
        return self.cuts[-1].out

    def gradient_of_input(self, x: torch.Tensor) -> torch.Tensor:
        """Of a tensor in the carry that the way began with, when all of it has been run backward."""
        assert self.entry is not None
        gradient = self.entry.leaves[id(x)].grad
        return torch.zeros_like(x) if gradient is None else gradient

    def set_output_gradients(self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """What the last segment's outputs get from outside."""
        self.handed = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad]

    def backward(self) -> None:
        """The last segment that has not been run backward; its memory goes."""
        cut = self.cuts.pop()
        if self.handed:
            cut.backward(*zip(*self.handed, strict=True))
        self.handed = []
        if self.cuts:
            flat, _ = tree_flatten(self.cuts[-1].out)
            pairs = zip(flat, cut.gradients(), strict=True)
            self.handed = [(y, dy) for y, dy in pairs if dy is not None and y.requires_grad]
