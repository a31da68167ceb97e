"""Gradient clipping as a policy: which gradients are measured together, and which are scaled by the result.

A policy that `needs_all_units` is applied once all gradients are reduced. One that does not can be applied to a unit as
soon as the gradients of that unit are, and the unit can be updated at once.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch

from moefold.shard.gradients import Gradients


class ClippingPolicy(Protocol):
    needs_all_units: bool

    def clip_units(self, gradients: Gradients, units: Collection[str]) -> torch.Tensor:
        """Set the scales of these units, and return the norm of their gradients before clipping."""
        ...


class GlobalNormClipping:
    """One norm over dense and expert parameters of all units."""

    needs_all_units = True

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def clip_units(self, gradients: Gradients, units: Collection[str]) -> torch.Tensor:
        return gradients.clip(self.max_norm, units)
