"""The numbers of one AdamW step: options of a parameter group, and scalars that change from step to step.

Scalars lie in a small tensor on the device, so that a captured graph reads those of the step it is replayed for.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AdamWOptions(NamedTuple):
    """The numbers that stay the same over a run. `stochastic`: bf16 moments are rounded up or down at random, with
    probabilities by distance, so that changes below the resolution of bf16 add up in the mean. `stochastic_main`: so
    are main weights that are coarser than fp32, in bf16 or in blocks."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    stochastic: bool = False
    stochastic_main: bool = True


class AdamWScalars(NamedTuple):
    """The numbers of one step, in the order in which they lie in a tensor of fp64 on the device."""

    step: float  # counts from one
    lr: float
    step_size: float  # the learning rate, corrected for the mean's start at zero
    keep: float  # what weight decay leaves of a weight
    square_correction: float  # what the mean square is divided by, since it started at zero
    inverse_root: float  # one over the square root of that
    seed: float  # of stochastic rounding, a whole number below 2^31


def adamw_scalars(step: int, lr: float, options: AdamWOptions, seed: int = 0) -> AdamWScalars:
    mean_correction = 1 - options.beta1**step
    square_correction = 1 - options.beta2**step
    return AdamWScalars(
        step=step,
        lr=lr,
        step_size=lr / mean_correction,
        keep=1 - lr * options.decay,
        square_correction=square_correction,
        inverse_root=square_correction**-0.5,
        seed=seed,
    )


def scalars_on_host(scalars: Tensor) -> AdamWScalars:
    """The numbers of the step; waits for the device, if they are not in host memory."""
    count = len(AdamWScalars._fields)
    return AdamWScalars(*scalars[:count].tolist())
