"""The last norm and the output matrix, which may be the embedding's.

T tokens of this rank, C of its cp rank, D width; of V words this rank holds v.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from moefold.comm.collectives import all_gather, all_reduce_max_no_grad, all_reduce_no_grad
from moefold.config.run import ModelConfig
from moefold.kernels.linear.matmul import plain_product, tiled_product
from moefold.kernels.vocabulary.cross_entropy import cross_entropy
from moefold.kernels.vocabulary.token_losses import token_losses
from moefold.kernels.vocabulary.vocab_shard import WHOLE_VOCABULARY, VocabShard
from moefold.layout.declare import DeclaringModule
from moefold.model.embedding import Embedding, declare_word_vectors
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts


class FinalNorm(nn.Module):
    """The head's norm alone, for a stage that looks ahead of a head that lies elsewhere."""

    def __init__(self, model: ModelConfig, parts: ModelParts):
        super().__init__()
        self.norm = AddNorm(model, parts)


class Head(DeclaringModule):
    def __init__(self, model: ModelConfig, embedding: Embedding | None, parts: ModelParts):
        super().__init__(parts.world)
        self.norm = AddNorm(model, parts)
        kernels = parts.kernels
        self.cross_entropy = kernels[cross_entropy]
        self.token_losses = kernels[token_losses]
        is_invariant = kernels.facts.invariant
        self.multiply = tiled_product if is_invariant else plain_product
        world = self.world
        self.tp = world.axis("tp")
        if embedding is None:
            self.weight = declare_word_vectors(self, model)
            self.matrix_vD = lambda: self.weight
        else:  # the embedding's matrix is the head's too
            self.borrowed = (embedding.weight,)
            self.matrix_vD = lambda: embedding.weight

    def forward(self, h_TD: Tensor, labels_C: Tensor | None = None, by_token: bool = False) -> Tensor:
        """Of a normed stream the loss, summed over tokens or by token, or all logits where there are no labels. Called,
        so that hooks on the module see its every use."""
        h_CD = all_gather(h_TD, self.tp)
        if labels_C is None:
            return self.logits(h_CD)
        return self.loss(h_CD, labels_C, by_token)

    def loss(self, h_CD: Tensor, labels_C: Tensor, by_token: bool = False) -> Tensor:
        """The cross-entropy of the tokens of this cp rank, the same on its tp ranks; the logits of all tokens are never
        held together."""
        score = self.token_losses if by_token else self.cross_entropy
        return score(h_CD, self.matrix_vD(), labels_C, self.words())

    def words(self) -> VocabShard:
        """The words that this tp rank holds."""
        tp = self.tp
        if tp.is_alone:
            return WHOLE_VOCABULARY
        first = tp.index * len(self.matrix_vD())
        add_up = partial(all_reduce_no_grad, axis=tp)
        find_max = partial(all_reduce_max_no_grad, axis=tp)
        return VocabShard(first, add_up, find_max)

    def logits(self, h_CD: Tensor) -> Tensor:
        """All logits of this cp rank's tokens: (C, V)."""
        logits_vC = self.logits_of_words(h_CD).T
        logits_VC = all_gather(logits_vC, self.tp)
        return logits_VC.T

    def logits_of_words(self, h_CD: Tensor) -> Tensor:
        """The logits of the words that this tp rank holds: (C, v)."""
        return self.multiply(h_CD, self.matrix_vD())
