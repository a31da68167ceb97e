"""One microbatch's pass through the steps of a stage: forward and then, from the last step on, backward.

A pass is one segment, or it is cut at every step: then each step can be run forward, and later backward, by itself,
while steps of another microbatch run in between. At a cut the carry's tensors become autograd leaves, and the gradients
of one segment's inputs are those of the outputs of the segment before.

    forward    step 0 | cut | step 1 | cut | step 2 ...
    backward   step 0 <- grads <- step 1 <- grads <- step 2
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefold.model.step_borders import ObservedSteps, is_differentiable
from moefold.model.steps import Around, Carry, PassKey, Step, run_step_sequence


class SegmentRun:
    """A segment that has run forward: the leaves of its input carry, and its output carry."""

    def __init__(self, carry: Carry, steps: Sequence[Step], observers: Sequence[Around], key: PassKey):
        # The cut: tensors of the carry become leaves, so that this segment's backward ends here.
        flat, structure = tree_flatten(carry)
        self.leaves: dict[int, Tensor] = {}  # by id: a tensor that the carry holds twice stays one
        for leaf in flat:
            if is_differentiable(leaf) and id(leaf) not in self.leaves:
                detached = leaf.detach()
                self.leaves[id(leaf)] = detached.requires_grad_()
        self.flat_inputs = [self.leaves.get(id(leaf), leaf) for leaf in flat]
        inputs = tree_unflatten(self.flat_inputs, structure)
        self.observed: ObservedSteps | None = None
        if observers:
            self.observed = ObservedSteps(steps, observers, key)
            self.out = self.observed.forward(inputs)
        else:
            self.out = run_step_sequence(steps, inputs)

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        around = nullcontext()
        if self.observed is not None:
            around = self.observed.around_backward()
        with around:
            torch.autograd.backward(list(outputs), list(gradients))

    def input_gradients(self) -> list[Tensor | None]:
        """The gradient of each leaf of the flattened input carry; of a repeated tensor only once."""
        seen: set[int] = set()
        gradients: list[Tensor | None] = []
        for leaf in self.flat_inputs:
            gradient = None
            is_first = id(leaf) not in seen
            if is_first and isinstance(leaf, Tensor) and leaf.is_leaf:
                gradient = leaf.grad
            seen.add(id(leaf))
            gradients.append(gradient)
        return gradients


def segments_for_pairing(steps: Sequence[Step]) -> list[list[Step]]:
    """A segment for each step, and one for neighbours on the comm lane, which nothing could run between."""
    segments: list[list[Step]] = []
    for step in steps:
        follows_comm = bool(segments) and segments[-1][-1].spec.lane == "comm"
        if follows_comm and step.spec.lane == "comm":
            segments[-1].append(step)
        else:
            segments.append([step])
    return segments


class Passage:
    """The pass with the key (stage, microbatch). `observers` are called around its steps."""

    def __init__(self, steps: Sequence[Step], cut: bool, observers: Sequence[Around] = (), key: PassKey = (0, 0)):
        self.segments = segments_for_pairing(steps) if cut else [list(steps)]
        self.observers = observers
        self.key = key
        self.runs: list[SegmentRun] = []  # those that have not run backward
        self.first_run: SegmentRun | None = None
        self.output_gradients: list[tuple[Tensor, Tensor]] = []  # outputs with gradients, for backward

    def forward(self, carry: Carry) -> Carry:
        """Run the next segment."""
        steps = self.segments[len(self.runs)]
        run = SegmentRun(carry, steps, self.observers, self.key)
        self.runs.append(run)
        if self.first_run is None:
            self.first_run = run
        return run.out

    @property
    def out(self) -> Carry:
        """The output carry of the last segment."""
        return self.runs[-1].out

    def gradient_of_input(self, x: Tensor) -> Tensor:
        """The gradient of a tensor in the first carry, when all segments have run backward."""
        assert self.first_run is not None
        gradient = self.first_run.leaves[id(x)].grad
        if gradient is None:
            return torch.zeros_like(x)
        return gradient

    def set_output_gradients(self, outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
        """The gradients of the last segment's outputs; those of non-differentiable outputs are dropped."""
        self.output_gradients = []
        for y, dy in zip(outputs, gradients, strict=True):
            if dy is not None and y.requires_grad:
                self.output_gradients.append((y, dy))

    def backward(self) -> None:
        """Run the last segment that has not run backward, and free its memory."""
        run = self.runs.pop()
        if self.output_gradients:
            outputs, gradients = zip(*self.output_gradients, strict=True)
            run.backward(outputs, gradients)
        self.output_gradients = []
        # The gradients of this segment's inputs are those of the outputs of the segment before.
        if self.runs:
            flat, _ = tree_flatten(self.runs[-1].out)
            self.set_output_gradients(flat, run.input_gradients())
