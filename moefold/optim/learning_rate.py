"""The learning rate of a step: linear warm-up, then cosine, or constant with a decay at the end (WSD), or constant."""

from __future__ import annotations

import math

from moefold.config.run import OptimConfig


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """The rate of step number `step` (from one) of `steps`."""
    if step <= optim.warmup:
        return optim.lr * step / optim.warmup
    begin = {"cosine": optim.warmup, "wsd": steps - optim.decay_share * steps, "constant": steps}[optim.decay]
    done = min(1.0, max(0.0, (step - max(begin, optim.warmup)) / max(1.0, steps - max(begin, optim.warmup))))
    shape = (1 + math.cos(math.pi * done)) / 2 if optim.decay == "cosine" else 1 - done
    return optim.lr * (optim.final_lr + (1 - optim.final_lr) * shape)
