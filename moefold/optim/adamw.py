"""AdamW as a rule: two moments for every element, fp32 main weights beside a model in lower precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moefold.config.optimizer_groups import RULE_NAMES, OptimizerGroup
from moefold.config.run import OptimConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.optimizer.adamw import AdamWOptions, adamw, adamw_scalars
from moefold.optim.rule import BucketShare, register_rule


@register_rule("adamw", RULE_NAMES["adamw"])
class AdamW:
    kinds = ("mean", "mean_square")
    whole = False

    def __init__(self, group: OptimizerGroup, optim: OptimConfig, kernels: BoundKernels):
        beta1, beta2 = group.betas or (optim.beta1, optim.beta2)
        eps = optim.eps if group.eps is None else group.eps
        decay = optim.weight_decay if group.decay is None else group.decay
        stochastic = optim.moments == "bf16" and optim.rounding == "stochastic"
        self.options = AdamWOptions(beta1, beta2, eps, decay, stochastic)
        self.bf16_moments = optim.moments == "bf16"
        self.adamw = kernels[adamw]

    def options_of(self, share: BucketShare) -> AdamWOptions:
        """The options of a bucket: norms and biases do not decay."""
        if share.bucket.decays:
            return self.options
        return self.options._replace(decay=0.0)

    def state(self, share: BucketShare) -> dict[str, torch.Tensor]:
        dtype = torch.bfloat16 if self.bf16_moments else share.wide_dtype
        return {kind: torch.zeros_like(share.weights, dtype=dtype) for kind in self.kinds}

    def scalars(self, share: BucketShare, step: int, lr: float) -> Sequence[float]:
        seed = stochastic_rounding_seed(step, share.number)
        return adamw_scalars(step, lr, self.options_of(share), seed)

    def update(self, share: BucketShare, scale: torch.Tensor, scalars: torch.Tensor) -> None:
        storage = share.storage
        moments = (share.state["mean"], share.state["mean_square"])
        options = self.options_of(share)
        fused = storage.fused_operands()
        if fused is not None:
            self.adamw(fused.main, share.gradient, *moments, fused.weights, scale, scalars, options)
            return
        main = storage.main_values()
        self.adamw(main, share.gradient, *moments, None, scale, scalars, options)
        storage.refresh(main)


def stochastic_rounding_seed(step: int, bucket: int) -> int:
    """A seed below 2^31, another for every step and bucket."""
    return (step * 1_000_003 + bucket * 7_919) % (1 << 31)
