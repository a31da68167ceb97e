"""Token numbers to vectors. V vocabulary, of which this rank holds v; C tokens of a cp rank, T of this rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moefold.comm.collectives import reduce_scatter
from moefold.config.run import ModelConfig
from moefold.kernels.vocabulary.embedding import embedding
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import sharded_over_tp
from moefold.model.parts import ModelParts


class Embedding(DeclaringModule):
    def __init__(self, model: ModelConfig, parts: ModelParts):
        super().__init__(parts.world)
        self.weight = declare_word_vectors(self, model)
        kernels = parts.kernels
        self.embedding = kernels[embedding]
        world = self.world
        self.tp = world.axis("tp")

    def forward(self, tokens_C: Tensor) -> Tensor:
        """Each rank looks up the words it holds and gives zeros for the rest; the sum has every token once."""
        weight_vD = self.weight
        if self.tp.is_alone:
            return self.embedding(tokens_C, weight_vD)
        words = len(weight_vD)
        first = self.tp.index * words
        here = tokens_C - first
        not_before = here >= 0
        not_behind = here < words
        held = not_before & not_behind
        here_or_none = torch.where(held, here, -1)
        summand_CD = self.embedding(here_or_none, weight_vD, True)
        return reduce_scatter(summand_CD, self.tp)


def declare_word_vectors(module: DeclaringModule, model: ModelConfig) -> nn.Parameter:
    """A module's `weight` (v, D): one row for each word, which tp shards."""
    by_word = sharded_over_tp(0)
    shape = (model.vocab, model.hidden)
    std = model.init_std
    return module.declare_parameter("weight", *shape, placement=by_word, std=std, rows="words")
