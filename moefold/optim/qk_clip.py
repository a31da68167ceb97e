"""QK-clip, the second part of MuonClip: query and key projections of heads whose logits grow too large are rescaled.

    g = threshold / (largest logit of the head in this step), where that is larger than the threshold

    one key head for each query head   W_q and W_k of the head x sqrt(g)
    key heads shared by query heads    W_q of the head x g: a shared key head would change other heads
    latent attention                   rows without RoPE of W_q and of W_k x sqrt(g), rows with RoPE of W_q x g; the
                                       rotated key is shared by all heads and stays

So the logits of the same tokens come to the threshold, and other heads do not change by a bit. It acts on the main
weights, after the update and before weights are published.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.kernels.attention.largest_logit import largest_logit
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World
from moefold.model.attention.attention_base import AttentionBase
from moefold.model.attention.logit_watch import LogitWatch
from moefold.optim.optimizer import Optimizer


class QkClip:
    """Watches the attention layers of this rank. With a threshold of 0 there is nothing to watch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, threshold: float, kernels: BoundKernels, world: World):
        self.optimizer = optimizer
        self.threshold = threshold
        self.token_ranks = world.dp_cp  # ranks that see other tokens, or other shares of the heads
        self.layers: dict[str, AttentionBase] = {}
        if not threshold:
            return
        find_largest = kernels[largest_logit]
        for name, module in model.named_modules():
            if isinstance(module, AttentionBase):
                module.logit_watch = LogitWatch(find_largest)
                self.layers[name] = module

    def rescale_heads(self, updates: Tensor) -> None:
        """Rescale the heads that have exceeded the threshold since the last call, on every rank alike. If the step
        updates nothing, heads stay too."""
        if not self.layers:
            return
        largest: list[Tensor] = []
        for module in self.layers.values():
            watch = watch_of(module)
            largest.append(watch.take())
        largest_LH = torch.stack(largest)
        all_reduce_max_no_grad(largest_LH, self.token_ranks)
        exceeds_LH = largest_LH > self.threshold
        rescales_LH = exceeds_LH & largest_LH.isfinite() & updates
        ratio_LH = self.threshold / largest_LH
        factor_LH = torch.where(rescales_LH, ratio_LH, 1.0)
        factors: dict[str, Tensor] = {}
        for layer, factor_H in zip(self.layers, factor_LH, strict=True):
            module = self.layers[layer]
            of_parameters = module.clip_factors(factor_H)
            for name, factor_HW in of_parameters.items():
                factors[f"{layer}.{name}"] = factor_HW
        self.optimizer.multiply_rows(factors)


def watch_of(module: AttentionBase) -> LogitWatch:
    assert module.logit_watch is not None
    return module.logit_watch
