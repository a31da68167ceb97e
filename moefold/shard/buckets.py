"""Parameters, gradients and optimizer state in a few flat tensors, each cut over the ranks that would hold copies.

    weights    | query | pad | key | pad | ...        the model's parameters are views of it, in its precision
    gradients  | d query | .. | d key | ..  | ...     microbatches add up here (sums.py)
    share        this rank's part of both: its optimizer state is for that alone (ZeRO-1)

A bucket holds parameters of one placement. The ranks along its `summed_axes` hold the same parameters and see other
tokens: gradients are summed over them, each rank keeping its share, and updated shares are handed back to all.
Buckets are filled from the end of the model to its beginning, as backward finishes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from moefold.layout.axes import Axis, World
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.placement import Placement
from moefold.shard.gradient_sums import GradientSums

ALIGNMENT = 128  # elements: kernels want views that begin at multiples of 16 bytes, and wide loads like more
BUCKET_ELEMENTS = 1 << 25  # elements: long enough to use the network well, short enough to start before backward ends


@dataclass
class Bucket:
    """Parameters that share a placement and whether they decay; `replicas` are the ranks that hold the same ones."""

    placement: Placement
    decays: bool
    parameters: list[DeclaredParameter]
    starts: list[int]
    weights: torch.Tensor
    sums: GradientSums
    replicas: Axis
    holders: tuple[int, ...] = ()  # pipeline ranks that hold a copy too: the gradient is the sum over them

    @property
    def gradients(self) -> torch.Tensor:
        """What has been added up on this rank since the step began."""
        return self.sums.whole()

    @property
    def reduced_gradient_share(self) -> torch.Tensor:
        """This rank's share of the sum over ranks, once that is there; without one, of its own."""
        return self.gradients[self.share] if self.sums.reduced is None else self.sums.reduced

    @property
    def share(self) -> slice:
        size = len(self.weights) // self.replicas.size
        return slice(self.replicas.index * size, (self.replicas.index + 1) * size)

    def parameter_views(self, flat: torch.Tensor) -> Iterator[tuple[DeclaredParameter, torch.Tensor]]:
        """Each parameter's part of a flat tensor of this bucket, in the parameter's shape."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            tensor = parameter.tensor
            yield parameter, flat[start : start + tensor.numel()].view(tensor.shape)

    def pieces(self) -> Iterator[tuple[DeclaredParameter, int, int, int]]:
        """What this rank's share holds: (parameter, from, to, at), the elements from..to of the flattened parameter
        lying at `at` in the share."""
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            first = max(self.share.start, start)
            last = min(self.share.stop, start + parameter.tensor.numel())
            inside = first < last  # else nothing of it lies here; it is named all the same
            yield (parameter, first - start, last - start, first - self.share.start) if inside else (parameter, 0, 0, 0)


def fill_buckets(
    model: nn.Module,
    world: World,
    most: int = BUCKET_ELEMENTS,
    held: Mapping[str, tuple[int, ...]] | None = None,
    gradients: str = "fp32",
) -> list[Bucket]:
    """Group the parameters and move them into flat tensors; the model goes on using views of these. `held`: parameters
    of which several pipeline ranks hold copies, each in a bucket of its own, so that it lies alike on all.
    `gradients`: what those of a bf16 model are kept in."""
    held = held or {}
    open_groups: dict[tuple[Placement, bool], list[DeclaredParameter]] = {}
    full: list[list[DeclaredParameter]] = []
    alone = [parameter for parameter in declared_parameters(model) if parameter.name in held]
    for parameter in reversed([p for p in declared_parameters(model) if p.name not in held]):
        kind = (parameter.declaration.placement, parameter.declaration.decays)
        group = open_groups.setdefault(kind, [])
        group.append(parameter)
        if sum(p.tensor.numel() for p in group) >= most:
            full.append(open_groups.pop(kind))
    shared = [make_flat_bucket([parameter], world, gradients, held[parameter.name]) for parameter in alone]
    return [make_flat_bucket(group, world, gradients) for group in [*full, *open_groups.values()]] + shared


def gradient_sum_dtype(parameter: torch.Tensor, gradients: str = "fp32") -> torch.dtype:
    """What gradients add up in: fp32 for lower precision, unless they are to be kept in that. For fp32 on a CPU fp64,
    so that sums do not depend on their order and a run gives the same losses on any number of ranks; a GPU's memory is
    too dear for that."""
    if gradients == "bf16" and parameter.dtype == torch.bfloat16:
        return torch.bfloat16
    if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
        return torch.float64
    return torch.promote_types(parameter.dtype, torch.float32)


def make_flat_bucket(
    parameters: list[DeclaredParameter], world: World, gradients: str, holders: tuple[int, ...] = ()
) -> Bucket:
    starts, end = [], 0
    for parameter in parameters:
        starts.append(end)
        end += -(-parameter.tensor.numel() // ALIGNMENT) * ALIGNMENT
    made = parameters[0].declaration
    replicas = world.gradients_of(made.placement)
    end = -(-end // (ALIGNMENT * replicas.size)) * ALIGNMENT * replicas.size
    like = parameters[0].tensor
    weights = torch.zeros(end, dtype=like.dtype, device=like.device)
    spans = [(start, start + p.tensor.numel()) for p, start in zip(parameters, starts, strict=True)]
    sums = GradientSums(spans, end, weights, gradient_sum_dtype(like, gradients))
    bucket = Bucket(made.placement, made.decays, parameters, starts, weights, sums, replicas, holders)
    for parameter, view in bucket.parameter_views(weights):
        view.copy_(parameter.tensor.detach())
        parameter.tensor.data = view
    return bucket
