"""One microbatch's pass through the segments of a stage: forward and then, against their order, backward.

At a cut between segments the carry's tensors become inputs of a new autograd graph, so that each segment can be run
forward, and later backward, by itself, while another segment runs on the other lane or steps of another microbatch run
in between. The gradients of one segment's inputs are those of the outputs of the segments that it needs.

    forward    segment 0 | cut | segment 1 | cut | segment 2 ...
    backward   segment 0 <- grads <- segment 1 <- grads <- segment 2

A cut holds no tensor: between forward and backward a pass keeps what autograd saves, as an uncut one does.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moefold.model.step_borders import ObservedSteps, is_differentiable
from moefold.model.steps import Around, Carry, PassKey, run_step_sequence
from moefold.pipeline.segments import Segment, Segments

START = -1  # in place of a segment's number: what the stage begins with
FIRST_PASS: PassKey = (0, 0)
Carries = Mapping[int, Carry]  # by the number of the segment that they come from
Observers = Sequence[Around]
Tensors = Sequence[Tensor]
Gradients = list[tuple[GradientEdge, Tensor]]  # of outputs, which are named by their place in the autograd graph


class Cut(torch.autograd.Function):
    """The beginning of a segment's graph: its tensors. Backward ends here, and their gradients are put into
    `received`. The anchor is what makes autograd record."""

    @staticmethod
    def forward(ctx, anchor, received, *tensors):
        ctx.received = received
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.received.extend(gradients)
        inputs = 2 + len(gradients)
        return (None,) * inputs


ANCHOR = torch.zeros((), requires_grad=True)


class CutSource(NamedTuple):
    """Where an input of a segment comes from: the segment, and the input's place in that segment's graph."""

    segment: int
    edge: GradientEdge


class SegmentRun:
    """A segment that has run forward: its output carry, and where the gradients of its inputs belong. `inputs`: carries
    by the number of the segment that they come from; the first is complete."""

    def __init__(self, inputs: Carries, segment: Segment, observers: Observers, key: PassKey):
        # By id: a tensor that the carry holds twice stays one.
        self.sources: dict[int, CutSource] = {}
        self.received: list[Tensor | None] = []  # gradients of the sources, in their order
        carry = self.carry_behind_cut(inputs)
        self.names = set(carry)
        self.observed: ObservedSteps | None = None
        if observers:
            self.observed = ObservedSteps(segment.steps, observers, key)
            self.out = self.observed.forward(carry)
        else:
            self.out = run_step_sequence(segment.steps, carry)

    def carry_behind_cut(self, inputs: Carries) -> Carry:
        """One carry of all inputs, whose differentiable tensors are inputs of a graph of their own."""
        tensors: list[Tensor] = []
        for segment, carry in inputs.items():
            for leaf in tree_leaves(carry):
                key = id(leaf)
                if key in self.sources or not is_differentiable(leaf):
                    continue
                edge = get_gradient_edge(leaf)
                self.sources[key] = CutSource(segment, edge)
                tensors.append(leaf.detach())
        cut = ()
        if tensors:
            cut = Cut.apply(ANCHOR, self.received, *tensors)
        behind = dict(zip(self.sources, cut, strict=True))  # pyright: ignore[reportArgumentType]
        leaves, structure = tree_flatten(dict(inputs))
        for place, leaf in enumerate(leaves):
            leaves[place] = behind.get(id(leaf), leaf)
        cut_inputs = tree_unflatten(leaves, structure)
        merged: Carry = {}
        for carry in cut_inputs.values():
            merged |= carry
        return merged

    def added(self) -> Carry:
        """The entries of the output carry that the inputs do not have."""
        added: Carry = {}
        for name, value in self.out.items():
            if name not in self.names:
                added[name] = value
        return added

    def backward(self, gradients: Gradients) -> None:
        around = nullcontext()
        if self.observed is not None:
            around = self.observed.around_backward()
        edges = [edge for edge, _ in gradients]
        values = [gradient for _, gradient in gradients]
        with around:
            torch.autograd.backward(edges, values)

    def gradients_of(self, segment: int) -> Gradients:
        """The gradients of those inputs that come from one segment."""
        found: Gradients = []
        sources = self.sources.values()
        for source, gradient in zip(sources, self.received, strict=False):
            if source.segment == segment and gradient is not None:
                of_source = source.edge, gradient
                found.append(of_source)
        return found

    def gradient_of(self, x: Tensor) -> Tensor | None:
        """The gradient of one input."""
        of_sources = zip(self.sources, self.received, strict=False)
        gradients = dict(of_sources)
        return gradients.get(id(x))


class Passage:
    """The pass with the key (stage, microbatch). `observers` are called around its steps.

    Segments may run on two threads; inputs and gradients are taken by the thread that runs them.
    """

    def __init__(self, segments: Segments, observers: Observers = (), key: PassKey = FIRST_PASS):
        self.segments = segments
        self.observers = observers
        self.key = key
        self.runs: dict[int, SegmentRun] = {}  # those that have not run backward
        self.carries: dict[int, Carry] = {}  # outputs that a segment has still to read
        self.first_run: SegmentRun | None = None
        self.last = len(segments) - 1
        self.taking = threading.Lock()
        # By segment, then by the segment that has read its outputs.
        self.gradients: list[dict[int, Gradients]] = []
        self.readers = Counter[int]()
        self.branches: set[int] = set()  # segments of which others read what they have added, and no more
        for segment in segments:
            self.gradients.append({})
            needs = segment.needs
            self.branches.update(needs[1:])
            self.readers.update(needs)

    # ---- forward ----

    def begin(self, carry: Carry) -> None:
        self.carries[START] = carry

    def take_inputs(self, number: int) -> Carries:
        """The carries that a segment reads, by the number of the segment that they come from."""
        needs = self.segments[number].needs
        if not needs:
            start = self.carries.pop(START)
            return {START: start}
        inputs: dict[int, Carry] = {}
        with self.taking:
            for need in needs:
                inputs[need] = self.carries[need]
                self.readers[need] -= 1
                if self.readers[need] == 0:
                    del self.carries[need]
        return inputs

    def run_forward(self, number: int, inputs: Carries) -> Carry:
        segment = self.segments[number]
        run = SegmentRun(inputs, segment, self.observers, self.key)
        out = run.out
        if number in self.branches:
            out = run.added()
        run.out = {}
        self.runs[number] = run
        self.carries[number] = out
        return out

    def forward(self, carry: Carry) -> Carry:
        """Run all segments, in their order."""
        self.begin(carry)
        for number in range(len(self.segments)):
            inputs = self.take_inputs(number)
            self.run_forward(number, inputs)
        return self.out

    @property
    def out(self) -> Carry:
        """The output carry of the last segment."""
        return self.carries[self.last]

    # ---- backward ----

    def set_output_gradients(self, outputs: Tensors, gradients: Tensors) -> None:
        """The gradients of the last segment's outputs; those of non-differentiable outputs are dropped."""
        found: Gradients = []
        for y, dy in zip(outputs, gradients, strict=True):
            if y.requires_grad:
                edge = get_gradient_edge(y)
                found.append((edge, dy))
        self.gradients[self.last] = {START: found}
        self.first_run = self.runs[0]

    def take_gradients(self, number: int) -> Gradients:
        """The gradients of a segment's outputs, in the order of its readers, whichever of them was first."""
        if number == self.last:
            del self.carries[number]
        by_reader = self.gradients[number]
        self.gradients[number] = {}
        found: Gradients = []
        for reader in sorted(by_reader, reverse=True):
            found += by_reader[reader]
        return found

    def run_backward(self, number: int, gradients: Gradients) -> Gradients:
        """Run a segment backward, and free its memory. Returns the gradients of its inputs."""
        run = self.runs.pop(number)
        if gradients:
            run.backward(gradients)
        found: Gradients = []
        segment = self.segments[number]
        for need in segment.needs:
            of_need = run.gradients_of(need)
            self.gradients[need][number] = of_need
            found += of_need
        return found

    def backward(self) -> None:
        """Run all segments backward, against their order."""
        for number in reversed(range(len(self.segments))):
            gradients = self.take_gradients(number)
            self.run_backward(number, gradients)

    def gradient_of_input(self, x: Tensor) -> Tensor:
        """The gradient of a tensor in the first carry, when all segments have run backward."""
        assert self.first_run is not None
        gradient = self.first_run.gradient_of(x)
        if gradient is None:
            return torch.zeros_like(x)
        return gradient
