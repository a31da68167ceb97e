"""Muon as a rule: each matrix moves along its momentum, orthogonalised by Newton-Schulz.

    m = b m + (1-b) g              d = (1-b) g + b m with Nesterov, else m
    w = w - lr decay w - lr scale NewtonSchulz(d)

A matrix is what the model multiplies by: gate, up and down are matrices of their own, also where they are stored
together, and so are the heads of a projection with `optim.muon.heads each`. The state is the momentum alone. Norms,
biases, embedding and head are left to AdamW (optim/parameter_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.newton_schulz_flops import newton_schulz_flops
from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.adamw import hashed_random_bits, scaled_gradient, stochastic_round
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients
from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.layout.axes import Axis
from moefold.layout.declare import DeclaredParameter, MatrixShape
from moefold.optim.matrix_batches import MatrixBatch, map_whole_matrices
from moefold.optim.rule import (
    BucketShare,
    ParameterMatrices,
    RuleState,
    StateKinds,
    StepNumbers,
    stochastic_rounding_seed,
    weight_decay_of,
)
from moefold.shard.storage import WHOLE_SHARE


class MuonScalars(NamedTuple):
    """The numbers of one step, in the order in which they lie in a tensor of fp64 on the device."""

    lr: float
    keep: float  # what weight decay leaves of a weight
    seed: float  # of stochastic rounding, a whole number below 2^31


SEED = MuonScalars._fields.index("seed")

MatrixScale = Callable[[int, int], float]  # of rows and columns
MUON_SCALES: dict[str, MatrixScale] = {
    "moonlight": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "none": lambda rows, columns: 1.0,
}


DIRECTION_DTYPES = {torch.float16: torch.bfloat16}  # gradients without their loss scale are too small for fp16

WINDOW_ELEMENTS = 2**26  # of matrices that are updated at a time
MatricesIn = Callable[[Tensor], Iterable[ParameterMatrices]]  # in a flat tensor of a share's elements


class Muon:
    kinds: StateKinds = ("momentum",)
    whole = True

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        muon = optim.muon
        self.momentum = muon.momentum
        if group.betas:
            self.momentum, _ = group.betas
        self.nesterov = muon.nesterov
        self.decay = weight_decay_of(group, optim)
        self.steps = muon.steps
        name = muon.newton_schulz
        self.coefficients = newton_schulz_coefficients(name, muon.steps)
        self.scale_of = MUON_SCALES[muon.scale]
        self.by_head = muon.heads == "each"
        self.bf16_momentum = optim.moments == "bf16"
        rounds_stochastically = optim.rounding == "stochastic"
        self.stochastic = self.bf16_momentum and rounds_stochastically
        self.newton_schulz = kernels[newton_schulz]

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
        """Matrices that an axis cuts are updated together, so that its ranks share Newton-Schulz evenly; others window
        by window, because what is between a gradient and its weights takes several times their memory."""
        if cutting_axis(share) is not None:
            self.update_elements(share, WHOLE_SHARE, share.matrices, scale, scalars)
            return
        for window in share.matrix_windows(WINDOW_ELEMENTS):
            self.update_elements(share, window.elements, window.matrices, scale, scalars)

    def update_elements(
        self, share: BucketShare, elements: slice, matrices: MatricesIn, scale: Tensor, scalars: Tensor
    ) -> None:
        main = share.storage.main_values(elements)
        is_finite = scale.isfinite()
        seed = scalars[SEED].to(torch.int64)
        direction = self.next_direction(share, elements, scale, seed, main.dtype)
        # A direction of zeros moves nothing: Newton-Schulz of zeros is zeros.
        direction = direction.where(is_finite, 0)
        dtype = share.weights.dtype
        direction_dtype = DIRECTION_DTYPES.get(dtype, dtype)
        direction = direction.to(direction_dtype)
        axis = cutting_axis(share)
        batches = [self.matrix_batch(parameter, view, axis) for parameter, view in matrices(direction)]
        orthogonal = map_whole_matrices(batches, self.flops, self.orthogonalise)
        lr, keep = scalars[:2].to(main.dtype)
        sound_keep = keep.where(is_finite, 1)
        views = [view for _, view in matrices(main)]
        for weights, batch, step in zip(views, batches, orthogonal, strict=True):
            rows, columns = batch.whole
            factor = lr * self.scale_of(rows, columns)
            weights.mul_(sound_keep)
            weights.sub_(step.view_as(weights) * factor)
        share.storage.refresh_weights(main, seed, elements)

    def next_direction(
        self, share: BucketShare, elements: slice, scale: Tensor, seed: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Update the momentum, unless the scale is not finite, and return the direction of the step."""
        momentum_of_share = share.state["momentum"]
        assert isinstance(momentum_of_share, Tensor), "momentum has no blocks"
        kept = momentum_of_share[elements]
        gradient = scaled_gradient(share.gradient[elements], scale, dtype)
        momentum = kept.to(dtype)
        momentum = momentum.lerp(gradient, 1 - self.momentum)
        rounded = self.rounded_momentum(momentum, kept.dtype, seed, elements.start or 0)
        is_finite = scale.isfinite()
        kept.copy_(rounded.where(is_finite, kept))
        if self.nesterov:
            return gradient.lerp(momentum, self.momentum)
        return momentum

    def rounded_momentum(self, momentum: Tensor, dtype: torch.dtype, seed: Tensor, first: int) -> Tensor:
        """The momentum in the dtype in which it is kept, of a share's elements from `first` on."""
        if self.stochastic:
            size = len(momentum)
            hashed = hashed_random_bits(first, size, seed, momentum.device)
            random_bits = hashed & 0xFFFF
            momentum = stochastic_round(momentum, dtype, random_bits)
        return round_to_nearest(momentum, dtype)

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


def cutting_axis(share: BucketShare) -> Axis | None:
    """The axis whose ranks hold parts of the share's matrices; None where every matrix is whole."""
    axis = share.bucket.matrix_parts
    if axis is None or axis.size == 1:
        return None
    return axis
