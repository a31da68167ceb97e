"""Placement of a parameter on the grids of ranks, stated once, torch-free. Gradient group, optimizer share and
checkpoint offsets are derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DimCuts = tuple[tuple[int, str], ...]  # dims of a tensor, each with the axis that shards it
# Elements of a bucket of gradients: long enough to use the network well, short enough to start before backward ends.
BUCKET_ELEMENTS = 1 << 25
GRID_AXES = {"dense": ("dp", "cp", "tp"), "expert": ("edp", "ep", "etp")}


@dataclass(frozen=True)
class Placement:
    """A parameter of the dense or the expert grid; `cut` maps a dim of the tensor to the axis that shards it.

    Along every other axis of its grid the parameter is replicated. Each replica gets other tokens (sequence
    parallelism gives every tp rank its own), so the gradient is the plain sum over exactly those axes.
    """

    grid: Literal["dense", "expert"]
    cut: DimCuts = ()

    @property
    def sharded_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, _ in self.cut)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        return tuple(axis for _, axis in self.cut)

    @property
    def gradient_sum_axes(self) -> tuple[str, ...]:
        axes = GRID_AXES[self.grid]
        return tuple(axis for axis in axes if axis not in self.sharded_axes)


REPLICATED = Placement("dense")


def sharded_over_tp(dim: int) -> Placement:
    """A dense parameter sharded along one dim over the tensor-parallel ranks."""
    return Placement("dense", ((dim, "tp"),))


def sharded_over_experts(inner_dim: int) -> Placement:
    """A stack of experts, distributed over ep along dim 0 and each sharded along its inner width over etp."""
    cut = (0, "ep"), (inner_dim, "etp")
    return Placement("expert", cut)
