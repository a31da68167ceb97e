"""AdamW over flat buckets, with fp32 main weights beside a model in lower precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.adamw import AdamWStep, adamw
from moefold.layout.declare import DeclaredParameter
from moefold.shard.buckets import Bucket
from moefold.shard.split_storage import SplitFp32


@dataclass
class StateSlice:
    """The optimizer's state for this rank's share of a bucket. `weights` are the model's, which for an fp32 model are
    the main weights themselves. Where main weights are kept as halves, `main` is the lower one."""

    bucket: Bucket
    weights: torch.Tensor
    main: torch.Tensor
    mean: torch.Tensor
    mean_square: torch.Tensor

    @property
    def has_main_copy(self) -> bool:
        return self.main is not self.weights

    def kinds(self) -> dict[str, torch.Tensor]:
        """What is to be remembered, by name; it can be loaded into."""
        kinds = {"mean": self.mean, "mean_square": self.mean_square}
        if not self.has_main_copy:
            return kinds
        return kinds | {"main": SplitFp32(self.weights, self.main) if self.main.dtype == torch.int16 else self.main}


class AdamW:
    def __init__(self, buckets: list[Bucket], optim: OptimConfig, kernels: BoundKernels):
        self.optim, self.adamw = optim, kernels[adamw]
        self.slices = [self.make_state_slice(bucket) for bucket in buckets]

    def make_state_slice(self, bucket: Bucket) -> StateSlice:
        weights = bucket.weights[bucket.share]
        wide = torch.promote_types(weights.dtype, torch.float32)
        moments = torch.bfloat16 if self.optim.moments == "bf16" else wide
        mean, mean_square = (torch.zeros_like(weights, dtype=moments) for _ in range(2))
        split = self.optim.main == "split" and weights.dtype == torch.bfloat16
        main = torch.zeros_like(weights, dtype=torch.int16) if split else weights.to(wide)
        return StateSlice(bucket, weights, main, mean, mean_square)

    def step(self, number: int, lr: float, scale: torch.Tensor | None = None) -> None:
        """Update the main weights from the buckets' gradients times `scale`, and round them into the model's; `number`
        counts from one. Other ranks see the new weights once they are published."""
        o = self.optim
        for place, s in enumerate(self.slices):
            decay = o.weight_decay if s.bucket.decays else 0.0
            seed = (
                stochastic_rounding_seed(number, place) if (o.moments, o.rounding) == ("bf16", "stochastic") else None
            )
            pace = AdamWStep(number, lr, o.beta1, o.beta2, o.eps, decay, seed)
            gradients = s.bucket.reduced_gradient_share
            factor = gradients.new_ones((), dtype=torch.float64) if scale is None else scale
            self.adamw(s.main, gradients, s.mean, s.mean_square, s.weights if s.has_main_copy else None, factor, pace)

    def state(self) -> Iterator[tuple[DeclaredParameter, str, int, torch.Tensor]]:
        """Every piece of state this rank holds: (parameter, kind, from, values), the values being those of the
        flattened parameter from there on, as views that can be loaded into."""
        for s in self.slices:
            kinds = s.kinds()
            for parameter, first, last, at in s.bucket.pieces():
                for kind, flat in kinds.items():
                    yield parameter, kind, first, flat[at : at + last - first]


def stochastic_rounding_seed(step: int, bucket: int) -> int:
    """Another for every step and bucket, below 2^31."""
    return (step * 1_000_003 + bucket * 7_919) % (1 << 31)
