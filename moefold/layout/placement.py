"""Where a parameter lives, said once, torch-free. Gradient group, optimizer slice and checkpoint offsets read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GRID_AXES = {"dense": ("dp", "cp", "tp"), "expert": ("edp", "ep", "etp")}


@dataclass(frozen=True)
class Placement:
    """A parameter of the dense or the expert grid; `cut` maps a dim of the tensor to the axis that cuts it.

    Along an axis that does not cut it the parameter is replicated. Each replica sees other tokens (sequence
    parallelism gives every tp rank its own), so its gradient is the plain sum over exactly those axes.
    """

    grid: Literal["dense", "expert"]
    cut: tuple[tuple[int, str], ...] = ()

    @property
    def sharded_dims(self) -> tuple[int, ...]:
        return tuple(dim for dim, _ in self.cut)

    @property
    def sharded_axes(self) -> tuple[str, ...]:
        return tuple(axis for _, axis in self.cut)

    @property
    def gradient_sum_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in GRID_AXES[self.grid] if axis not in self.sharded_axes)


REPLICATED = Placement("dense")


def sharded_over_tp(dim: int) -> Placement:
    """A dense parameter cut along one dim over the tensor-parallel ranks."""
    return Placement("dense", ((dim, "tp"),))


def sharded_over_experts(inner_dim: int) -> Placement:
    """A stack of experts, spread over ep along dim 0 and each cut along its inner width over etp."""
    return Placement("expert", ((0, "ep"), (inner_dim, "etp")))
