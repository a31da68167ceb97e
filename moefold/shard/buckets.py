"""Parameters and their gradients in a few flat tensors, one per kind of placement.

    weights_flat   | query | pad | key | pad | ...      the model's parameters are views of it, in its precision
    gradients_flat | d query | .. | d key | ..  | ...   fp32, whatever the precision; microbatches add up here

Reducing, measuring, clipping and updating then act on a handful of long tensors instead of thousands of short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from moefold.layout.declare import Parameter, declared_parameters
from moefold.layout.placement import Placement

ALIGN = 128  # elements: kernels want views that begin at multiples of 16 bytes, and wide loads like more


@dataclass
class Bucket:
    """Parameters that share a placement and whether they decay."""

    placement: Placement
    decays: bool
    parameters: list[Parameter]
    starts: list[int]
    weights: torch.Tensor
    gradients: torch.Tensor

    def views(self, flat: torch.Tensor) -> Iterator[tuple[Parameter, torch.Tensor]]:
        """Each parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            tensor = parameter.tensor
            yield parameter, flat[start : start + tensor.numel()].view(tensor.shape)


def fill_buckets(model: nn.Module) -> list[Bucket]:
    """Group the parameters and move them into flat tensors; the model goes on using views of these."""
    groups: dict[tuple[Placement, bool], list[Parameter]] = {}
    for parameter in declared_parameters(model):
        kind = (parameter.declaration.placement, parameter.declaration.decays)
        groups.setdefault(kind, []).append(parameter)
    return [make_bucket(placement, decays, parameters) for (placement, decays), parameters in groups.items()]


def make_bucket(placement: Placement, decays: bool, parameters: list[Parameter]) -> Bucket:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.tensor.numel() // ALIGN) * ALIGN
    like = parameters[0].tensor
    weights = torch.zeros(end, dtype=like.dtype, device=like.device)
    gradients = torch.zeros(end, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    bucket = Bucket(placement, decays, parameters, starts, weights, gradients)
    for parameter, view in bucket.views(weights):
        view.copy_(parameter.tensor.detach())
        parameter.tensor.data = view
    return bucket
