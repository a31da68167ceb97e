"""The last norm and the output matrix, which may be the embedding's.

T tokens of this rank, C of its cp rank, D width; of V words this rank holds v.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from moefold.comm.collectives import all_gather, all_reduce_max_no_grad, all_reduce_no_grad
from moefold.config.run import ModelConfig
from moefold.kernels.bound import BoundKernels
from moefold.kernels.vocabulary.cross_entropy import cross_entropy
from moefold.kernels.vocabulary.vocab_shard import VocabShard
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import sharded_over_tp
from moefold.model.embedding import Embedding
from moefold.model.norm import AddNorm


class FinalNorm(nn.Module):
    """The head's norm alone, for a stage that looks ahead of a head that lies elsewhere."""

    def __init__(self, model: ModelConfig, kernels: BoundKernels, world: World):
        super().__init__()
        eps = model.norm_eps
        self.norm = AddNorm(model.hidden, eps, kernels, world)


class Head(DeclaringModule):
    def __init__(self, model: ModelConfig, embedding: Embedding | None, kernels: BoundKernels, world: World):
        super().__init__(world)
        hidden = model.hidden
        self.norm = AddNorm(hidden, model.norm_eps, kernels, world)
        self.cross_entropy = kernels[cross_entropy]
        self.tp = world.axis("tp")
        if embedding is not None:  # its matrix is the head's too
            self.borrowed = (embedding.weight,)
            self.matrix_vD = lambda: embedding.weight
        else:
            std = model.init_std
            placement = sharded_over_tp(0)
            shape = (model.vocab, hidden)
            weight = self.declare_parameter("weight", *shape, std=std, placement=placement)
            self.weight = weight
            self.matrix_vD = lambda: self.weight

    def forward(self, h_TD: Tensor, labels_C: Tensor | None = None) -> Tensor:
        """Of a normed stream the loss, or all logits where there are no labels. Called, so that hooks on the module see
        its every use."""
        h_CD = all_gather(h_TD, self.tp)
        if labels_C is None:
            return self.logits(h_CD)
        return self.loss(h_CD, labels_C)

    def loss(self, h_CD: Tensor, labels_C: Tensor) -> Tensor:
        """The cross-entropy summed over the tokens of this cp rank, the same on its tp ranks; the logits of all tokens
        are never held together."""
        matrix_vD = self.matrix_vD()
        if self.tp.size == 1:
            return self.cross_entropy(h_CD, matrix_vD, labels_C)
        first = self.tp.index * len(matrix_vD)
        add_up = partial(all_reduce_no_grad, axis=self.tp)
        find_max = partial(all_reduce_max_no_grad, axis=self.tp)
        words = VocabShard(first, add_up, find_max)
        return self.cross_entropy(h_CD, matrix_vD, labels_C, words)

    def logits(self, h_CD: Tensor) -> Tensor:
        """All logits of this cp rank's tokens: (C, V)."""
        logits_Cv = h_CD @ self.matrix_vD().T
        logits_VC = all_gather(logits_Cv.T, self.tp)
        return logits_VC.T
