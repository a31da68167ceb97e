"""AdamW over flat buckets, with fp32 main weights beside a model in lower precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moefold.config.run import OptimConfig
from moefold.kernels.bind import Kernels
from moefold.shard.buckets import Bucket


@dataclass
class Slice:
    """The optimizer's part of a bucket. For an fp32 model `main` is the model's own weights, not a copy."""

    bucket: Bucket
    main: torch.Tensor
    mean: torch.Tensor
    mean_square: torch.Tensor

    @property
    def has_copy(self) -> bool:
        return self.main is not self.bucket.weights


class AdamW:
    def __init__(self, buckets: list[Bucket], optim: OptimConfig, kernels: Kernels):
        self.optim, self.adamw = optim, kernels.adamw
        self.slices = [self.slice_of(bucket) for bucket in buckets]

    def slice_of(self, bucket: Bucket) -> Slice:
        wide = torch.promote_types(bucket.weights.dtype, torch.float32)
        mean, mean_square = (torch.zeros_like(bucket.weights, dtype=wide) for _ in range(2))
        return Slice(bucket, bucket.weights.to(wide), mean, mean_square)

    def step(self, number: int, lr: float) -> None:
        """Update the main weights from the buckets' gradients; `number` counts from one."""
        o = self.optim
        for s in self.slices:
            decay = o.weight_decay if s.bucket.decays else 0.0
            gradients = s.bucket.gradients
            self.adamw(s.main, gradients, s.mean, s.mean_square, number, lr, o.beta1, o.beta2, o.eps, decay)

    def publish(self) -> None:
        """Hand the updated main weights to the model."""
        for s in self.slices:
            if s.has_copy:
                s.bucket.weights.copy_(s.main)

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the optimizer by logical name, as views that can be loaded into."""
        for s in self.slices:
            flats = {"mean": s.mean, "mean_square": s.mean_square, **({"main": s.main} if s.has_copy else {})}
            for kind, flat in flats.items():
                for parameter, view in s.bucket.views(flat):
                    yield f"{parameter.name}.{kind}", view
