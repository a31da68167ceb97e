"""Norms as modules, and the residual stream that they read.

    stream, h_TD = stream.normed(norm)      # adds the pending output, and normalises the sum: one pass over memory
    stream = stream.plus(attention(h_TD))   # the output waits for the next norm

Adding lazily is what lets one kernel do the addition and the norm that follows it, forward and backward. Blocks are
written as in a textbook; only this file holds the pair.

T tokens of this rank, D width.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.comm.collectives import all_reduce
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.norm.rmsnorm import add_rmsnorm, rmsnorm
from moefold.kernels.norm.rope import RopeAngles, norm_rope, rope
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import REPLICATED, sharded_over_tp
from moefold.model.parts import ModelParts
from moefold.model.steps import FollowsFromFirst, Region

SumAndNorms = tuple[Tensor, Tensor, Tensor]  # a sum of the stream, and its norm for each of two who read it


class RMSNorm(DeclaringModule):
    placement = REPLICATED

    def __init__(self, width: int, eps: float, parts: ModelParts):
        super().__init__(parts.world)
        self.width = width
        self.eps = eps
        placement = self.placement
        weight = self.declare_parameter("weight", width, placement=placement, std=None)
        self.weight = weight
        self.norm = Region("norm")
        self.bind_kernels(parts.kernels)

    def bind_kernels(self, kernels: BoundKernels) -> None:
        self.rmsnorm = kernels[rmsnorm]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        eps = self.eps
        return self.norm(self.rmsnorm, x, weight, eps)


class AddNorm(RMSNorm):
    """Norms the sum of the stream and what the layer before gives for it, if there is one."""

    def __init__(self, model: ModelConfig, parts: ModelParts):
        width = model.hidden
        eps = model.norm_eps
        super().__init__(width, eps, parts)

    def bind_kernels(self, kernels: BoundKernels) -> None:
        super().bind_kernels(kernels)
        add_and_norm = kernels[add_rmsnorm]
        self.add_and_norm = FollowsFromFirst(add_and_norm, self.norm_sum)

    def forward(self, x_TD: Tensor, added_TD: Tensor | None) -> SumAndNorms:
        weight = self.weight
        eps = self.eps
        return self.norm(self.add_and_norm, x_TD, added_TD, weight, eps)

    def norm_sum(self, sum_TD: Tensor) -> SumAndNorms:
        """The outputs of `forward` once more, from the first."""
        weight = self.weight
        eps = self.eps
        h_TD = self.rmsnorm(sum_TD, weight, eps)
        return sum_TD, h_TD, h_TD


class ResidualStream(NamedTuple):
    """The stream is `x_TD + pending_TD`. A named tuple, so that a carry that holds it can be flattened and cut."""

    x_TD: Tensor
    pending_TD: Tensor | None = None

    def normed(self, norm: AddNorm) -> tuple[ResidualStream, Tensor]:
        """The stream with nothing pending, and its norm."""
        stream, h_TD, _ = self.normed_for_two(norm)
        return stream, h_TD

    def normed_for_two(self, norm: AddNorm) -> tuple[ResidualStream, Tensor, Tensor]:
        """The stream, and its norm once for each of two consumers: their gradients are then summed inside the norm's
        backward instead of in a pass of their own."""
        pending_TD = self.pending_TD
        x_TD, first_TD, second_TD = norm(self.x_TD, pending_TD)
        stream = ResidualStream(x_TD)
        return stream, first_TD, second_TD

    def plus(self, output_TD: Tensor) -> ResidualStream:
        """The stream with a layer's output pending."""
        x_TD = self.settled()
        return ResidualStream(x_TD, output_TD)

    def settled(self) -> Tensor:
        """One tensor: what a pipeline stage sends to the next."""
        if self.pending_TD is None:
            return self.x_TD
        return self.x_TD + self.pending_TD


class RopeNorm(RMSNorm):
    """Norms each head by itself, then rotates it by position."""

    def bind_kernels(self, kernels: BoundKernels) -> None:
        super().bind_kernels(kernels)
        rotate = kernels[rope]
        norm_and_rotate = kernels[norm_rope]
        self.norm_rope = partial(norm_and_rotate, norm=self.rmsnorm, rotate=rotate)

    def forward(self, x_BSHD: Tensor, angles: RopeAngles) -> Tensor:
        weight = self.weight
        eps = self.eps
        return self.norm(self.norm_rope, x_BSHD, weight, angles, eps)


class RMSNormOverTp(RMSNorm):
    """RMSNorm over a width that is sharded over tp: the mean square is one number over all ranks."""

    placement = sharded_over_tp(0)

    def bind_kernels(self, kernels: BoundKernels) -> None:
        self.rmsnorm = self.norm_over_tp

    def norm_over_tp(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tp = self.world.axis("tp")
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        squares = wide.square()
        own_sum = squares.sum(-1, keepdim=True)
        square_sum = all_reduce(own_sum, tp)
        mean_square = square_sum / self.width
        inverse_rms = torch.rsqrt(mean_square + eps)
        normed = wide * inverse_rms * weight
        return normed.to(x.dtype)


class RopeNormOverTp(RopeNorm, RMSNormOverTp):
    """Norms all heads of a token together, then rotates each by position. For tp of size 1: a rank has all heads."""
