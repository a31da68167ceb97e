"""The numbers of one Muon step: options of a parameter group, and scalars that change from step to step.

Scalars lie in a small tensor on the device, as those of AdamW (adamw_scalars.py).
"""

from __future__ import annotations

from typing import NamedTuple


class MuonOptions(NamedTuple):
    """The numbers that stay the same over a run. `stochastic`: a bf16 momentum is rounded up or down at random."""

    momentum: float
    nesterov: bool
    stochastic: bool = False


class MuonScalars(NamedTuple):
    """The numbers of one step, in the order in which they lie in a tensor of fp64 on the device."""

    lr: float
    keep: float  # what weight decay leaves of a weight
    seed: float  # of stochastic rounding, a whole number below 2^31
