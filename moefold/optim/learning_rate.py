"""The learning rate of a step: linear warm-up, then cosine, or constant with a decay at the end (WSD), or constant."""

from __future__ import annotations

import math

from moefold.config.run import OptimConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """The rate of step number `step` (from one) of `steps`."""
    if step <= optim.warmup:
        return optim.lr * step / optim.warmup
    if optim.decay == "constant":
        return optim.lr
    progress = decay_progress(step, steps, optim)
    shape = 1 - progress
    if optim.decay == "cosine":
        angle = math.pi * progress
        shape = (1 + math.cos(angle)) / 2
    falling = 1 - optim.final_lr
    share = optim.final_lr + falling * shape
    return optim.lr * share


def decay_progress(step: int, steps: int, optim: OptimConfig) -> float:
    """How far the decay has come: 0 where it begins, 1 at the last step."""
    begin = optim.warmup
    if optim.decay == "wsd":
        constant_share = 1 - optim.decay_share
        begin = max(begin, steps * constant_share)
    if steps <= begin:
        return 1.0
    length = steps - begin
    progress = (step - begin) / length
    return min(1.0, max(0.0, progress))
