"""RMSNorm as a module: its weight and its region."""

from __future__ import annotations

import torch

from moefold.kernels.bind import Kernels
from moefold.layout.declare import Declaring
from moefold.model.steps import Region


class RMSNorm(Declaring):
    def __init__(self, width: int, eps: float, kernels: Kernels):
        super().__init__()
        self.weight = self.declare("weight", width, std=None)
        self.eps, self.rmsnorm = eps, kernels.rmsnorm
        self.norm = Region()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.rmsnorm, x, self.weight, self.eps)
