"""Rules of an optimizer: what state a parameter group has, and how its weights are updated.

A rule sees one bucket at a time, as the share of it that this rank holds. Element-wise rules get any run of elements.
A rule with `whole` gets shares that end between matrices (`BucketShare.matrices`).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.layout.declare import DeclaredParameter
from moefold.optim.host_states import HostStream
from moefold.shard.block_values import FlatValues, decoded
from moefold.shard.buckets import Bucket
from moefold.shard.storage import FusedOperands, WeightStorage

StateKinds = tuple[str, ...]
RuleState = dict[str, FlatValues]  # by kind
StepNumbers = Sequence[float]
ParameterMatrices = tuple[DeclaredParameter, Tensor]  # as a view (matrices, rows, columns)
BegunAfter = Mapping[str, int]  # by parameter, the updates that a run had made when its states began


class StateBegin(NamedTuple):
    """From element `first` of a share on, states began after so many updates of the run."""

    first: int
    updates: int


WITH_THE_RUN = StateBegin(0, 0)


@dataclass
class BucketShare:
    """This rank's share of a bucket, as a rule sees it: main weights by way of `storage`, the gradient's sum over
    ranks, and the rule's state by kind. `number` counts the buckets of the optimizer. `begins` are in order of their
    elements, the first with element 0."""

    number: int
    bucket: Bucket
    state: RuleState = field(default_factory=dict)
    begins: list[StateBegin] = field(default_factory=lambda: [WITH_THE_RUN])

    @property
    def storage(self) -> WeightStorage:
        return self.bucket.storage

    @property
    def gradient(self) -> Tensor:
        """The sum over ranks, to be multiplied by the scale that `Rule.update` is given."""
        return decoded(self.kept_gradient)

    @property
    def kept_gradient(self) -> FlatValues:
        """The same as it is kept: AdamW alone reads gradients in blocks."""
        return self.bucket.reduced_gradient_share

    @property
    def weights(self) -> Tensor:
        share = self.bucket.share
        return self.storage.weights_of_share(share)

    @property
    def wide_dtype(self) -> torch.dtype:
        dtype = self.weights.dtype
        return torch.promote_types(dtype, torch.float32)

    def note_begins(self, begun_after: BegunAfter) -> None:
        """Take note of when states began; those of parameters that are not named began with the run."""
        begins = [WITH_THE_RUN]
        for piece in self.bucket.pieces():
            updates = begun_after.get(piece.parameter.name, 0)
            is_empty = piece.first == piece.last
            if is_empty or updates == begins[-1].updates:
                continue
            if piece.offset == 0:
                begins.clear()
            begins.append(StateBegin(piece.offset, updates))
        self.begins = begins

    def cut_by_begins(self, window: slice) -> Iterator[slice]:
        """A window of the share, cut where states began after another update."""
        start = window.start
        for begin in self.begins:
            if start < begin.first < window.stop:
                yield slice(start, begin.first)
                start = begin.first
        yield slice(start, window.stop)

    def begin_of(self, window: slice) -> int:
        """The number of the begin of a window's states, after it was cut."""
        firsts = [begin.first for begin in self.begins]
        return bisect(firsts, window.start) - 1

    def matrices(self, flat: Tensor) -> Iterator[ParameterMatrices]:
        """Each parameter's matrices in a flat tensor of the share, as views (matrices, rows, columns). A matrix that
        the placement cuts over tp or etp is this rank's part of it."""
        for piece, view in self.bucket.matrix_views(flat):
            yield piece.parameter, view

    def matrix_windows(self, most: int) -> Iterator[MatrixWindow]:
        """Runs of one parameter's matrices: at most so many elements, or one matrix."""
        for piece in self.bucket.pieces():
            matrix = piece.parameter.matrix
            if matrix is None:
                continue
            size = prod(matrix)
            step = max(1, most // size) * size
            end = piece.window.stop
            for first in range(piece.offset, end, step):
                last = min(first + step, end)
                yield MatrixWindow(slice(first, last), piece.parameter)


class MatrixWindow(NamedTuple):
    """Elements of a share: matrices of one parameter."""

    elements: slice
    parameter: DeclaredParameter

    def matrices(self, flat: Tensor) -> Tensor:
        """The parameter's matrices in a flat tensor of the window: a view (matrices, rows, columns)."""
        matrix = self.parameter.matrix
        assert matrix is not None, f"{self.parameter.name} has no matrix"
        return flat.view(-1, *matrix)


class Rule(Protocol):
    """An update rule with the options of one parameter group. Kind names are part of the checkpoint format."""

    kinds: StateKinds
    whole: bool

    def state(self, share: BucketShare) -> RuleState:
        """New state for a share: for every kind flat values, as many as the share has."""
        ...

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> StepNumbers:
        """The numbers of a step, to be written to the device before `update`; always equally many, unless
        `share.begins` change. `step` counts the updates of the run, which may have begun before the states."""
        ...

    def update(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        """Update the main weights and the state from the gradient times `scale`, unless that is not finite."""
        ...


@runtime_checkable
class KeepsStatesOnHost(Protocol):
    """A rule that may keep the state of a share in host memory."""

    def move_states(self, share: BucketShare, stream: HostStream | None) -> HostStream | None:
        """Move state and main weights to where the rule keeps them. Returns the way by which they visit the device: the
        given one, which is that of other rules, or a new one, or None if they do not."""
        ...


@runtime_checkable
class WeighsMatrices(Protocol):
    """A rule for whole matrices that knows the cost of updating a parameter, by which matrices are given to ranks.
    Without it their elements count."""

    def matrix_cost(self, parameter: DeclaredParameter) -> float: ...


# What an extension of the kind `optimizer_rule` is: a class or function that makes the rule of a group
RuleMaker = Callable[[OptimizerGroup, OptimConfig, BoundKernels], Rule]


def weight_decay_of(group: OptimizerGroup, optim: OptimConfig) -> float:
    """The entry's own, or that of the section `optim`."""
    if group.decay is None:
        return optim.weight_decay
    return group.decay


def stochastic_rounding_seed(step: int, bucket: int) -> int:
    """A seed below 2^31, another for every step and bucket."""
    mixed = step * 1_000_003 + bucket * 7_919
    return mixed % (1 << 31)


def main_values_alone(storage: WeightStorage) -> FusedOperands:
    """Main weights that are stored by `refresh_weights`, once they are updated."""
    main = storage.main_values()
    return FusedOperands(main, None)


def window_of(weights: Tensor | None, window: slice) -> Tensor | None:
    if weights is None:
        return None
    return weights[window]


def first_element(share: BucketShare, window: slice) -> int:
    """The number of a window's first element in the bucket, so that rounding does not depend on the number of
    shares."""
    first_of_share = share.bucket.share.start
    return first_of_share + window.start
