"""Gradient clipping as a policy: which gradients are measured together, and which are scaled by the result.

A policy that `needs_all_units` is applied once all gradients are reduced. One that does not can be applied to a unit as
soon as the gradients of that unit are, and the unit can be updated at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from moefold.shard.gradients import Gradients, UnitNames, device_number


class ClippingPolicy(Protocol):
    needs_all_units: bool

    def clip_units(self, gradients: Gradients, units: UnitNames) -> Tensor:
        """Set the scales of these units, and return the norm of their gradients before clipping."""
        ...

    def end_step(self, norm: Tensor) -> None:
        """Take note of the norm of all units in a step."""
        ...


class GlobalNormClipping:
    """One norm over dense and expert parameters of all units."""

    needs_all_units = True

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def clip_units(self, gradients: Gradients, units: UnitNames) -> Tensor:
        return gradients.clip(self.max_norm, units)

    def end_step(self, norm: Tensor) -> None: ...


class UnitNormClipping:
    """A norm for each unit, by which that unit alone is scaled."""

    needs_all_units = False

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def clip_units(self, gradients: Gradients, units: UnitNames) -> Tensor:
        norms: list[Tensor] = []
        for unit in units:
            norm = gradients.clip(self.max_norm, [unit])
            norms.append(norm)
        norms_U = torch.stack(norms)
        return norms_U.norm()

    def end_step(self, norm: Tensor) -> None: ...


class PreviousNormClipping:
    """The norm of all units in the step before, by which all units are scaled. In the first step, of which no norm is
    known, what is measured together is scaled by its own."""

    needs_all_units = False

    def __init__(self, max_norm: float, device: torch.device):
        self.max_norm = max_norm
        self.previous = device_number(torch.nan, device)

    def clip_units(self, gradients: Gradients, units: UnitNames) -> Tensor:
        norm = gradients.norm(units)
        is_known = self.previous.isfinite()
        measure = self.previous.where(is_known, norm)
        gradients.scale_down(self.max_norm, norm, measure, units)
        return norm

    def end_step(self, norm: Tensor) -> None:
        is_finite = norm.isfinite()
        known = norm.where(is_finite, self.previous)
        self.previous.copy_(known)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """The state that a checkpoint has of clipping."""
        yield "previous_norm", self.previous


def make_clipping(clip_by: str, max_norm: float, device: torch.device) -> ClippingPolicy:
    """The policy of a value of `optim.clip_by`."""
    if clip_by == "previous":
        return PreviousNormClipping(max_norm, device)
    if clip_by == "unit":
        return UnitNormClipping(max_norm)
    return GlobalNormClipping(max_norm)
