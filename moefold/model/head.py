"""The last norm and the output matrix, which may be the embedding's. T tokens, D width, V vocabulary."""

from __future__ import annotations

import torch

from moefold.config.run import ModelConfig
from moefold.kernels.bind import Kernels
from moefold.layout.declare import Declaring
from moefold.model.embedding import Embedding
from moefold.model.norm import RMSNorm


class Head(Declaring):
    def __init__(self, model: ModelConfig, embedding: Embedding, kernels: Kernels):
        super().__init__()
        self.norm = RMSNorm(model.hidden, model.norm_eps, kernels)
        self.cross_entropy = kernels.cross_entropy
        if model.tied_head:
            self.matrix_VD = lambda: embedding.weight
        else:
            self.weight = self.declare("weight", model.vocab, model.hidden, std=model.init_std)
            self.matrix_VD = lambda: self.weight

    def loss(self, x_TD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
        """The cross-entropy summed over tokens; the logits of all tokens are never held together."""
        return self.cross_entropy(self.norm(x_TD), self.matrix_VD(), labels_T)

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.norm(x_TD) @ self.matrix_VD().T
