"""Token numbers to vectors. V vocabulary, of which this rank holds v; C tokens of a cp rank, T of this rank."""

from __future__ import annotations

import torch
from torch import Tensor

from moefold.comm.collectives import reduce_scatter
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.vocabulary.embedding import embedding
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import sharded_over_tp


class Embedding(DeclaringModule):
    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__(world)
        by_word = sharded_over_tp(0)
        shape = (model.vocab, model.hidden)
        std = model.init_std
        self.weight = self.declare_parameter("weight", *shape, std=std, placement=by_word)
        self.embedding = kernels[embedding]
        self.tp = world.axis("tp")

    def forward(self, tokens_C: Tensor) -> Tensor:
        """Each rank looks up the words it holds and gives zeros for the rest; the sum has every token once."""
        if self.tp.size == 1:
            return self.embedding(tokens_C, self.weight)
        words = len(self.weight)
        first = self.tp.index * words
        here = tokens_C - first
        held = (here >= 0) & (here < words)
        here_or_none = torch.where(held, here, -1)
        summand_CD = self.embedding(here_or_none, self.weight, True)
        return reduce_scatter(summand_CD, self.tp)
