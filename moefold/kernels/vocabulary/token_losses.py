"""The head and the loss of each token by itself: -log softmax(x W^T)[label], zero where there is no label. For
objectives that weigh tokens by what the losses come to.

T tokens, D width, V vocabulary. The weights of tokens are known behind forward alone, so the chunked form keeps no
gradients: backward computes the logits of each chunk again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.linear.matmul import matmul_into
from moefold.kernels.registry import register_op
from moefold.kernels.vocabulary.cross_entropy import (
    CHUNK_LOGITS,
    add_product,
    cross_entropy_cases,
    label_columns,
    log_sum_of_shards,
    refuse_vocab_shards,
    tokens_of_chunk,
    wide_dtype,
    wide_logits,
)
from moefold.kernels.vocabulary.vocab_shard import WHOLE_VOCABULARY, VocabShard
from moefold.layout.gradient_sink import memory_for_gradient
from moefold.layout.labels import IGNORE_INDEX


@register_op
def token_losses(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard = WHOLE_VOCABULARY) -> Tensor:
    refuse_vocab_shards("token_losses", words)
    logits = wide_logits(x_TD, w_VD)
    return F.cross_entropy(logits, labels_T, reduction="none", ignore_index=IGNORE_INDEX)


@token_losses.register_fast("chunked")
def token_losses_chunked(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard = WHOLE_VOCABULARY) -> Tensor:
    return ChunkedTokenLosses.apply(x_TD, w_VD, labels_T, words)  # pyright: ignore[reportReturnType]


class ChunkedTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, w_VD, labels_T, words: VocabShard):
        loss_T = x_TD.new_empty(len(x_TD), dtype=wide_dtype(x_TD))
        log_sum_T = torch.empty_like(loss_T)
        for part in chunks_of_tokens(x_TD, w_VD):
            logits = wide_logits(x_TD[part], w_VD)
            held, column = label_columns(labels_T[part], logits, words)
            log_sum = log_sum_of_shards(logits, words)
            found = logits.gather(1, column)
            target = words.total(found * held)
            log_sum_T[part] = log_sum.squeeze(1)
            loss_T[part] = (log_sum - target).squeeze(1)
        ctx.save_for_backward(x_TD, w_VD, labels_T, log_sum_T)
        ctx.words = words
        return loss_T.masked_fill_(labels_T == IGNORE_INDEX, 0)

    @staticmethod
    def backward(ctx, d_loss_T):
        x_TD, w_VD, labels_T, log_sum_T = ctx.saved_tensors
        wants_dx, wants_dw, *_ = ctx.needs_input_grad
        d_loss_T = d_loss_T.masked_fill(labels_T == IGNORE_INDEX, 0)
        dx = torch.empty_like(x_TD) if wants_dx else None
        dw = torch.zeros_like(w_VD, dtype=wide_dtype(w_VD)) if wants_dw else None
        for part in chunks_of_tokens(x_TD, w_VD):
            x = x_TD[part]
            # softmax - onehot, times the gradient of the token's loss
            d_logits = wide_logits(x, w_VD)
            held, column = label_columns(labels_T[part], d_logits, ctx.words)
            d_logits.sub_(log_sum_T[part, None]).exp_()
            d_logits.scatter_add_(1, column, -held.to(d_logits.dtype))
            d_logits.mul_(d_loss_T[part, None])
            d_logits = d_logits.to(x.dtype)
            if dx is not None:
                matmul_into(dx[part], d_logits, w_VD)
            if dw is not None:
                add_product(dw, d_logits, x, first=False)
        if dw is not None:
            dw = memory_for_gradient(w_VD).copy_(dw)
        return dx, dw, None, None


def chunks_of_tokens(x_TD: Tensor, w_VD: Tensor) -> list[slice]:
    size = tokens_of_chunk(CHUNK_LOGITS, len(w_VD))
    return [slice(start, start + size) for start in range(0, len(x_TD), size)]


token_losses.register_cases(cross_entropy_cases)
