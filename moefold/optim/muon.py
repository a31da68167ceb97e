"""Muon as a rule: each matrix moves along its momentum, orthogonalised by Newton-Schulz.

    m = b m + (1-b) g              d = (1-b) g + b m with Nesterov, else m
    w = w - lr decay w - lr scale NewtonSchulz(d)

A matrix is what the model multiplies by: gate, up and down are matrices of their own, also where they are stored
together, and so are the heads of a projection with `optim.muon.heads each`. The state is the momentum alone. Norms,
biases, embedding and head are left to AdamW (optim/parameter_groups.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.anatomy.visiting_states import CHUNK_ELEMENTS
from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.muon_scalars import MuonOptions, MuonScalars
from moefold.kernels.optimizer.muon_update import muon_momentum, muon_weights
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients
from moefold.layout.axes import Axis
from moefold.layout.declare import DeclaredParameter, MatrixShape
from moefold.optim.device_visits import move_to_host, open_visits, operands_in_parts, visit_device
from moefold.optim.host_states import HostStream
from moefold.optim.matrix_batches import MatrixBatch, map_whole_matrices
from moefold.optim.rule import (
    BucketShare,
    MatrixWindow,
    RuleState,
    StateKinds,
    StepNumbers,
    first_element,
    main_values_alone,
    stochastic_rounding_seed,
    weight_decay_of,
    window_of,
)
from moefold.shard.block_values import CodesAndScales

MatrixScale = Callable[[int, int], float]  # of rows and columns
MUON_SCALES: dict[str, MatrixScale] = {
    "moonlight": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "none": lambda rows, columns: 1.0,
}


DIRECTION_DTYPES = {torch.float16: torch.bfloat16}  # gradients without their loss scale are too small for fp16

WINDOW_ELEMENTS = 2**28  # of matrices that are updated at a time: with few, the host launches longer than they take
Windows = list[MatrixWindow]


class MatrixOperands(NamedTuple):
    """Flat tensors in which matrices are updated, main weights and weights as a fused kernel has them: of a share from
    its element `start` on."""

    gradient: Tensor
    main: Tensor
    weights: Tensor | None
    momentum: Tensor
    start: int

    def of(self, window: MatrixWindow) -> MatrixOperands:
        """The parts of a window."""
        elements = window.elements
        first = elements.start - self.start
        last = elements.stop - self.start
        here = slice(first, last)
        weights = window_of(self.weights, here)
        return MatrixOperands(self.gradient[here], self.main[here], weights, self.momentum[here], elements.start)


class Muon:
    kinds: StateKinds = ("momentum",)
    whole = True

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        muon = optim.muon
        momentum = muon.momentum
        if group.betas:
            momentum, _ = group.betas
        self.decay = weight_decay_of(group, optim)
        self.steps = muon.steps
        name = muon.newton_schulz
        self.coefficients = newton_schulz_coefficients(name, muon.steps)
        self.scale_of = MUON_SCALES[muon.scale]
        self.by_head = muon.heads == "each"
        self.bf16_momentum = optim.moments == "bf16"
        rounds_stochastically = optim.rounding == "stochastic"
        stochastic = self.bf16_momentum and rounds_stochastically
        self.options = MuonOptions(momentum, muon.nesterov, stochastic)
        self.stochastic_main = optim.main_rounding == "stochastic"
        self.states_on_host = optim.states == "host"
        self.window_gib = optim.states_window_gib
        self.host_stream: HostStream | None = None
        self.muon_momentum = kernels[muon_momentum]
        self.newton_schulz = kernels[newton_schulz]
        self.muon_weights = kernels[muon_weights]

    def matrix_cost(self, parameter: DeclaredParameter) -> float:
        """Floating-point operations of a parameter's update, over all ranks that hold parts of its matrices."""
        matrix = self.matrix_of(parameter)
        elements = parameter.tensor.numel()
        count = elements / prod(matrix)
        return count * self.flops(matrix)

    def flops(self, matrix: MatrixShape) -> float:
        rows, columns = matrix
        return newton_schulz_flops(rows, columns, self.steps)

    def matrix_of(self, parameter: DeclaredParameter) -> MatrixShape:
        """The whole matrix that is orthogonalised."""
        declaration = parameter.declaration
        if self.takes_heads(parameter):
            _, width, columns = declaration.shape
            return width, columns
        matrix = declaration.matrix
        assert matrix is not None, f"{parameter.name} has no matrix"
        return matrix

    def takes_heads(self, parameter: DeclaredParameter) -> bool:
        if not self.by_head:
            return False
        return parameter.declaration.rows == "heads"

    def state(self, share: BucketShare) -> RuleState:
        dtype = share.wide_dtype
        if self.bf16_momentum:
            dtype = torch.bfloat16
        momentum = torch.zeros_like(share.weights, dtype=dtype)
        return {"momentum": momentum}

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> StepNumbers:
        seed = stochastic_rounding_seed(step, share.number)
        keep = 1 - lr * self.decay
        return MuonScalars(lr, keep, seed)

    def move_states(self, share: BucketShare, stream: HostStream | None) -> HostStream | None:
        if not self.states_on_host:
            return stream
        move_to_host(share)
        windows = spans_of(visiting_matrices(share))
        self.host_stream = open_visits(share, windows, stream, self.window_gib)
        return self.host_stream

    def update(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        if self.host_stream is None:
            self.update_in_place(share, scale, scalars)
        else:
            self.update_visiting_states(share, self.host_stream, scale, scalars)

    def update_in_place(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        storage = share.storage
        fused = storage.fused_operands()
        main, weights = fused or main_values_alone(storage)
        momentum = share.state["momentum"]
        assert isinstance(momentum, Tensor), "momentum has no blocks"
        assert isinstance(main, Tensor), "main weights of Muon have no blocks"
        operands = MatrixOperands(share.gradient, main, weights, momentum, 0)
        for windows in windows_updated_together(share):
            self.update_windows(share, operands, windows, scale, scalars)
        if fused is None:
            storage.refresh_weights(main)

    def update_visiting_states(
        self,
        share: BucketShare,
        stream: HostStream,
        scale: Tensor,
        scalars: Tensor,
    ) -> None:
        """Update matrices while their states visit the device. Numbers of the step are copied and its gradient is taken
        now, since those of the next step may come before the last update."""
        _, weights = operands_in_parts(share)
        gradient = share.gradient
        together = visiting_matrices(share)
        spans = spans_of(together)
        scalars = scalars.clone()

        def update_matrices(number: int, main: CodesAndScales, momentum: CodesAndScales) -> None:
            span = spans[number]
            beside = window_of(weights, span)
            operands = MatrixOperands(gradient[span], main.codes, beside, momentum.codes, span.start)
            windows = together[number]
            self.update_windows(share, operands, windows, scale, scalars)

        visit_device(share, spans, stream, update_matrices, (scale, scalars))
        if cutting_axis(share) is not None:  # ranks exchange parts before any exchange of the next forward
            share.bucket.await_update()

    def update_windows(
        self,
        share: BucketShare,
        operands: MatrixOperands,
        windows: Windows,
        scale: Tensor,
        scalars: Tensor,
    ) -> None:
        axis = cutting_axis(share)
        batches: list[MatrixBatch] = []
        for window in windows:
            first = first_element(share, window.elements)
            direction = self.next_direction(share, operands.of(window), scale, scalars, first)
            view_NRC = window.matrices(direction)
            batch = self.matrix_batch(window.parameter, view_NRC, axis)
            batches.append(batch)
        orthogonal = map_whole_matrices(batches, self.flops, self.orthogonalise)
        for window, batch, matrices in zip(windows, batches, orthogonal, strict=True):
            part = operands.of(window)
            matrix_scale = self.scale_of(*batch.whole)
            first = first_element(share, window.elements)
            moved = (part.main, part.weights, matrices.flatten(), matrix_scale)
            self.muon_weights(*moved, scale, scalars, first, self.stochastic_main)

    def next_direction(
        self,
        share: BucketShare,
        part: MatrixOperands,
        scale: Tensor,
        scalars: Tensor,
        first: int,
    ) -> Tensor:
        """Update the momentum, unless the scale is not finite, and return the direction of the step."""
        gradient = part.gradient
        dtype = share.weights.dtype
        direction_dtype = DIRECTION_DTYPES.get(dtype, dtype)
        direction = torch.empty_like(gradient, dtype=direction_dtype)
        self.muon_momentum(direction, part.momentum, gradient, scale, scalars, self.options, first)
        return direction

    def matrix_batch(self, parameter: DeclaredParameter, view_NRC: Tensor, axis: Axis | None) -> MatrixBatch:
        """A parameter's matrices as Newton-Schulz takes them. `axis` cuts those with a cut."""
        whole = self.matrix_of(parameter)
        if self.takes_heads(parameter):
            heads_NRC = view_NRC.reshape(-1, *whole)  # tp cuts between heads
            return MatrixBatch(heads_NRC, whole)
        cut = parameter.declaration.matrix_cut
        if cut is None or axis is None:
            return MatrixBatch(view_NRC, whole)
        cut_dim = 1 + cut.dim
        return MatrixBatch(view_NRC, whole, axis, cut_dim)

    def orthogonalise(self, x_NRC: Tensor) -> Tensor:
        return self.newton_schulz(x_NRC, self.coefficients)


def windows_updated_together(share: BucketShare) -> Iterator[Windows]:
    """Matrices that an axis cuts are updated together, so that its ranks share Newton-Schulz evenly; others window by
    window, because direction and orthogonal matrices take as much memory as their weights."""
    if cutting_axis(share) is not None:
        yield list(share.matrix_windows(sys.maxsize))
        return
    for window in share.matrix_windows(WINDOW_ELEMENTS):
        yield [window]


def visiting_matrices(share: BucketShare) -> list[Windows]:
    """Neighbouring matrices whose states visit the device together: as many elements as a chunk has, or one matrix."""
    together: list[Windows] = []
    room = 0
    for window in share.matrix_windows(CHUNK_ELEMENTS):
        elements = window.elements
        if elements.stop > room:
            room = elements.start + CHUNK_ELEMENTS
            together.append([])
        together[-1].append(window)
    return together


def spans_of(together: list[Windows]) -> list[slice]:
    """The elements of a share from the first to the last of the matrices that visit together."""
    spans: list[slice] = []
    for windows in together:
        first = windows[0].elements
        last = windows[-1].elements
        span = slice(first.start, last.stop)
        spans.append(span)
    return spans


def cutting_axis(share: BucketShare) -> Axis | None:
    """The axis whose ranks hold parts of the share's matrices; None where every matrix is whole."""
    axis = share.bucket.matrix_parts
    if axis is None or axis.size == 1:
        return None
    return axis
