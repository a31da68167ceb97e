"""Gradients are sums: over microbatches, then over the ranks that saw other tokens, then divided once by the tokens.

There is no averaging and no factor that depends on the layout. Which ranks to sum over is read off the placement.
"""

from __future__ import annotations

import torch

from moefold.comm.collectives import sum_
from moefold.layout.axes import World
from moefold.shard.buckets import Bucket


class Gradients:
    def __init__(self, buckets: list[Bucket], world: World):
        self.buckets, self.world = buckets, world
        for bucket in buckets:
            for parameter, view in bucket.views(bucket.gradients):
                parameter.tensor.register_post_accumulate_grad_hook(adding_to(view))

    def finish(self, tokens: torch.Tensor) -> None:
        """Sum over the ranks that hold replicas, and divide by the number of tokens of the global batch."""
        for bucket in self.buckets:
            sum_(bucket.gradients, self.world.axis(*bucket.placement.summed_axes))
            bucket.gradients /= tokens

    def norm(self) -> torch.Tensor:
        """The length of the whole gradient, dense and expert parameters together, each element counted once."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for bucket in self.buckets:
            squares = torch.linalg.vector_norm(bucket.gradients).double().square()
            for axis in bucket.placement.cut_axes:
                squares = sum_(squares, self.world.axis(axis))
            total += squares
        return total.sqrt()

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient down to `max_norm` if it is longer; returns the norm before that."""
        norm = self.norm()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:
            bucket.gradients *= scale.to(bucket.gradients.dtype)
        return norm

    def clear(self) -> None:
        for bucket in self.buckets:
            bucket.gradients.zero_()


def adding_to(view: torch.Tensor):
    """A hook that adds a parameter's finished gradient to its place in the bucket and lets it go."""

    def add(tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        view.add_(tensor.grad)
        tensor.grad = None

    return add
