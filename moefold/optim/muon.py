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

import torch
from torch import Tensor

from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.muon_scalars import MuonOptions, MuonScalars
from moefold.kernels.optimizer.muon_update import muon_momentum, muon_weights
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients
from moefold.layout.axes import Axis
from moefold.layout.declare import DeclaredParameter, MatrixShape
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
from moefold.shard.storage import FusedOperands

MatrixScale = Callable[[int, int], float]  # of rows and columns
MUON_SCALES: dict[str, MatrixScale] = {
    "moonlight": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "none": lambda rows, columns: 1.0,
}


DIRECTION_DTYPES = {torch.float16: torch.bfloat16}  # gradients without their loss scale are too small for fp16

WINDOW_ELEMENTS = 2**28  # of matrices that are updated at a time: with few, the host launches longer than they take
Windows = list[MatrixWindow]


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

    def update(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        storage = share.storage
        fused = storage.fused_operands()
        operands = fused or main_values_alone(storage)
        for windows in windows_updated_together(share):
            self.update_windows(share, operands, windows, scale, scalars)
        if fused is None:
            storage.refresh_weights(operands.main)

    def update_windows(
        self, share: BucketShare, operands: FusedOperands, windows: Windows, scale: Tensor, scalars: Tensor
    ) -> None:
        axis = cutting_axis(share)
        batches: list[MatrixBatch] = []
        for window in windows:
            direction = self.next_direction(share, window.elements, scale, scalars)
            view_NRC = window.matrices(direction)
            batch = self.matrix_batch(window.parameter, view_NRC, axis)
            batches.append(batch)
        orthogonal = map_whole_matrices(batches, self.flops, self.orthogonalise)
        for window, batch, matrices in zip(windows, batches, orthogonal, strict=True):
            elements = window.elements
            main = operands.main[elements]
            weights = window_of(operands.weights, elements)
            matrix_scale = self.scale_of(*batch.whole)
            first = first_element(share, elements)
            self.muon_weights(main, weights, matrices.flatten(), matrix_scale, scale, scalars, first)

    def next_direction(self, share: BucketShare, elements: slice, scale: Tensor, scalars: Tensor) -> Tensor:
        """Update the momentum, unless the scale is not finite, and return the direction of the step."""
        momentum = share.state["momentum"]
        assert isinstance(momentum, Tensor), "momentum has no blocks"
        gradient = share.gradient[elements]
        dtype = share.weights.dtype
        direction_dtype = DIRECTION_DTYPES.get(dtype, dtype)
        direction = torch.empty_like(gradient, dtype=direction_dtype)
        first = first_element(share, elements)
        self.muon_momentum(direction, momentum[elements], gradient, scale, scalars, self.options, first)
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


def cutting_axis(share: BucketShare) -> Axis | None:
    """The axis whose ranks hold parts of the share's matrices; None where every matrix is whole."""
    axis = share.bucket.matrix_parts
    if axis is None or axis.size == 1:
        return None
    return axis
