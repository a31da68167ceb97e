"""Muon as a rule: each matrix moves along its momentum, orthogonalised by Newton-Schulz.

    m = b m + (1-b) g              d = (1-b) g + b m with Nesterov, else m
    w = w - lr decay w - lr scale NewtonSchulz(d)

A matrix is what the model multiplies by: gate, up and down are matrices of their own, also where they are stored
together, and so are the heads of a projection with `optim.muon.heads each`. The state is the momentum alone. Norms,
biases, embedding and head are left to AdamW (optim/parameter_groups.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.adamw import hashed_random_bits, scaled_gradient, stochastic_round
from moefold.kernels.optimizer.newton_schulz import newton_schulz, newton_schulz_coefficients, newton_schulz_flops
from moefold.kernels.optimizer.split_fp32 import round_to_nearest
from moefold.layout.declare import DeclaredParameter, MatrixShape
from moefold.optim.matrix_batches import MatrixBatch, map_whole_matrices
from moefold.optim.rule import BucketShare, stochastic_rounding_seed


class MuonScalars(NamedTuple):
    """The numbers of one step, in the order in which they lie in a tensor of fp64 on the device."""

    lr: float
    keep: float  # what weight decay leaves of a weight
    seed: float  # of stochastic rounding, a whole number below 2^31


MUON_SCALES: dict[str, Callable[[int, int], float]] = {
    "moonlight": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    "original": lambda rows, columns: max(1.0, rows / columns) ** 0.5,
    "none": lambda rows, columns: 1.0,
}


class Muon:
    kinds: tuple[str, ...] = ("momentum",)
    whole = True

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        muon = optim.muon
        self.momentum = group.betas[0] if group.betas else muon.momentum
        self.nesterov = muon.nesterov
        self.decay = optim.weight_decay if group.decay is None else group.decay
        self.steps = muon.steps
        self.coefficients = newton_schulz_coefficients(muon.newton_schulz, muon.steps)
        self.scale_of = MUON_SCALES[muon.scale]
        self.by_head = muon.heads == "each"
        self.bf16_momentum = optim.moments == "bf16"
        self.stochastic = (optim.moments, optim.rounding) == ("bf16", "stochastic")
        self.newton_schulz = kernels[newton_schulz]

    def matrix_cost(self, parameter: DeclaredParameter) -> float:
        """Floating-point operations of a parameter's update, over all ranks that hold parts of its matrices."""
        matrix = self.matrix_of(parameter)
        count = parameter.tensor.numel() / (matrix[0] * matrix[1])
        return count * self.flops(matrix)

    def flops(self, matrix: MatrixShape) -> float:
        return newton_schulz_flops(*matrix, self.steps)

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
        return self.by_head and parameter.declaration.rows == "heads"

    def state(self, share: BucketShare) -> dict[str, Tensor]:
        dtype = torch.bfloat16 if self.bf16_momentum else share.wide_dtype
        return {"momentum": torch.zeros_like(share.weights, dtype=dtype)}

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> Sequence[float]:
        seed = stochastic_rounding_seed(step, share.number)
        return MuonScalars(lr, 1 - lr * self.decay, seed)

    def update(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        main = share.storage.main_values()
        is_finite = scale.isfinite()
        direction = self.next_direction(share, scale, scalars, main.dtype)
        # A direction of zeros moves nothing: Newton-Schulz of zeros is zeros.
        direction = direction.where(is_finite, 0).to(share.weights.dtype)
        batches = list(self.batches(share, direction))
        orthogonal = map_whole_matrices(batches, self.flops, self.orthogonalise)
        lr, keep = scalars[:2].to(main.dtype)
        keep = keep.where(is_finite, 1)
        views = share.matrices(main)
        for (_, weights), batch, step in zip(views, batches, orthogonal, strict=True):
            factor = lr * self.scale_of(*batch.whole)
            weights.mul_(keep)
            weights.sub_(step.view_as(weights) * factor)
        share.storage.refresh_weights(main)

    def next_direction(self, share: BucketShare, scale: Tensor, scalars: Tensor, dtype: torch.dtype) -> Tensor:
        """Update the momentum, unless the scale is not finite, and return the direction of the step."""
        kept = share.state["momentum"]
        gradient = scaled_gradient(share.gradient, scale, dtype)
        momentum = kept.to(dtype).lerp(gradient, 1 - self.momentum)
        direction = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        rounded = self.rounded_momentum(momentum, kept, scalars)
        kept.copy_(rounded.where(scale.isfinite(), kept))
        return direction

    def rounded_momentum(self, momentum: Tensor, kept: Tensor, scalars: Tensor) -> Tensor:
        """The momentum in the dtype in which it is kept."""
        if self.stochastic:
            seed = scalars[MuonScalars._fields.index("seed")].to(torch.int64)
            random_bits = hashed_random_bits(0, len(momentum), seed, momentum.device)
            momentum = stochastic_round(momentum, kept.dtype, random_bits & 0xFFFF)
        return round_to_nearest(momentum, kept.dtype)

    def batches(self, share: BucketShare, direction: Tensor) -> Iterator[MatrixBatch]:
        """The matrices of each parameter in the share, as Newton-Schulz takes them."""
        axis = share.bucket.matrix_parts
        for parameter, view_NRC in share.matrices(direction):
            whole = self.matrix_of(parameter)
            cut = parameter.declaration.matrix_cut
            if self.takes_heads(parameter):
                heads_NRC = view_NRC.reshape(-1, *whole)  # tp cuts between heads
                yield MatrixBatch(heads_NRC, whole)
            elif cut is None or axis is None or axis.size == 1:
                yield MatrixBatch(view_NRC, whole)
            else:
                yield MatrixBatch(view_NRC, whole, axis, 1 + cut.dim)

    def orthogonalise(self, x_NRC: Tensor) -> Tensor:
        return self.newton_schulz(x_NRC, self.coefficients)
