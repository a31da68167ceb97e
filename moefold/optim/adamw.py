"""AdamW as a rule: two moments for every element, fp32 main weights beside a model in lower precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefold.config.optimizer_groups import OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.adamw import adamw
from moefold.kernels.optimizer.adamw_blocks import adamw_blocks
from moefold.kernels.optimizer.adamw_scalars import AdamWOptions, adamw_scalars
from moefold.optim.block_copies import parts_to_update
from moefold.optim.rule import BucketShare
from moefold.shard.storage import FusedOperands


class AdamW:
    kinds: tuple[str, ...] = ("mean", "mean_square")
    whole = False

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        common = (optim.beta1, optim.beta2)
        beta1, beta2 = group.betas or common
        eps = optim.eps if group.eps is None else group.eps
        decay = optim.weight_decay if group.decay is None else group.decay
        stochastic = (optim.moments, optim.rounding) == ("bf16", "stochastic")
        self.options = AdamWOptions(beta1, beta2, eps, decay, stochastic)
        self.bf16_moments = optim.moments == "bf16"
        self.adamw = kernels[adamw]
        self.adamw_blocks = kernels[adamw_blocks]

    def options_of(self, share: BucketShare) -> AdamWOptions:
        """The options of a bucket: norms and biases do not decay."""
        if share.bucket.decays:
            return self.options
        return self.options._replace(decay=0.0)

    def state(self, share: BucketShare) -> dict[str, Tensor]:
        dtype = torch.bfloat16 if self.bf16_moments else share.wide_dtype
        mean = torch.zeros_like(share.weights, dtype=dtype)
        mean_square = torch.zeros_like(mean)
        return {"mean": mean, "mean_square": mean_square}

    def step_numbers(self, share: BucketShare, step: int, lr: float) -> Sequence[float]:
        options = self.options_of(share)
        seed = stochastic_rounding_seed(step, share.number)
        return adamw_scalars(step, lr, options, seed)

    def update(self, share: BucketShare, scale: Tensor, scalars: Tensor) -> None:
        storage = share.storage
        fused = storage.fused_operands()
        main, weights = fused or FusedOperands(storage.main_values(), None)
        gradient = share.gradient
        mean = share.state["mean"]
        mean_square = share.state["mean_square"]
        numbers = (scale, scalars, self.options_of(share))
        whole = slice(0, len(main))
        parts = parts_to_update(share) if fused else [(whole, None)]
        for window, copy in parts:
            part = (main[window], gradient[window], mean[window], mean_square[window])
            beside = None if weights is None else weights[window]
            if copy is None:
                self.adamw(*part, beside, *numbers, window.start)
            else:
                self.adamw_blocks(*part, beside, *numbers, window.start, *copy.tensors, copy.rule, share.weights.dtype)
        if fused is None:
            storage.refresh_weights(main)


def stochastic_rounding_seed(step: int, bucket: int) -> int:
    """A seed below 2^31, another for every step and bucket."""
    mixed = step * 1_000_003 + bucket * 7_919
    return mixed % (1 << 31)
