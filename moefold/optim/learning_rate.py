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
    begin = optim.warmup if optim.decay == "cosine" else max(optim.warmup, steps * (1 - optim.decay_share))
    done = min(1.0, max(0.0, (step - begin) / (steps - begin))) if steps > begin else 1.0
    shape = (1 + math.cos(math.pi * done)) / 2 if optim.decay == "cosine" else 1 - done
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * shape)
