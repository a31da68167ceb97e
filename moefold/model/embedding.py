"""Token numbers to vectors. V vocabulary, of which this rank holds v; C tokens of a cp rank, T of this rank."""

from __future__ import annotations

import torch

from moefold.comm.collectives import scatter_sum
from moefold.config.run import ModelConfig
from moefold.kernels.bind import Kernels
from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.layout.placement import over_tp


class Embedding(Declaring):
    def __init__(self, model: ModelConfig, kernels: Kernels, world: World):
        super().__init__(world)
        self.weight = self.declare("weight", model.vocab, model.hidden, std=model.init_std, placement=over_tp(0))
        self.embedding, self.tp = kernels.embedding, world.axis("tp")

    def forward(self, tokens_C: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the words it holds and gives zeros for the rest; the sum has every token once."""
        if self.tp.size == 1:
            return self.embedding(tokens_C, self.weight)
        here = tokens_C - self.tp.index * len(self.weight)
        held = (here >= 0) & (here < len(self.weight))
        return scatter_sum(self.embedding(torch.where(held, here, -1), self.weight, True), self.tp)
