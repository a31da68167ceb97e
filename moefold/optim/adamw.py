"""AdamW over flat buckets, with fp32 main weights beside a model in lower precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moefold.config.run import OptimConfig
from moefold.kernels.bind import Kernels
from moefold.layout.declare import Parameter
from moefold.shard.buckets import Bucket


@dataclass
class Slice:
    """The optimizer's state for this rank's share of a bucket. For an fp32 model `main` is the model's own weights."""

    bucket: Bucket
    main: torch.Tensor
    mean: torch.Tensor
    mean_square: torch.Tensor
    has_copy: bool


class AdamW:
    def __init__(self, buckets: list[Bucket], optim: OptimConfig, kernels: Kernels):
        self.optim, self.adamw = optim, kernels.adamw
        self.slices = [self.slice_of(bucket) for bucket in buckets]

    def slice_of(self, bucket: Bucket) -> Slice:
        weights = bucket.weights[bucket.share]
        wide = torch.promote_types(weights.dtype, torch.float32)
        moments = torch.bfloat16 if self.optim.moments == "bf16" else wide
        mean, mean_square = (torch.zeros_like(weights, dtype=moments) for _ in range(2))
        return Slice(bucket, weights.to(wide), mean, mean_square, has_copy=weights.dtype != wide)

    def step(self, number: int, lr: float, scale: torch.Tensor | None = None) -> None:
        """Update the main weights from the buckets' gradients, and round them into the model's; `number` counts from
        one. Other ranks see the new weights once they are published."""
        o = self.optim
        if scale is not None and not scale.isfinite():
            return
        for s in self.slices:
            decay = o.weight_decay if s.bucket.decays else 0.0
            gradients = s.bucket.gradients[s.bucket.share].to(s.main.dtype)
            self.adamw(s.main, gradients, s.mean, s.mean_square, number, lr, o.beta1, o.beta2, o.eps, decay)
            if s.has_copy:
                s.bucket.weights[s.bucket.share] = s.main.to(s.bucket.weights.dtype)

    def state(self) -> Iterator[tuple[Parameter, str, int, torch.Tensor]]:
        """Every piece of state this rank holds: (parameter, kind, from, values), the values being those of the
        flattened parameter from there on, as views that can be loaded into."""
        for s in self.slices:
            flats = {"mean": s.mean, "mean_square": s.mean_square, **({"main": s.main} if s.has_copy else {})}
            for parameter, first, last, at in s.bucket.pieces():
                for kind, flat in flats.items():
                    yield parameter, kind, first, flat[at : at + last - first]
