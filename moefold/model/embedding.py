"""Token numbers to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.config.run import ModelConfig
from moefold.layout.declare import Declaring


class Embedding(Declaring):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.weight = self.declare("weight", model.vocab, model.hidden, std=model.init_std)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens_T, self.weight)
