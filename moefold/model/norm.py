"""RMSNorm as a module: its weight and its region."""

from __future__ import annotations

import torch

from moefold.comm.collectives import total
from moefold.kernels.bind import Kernels
from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.layout.placement import over_tp
from moefold.model.steps import Region


class RMSNorm(Declaring):
    def __init__(self, width: int, eps: float, kernels: Kernels, world: World):
        super().__init__(world)
        self.weight = self.declare("weight", width, std=None)
        self.eps, self.rmsnorm = eps, kernels.rmsnorm
        self.norm = Region()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.rmsnorm, x, self.weight, self.eps)


class RMSNormOverTp(Declaring):
    """The same over a width that is cut over tp: the mean square is one number over all ranks."""

    def __init__(self, width: int, eps: float, world: World):
        super().__init__(world)
        self.weight = self.declare("weight", width, placement=over_tp(0), std=None)
        self.width, self.eps, self.tp = width, eps, world.axis("tp")
        self.norm = Region()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.normed, x)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = total(wide.square().sum(-1, keepdim=True), self.tp) / self.width
        return (wide * torch.rsqrt(mean_square + self.eps) * self.weight).to(x.dtype)
