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
from moefold.kernels.bound import BoundKernels
from moefold.kernels.norm.rmsnorm import add_rmsnorm, rmsnorm
from moefold.kernels.norm.rope import RopeAngles, norm_rope, rope
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import sharded_over_tp
from moefold.model.steps import FollowsFromFirst, Region


class RMSNorm(DeclaringModule):
    def __init__(self, width: int, eps: float, kernels: BoundKernels, world: World):
        super().__init__(world)
        self.weight = self.declare_parameter("weight", width, std=None)
        self.eps = eps
        self.rmsnorm = kernels[rmsnorm]
        self.norm = Region("norm")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.rmsnorm, x, self.weight, self.eps)


class AddNorm(RMSNorm):
    """Norms the sum of the stream and what the layer before gives for it, if there is one; returns the sum, and its
    norm for each of two who read it."""

    def __init__(self, width: int, eps: float, kernels: BoundKernels, world: World):
        super().__init__(width, eps, kernels, world)
        self.add_and_norm = FollowsFromFirst(kernels[add_rmsnorm], self.norm_sum)

    def forward(self, x_TD: Tensor, added_TD: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.norm(self.add_and_norm, x_TD, added_TD, self.weight, self.eps)

    def norm_sum(self, sum_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs of `forward` once more, from the first."""
        h_TD = self.rmsnorm(sum_TD, self.weight, self.eps)
        return sum_TD, h_TD, h_TD


class ResidualStream(NamedTuple):
    """The stream is `x_TD + pending_TD`. A named tuple, so that a carry that holds it can be flattened and cut."""

    x_TD: Tensor
    pending_TD: Tensor | None = None

    def normed(self, norm: AddNorm) -> tuple[ResidualStream, Tensor]:
        """The stream with nothing pending, and its norm."""
        x_TD, h_TD, _ = norm(self.x_TD, self.pending_TD)
        return ResidualStream(x_TD), h_TD

    def normed_for_two(self, norm: AddNorm) -> tuple[ResidualStream, Tensor, Tensor]:
        """The stream, and its norm once for each of two consumers: their gradients are then summed inside the norm's
        backward instead of in a pass of their own."""
        x_TD, first_TD, second_TD = norm(self.x_TD, self.pending_TD)
        return ResidualStream(x_TD), first_TD, second_TD

    def plus(self, output_TD: Tensor) -> ResidualStream:
        """The stream with a layer's output pending."""
        return ResidualStream(self.settled(), output_TD)

    def settled(self) -> Tensor:
        """One tensor: what a pipeline stage sends to the next."""
        if self.pending_TD is None:
            return self.x_TD
        return self.x_TD + self.pending_TD


class RopeNorm(RMSNorm):
    """Norms each head by itself, then rotates it by position."""

    def __init__(self, width: int, eps: float, kernels: BoundKernels, world: World):
        super().__init__(width, eps, kernels, world)
        rotate = kernels[rope]
        self.norm_rope = partial(kernels[norm_rope], norm=self.rmsnorm, rotate=rotate)

    def forward(self, x_BSHD: Tensor, angles: RopeAngles) -> Tensor:
        return self.norm(self.norm_rope, x_BSHD, self.weight, angles, self.eps)


class RMSNormOverTp(DeclaringModule):
    """RMSNorm over a width that is sharded over tp: the mean square is one number over all ranks."""

    def __init__(self, width: int, eps: float, world: World):
        super().__init__(world)
        by_width = sharded_over_tp(0)
        weight = self.declare_parameter("weight", width, placement=by_width, std=None)
        self.weight = weight
        self.width = width
        self.eps = eps
        self.tp = world.axis("tp")
        self.norm = Region("norm")

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.apply_rmsnorm, x, self.weight, self.eps)

    def apply_rmsnorm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        squares = wide.square()
        square_sum = squares.sum(-1, keepdim=True)
        mean_square = all_reduce(square_sum, self.tp) / self.width
        inverse_rms = torch.rsqrt(mean_square + eps)
        normed = wide * inverse_rms * weight
        return normed.to(x.dtype)


class RopeNormOverTp(RMSNormOverTp):
    """Norms all heads of a token together, then rotates each by position. For tp of size 1: a rank has all heads."""

    def __init__(self, width: int, eps: float, kernels: BoundKernels, world: World):
        super().__init__(width, eps, world)
        rotate = kernels[rope]
        self.norm_rope = partial(kernels[norm_rope], norm=self.apply_rmsnorm, rotate=rotate)

    def forward(self, x_BSHD: Tensor, angles: RopeAngles) -> Tensor:
        return self.norm(self.norm_rope, x_BSHD, self.weight, angles, self.eps)
