"""The head and its loss in one: the sum over tokens of -log softmax(x W^T)[label].

T tokens, D width, V vocabulary. Logits of all tokens together are often the largest tensor of a step; the chunked form
holds those of a few thousand tokens and has both gradients ready when forward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moefold.config.errors import UserError
from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.kernels.vocabulary.vocab_shard import IGNORE_INDEX, WHOLE_VOCABULARY, VocabShard
from moefold.layout.gradient_sink import memory_for_gradient

CHUNK_LOGITS = 1 << 26  # logits held at a time
LOGITS_IN_PLACE = 10 << 26  # where their gradient takes their place: 4096 tokens of 150k words


@register_op
def cross_entropy(
    x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor, words: VocabShard = WHOLE_VOCABULARY
) -> torch.Tensor:
    if words is not WHOLE_VOCABULARY:
        raise UserError(
            "kernels.force: cross_entropy=reference needs the whole vocabulary; leave it out, or set parallel.tp to 1"
        )
    logits = x_TD @ w_VD.T
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels_T, reduction="sum", ignore_index=IGNORE_INDEX)


class ChunkStrategy(NamedTuple):
    """How chunks are worked on: how many logits one holds at most, what makes their gradient and the loss of them, what
    adds a product of two matrices to the gradient of the head, and what scales gradients into their places in the
    end."""

    logits: int
    finish: Callable[[torch.Tensor, torch.Tensor, VocabShard], tuple[torch.Tensor, torch.Tensor]]
    add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], None]
    scale_into: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@cross_entropy.register_fast("chunked")
def _(
    x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor, words: VocabShard = WHOLE_VOCABULARY
) -> torch.Tensor:
    return chunked_cross_entropy(
        x_TD, w_VD, labels_T, words, ChunkStrategy(CHUNK_LOGITS, loss_and_gradient, add_product, scale_into)
    )


@cross_entropy.register_fast("triton")
def _(
    x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor, words: VocabShard = WHOLE_VOCABULARY
) -> torch.Tensor:
    from moefold.kernels.vocabulary import cross_entropy_triton

    kernels = (cross_entropy_triton.loss_and_gradient, add_product_in_fp32, cross_entropy_triton.scale_into)
    way = ChunkStrategy(LOGITS_IN_PLACE, *kernels)
    return chunked_cross_entropy(x_TD, w_VD, labels_T, words, way)


def chunked_cross_entropy(x_TD, w_VD, labels_T, words: VocabShard, way: ChunkStrategy) -> torch.Tensor:
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    return ChunkedCrossEntropy.apply(x_TD, w_VD, labels_T, words, way)  # pyright: ignore[reportReturnType]


class ChunkedCrossEntropy(torch.autograd.Function):
    """d logits = softmax - onehot is known as soon as the logits are, so each chunk yields its gradients at once."""

    @staticmethod
    def forward(ctx, x_TD, w_VD, labels_T, words: VocabShard, way: ChunkStrategy):
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        wants_x, wants_w, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x_TD) if wants_x else None
        empty = torch.empty_like if len(x_TD) else torch.zeros_like  # the first chunk writes
        dw = empty(w_VD, dtype=wide) if wants_w else None
        total = x_TD.new_zeros((), dtype=wide)
        size = tokens_of_chunk(way.logits, len(w_VD))
        for start in range(0, x_TD.shape[0], size):
            part = slice(start, start + size)
            x = x_TD[part]
            d_logits, loss = way.finish(x @ w_VD.T, labels_T[part], words)
            total += loss
            if dx is not None:
                torch.mm(d_logits, w_VD, out=dx[part])
            if dw is not None:
                way.add_product(dw, d_logits, x, start == 0)
            del d_logits  # before the next chunk's are made
        ctx.save_for_backward(dx, dw)
        ctx.weight, ctx.scale_into = w_VD, way.scale_into
        return total

    @staticmethod
    def backward(ctx, *gradients):
        (d_total,), (dx, dw) = gradients, ctx.saved_tensors
        return (
            None if dx is None else ctx.scale_into(dx, d_total, torch.empty_like(dx)),
            None if dw is None else ctx.scale_into(dw, d_total, memory_for_gradient(ctx.weight)),
            None,
            None,
            None,
        )


def tokens_of_chunk(logits: int, words: int) -> int:
    """As many as may be: a power of two, so that they are whole tiles of the products."""
    return 1 << max(0, (logits // words).bit_length() - 1)


def add_product(dw_VD: torch.Tensor, d_TV: torch.Tensor, x_TD: torch.Tensor, first: bool) -> None:
    """The first is written, whatever is there."""
    product = d_TV.T @ x_TD
    dw_VD.copy_(product) if first else dw_VD.add_(product)


def add_product_in_fp32(dw_VD: torch.Tensor, d_TV: torch.Tensor, x_TD: torch.Tensor, first: bool) -> None:
    """The same in one GEMM that reads and writes the sum: nothing is rounded to bf16 on the way."""
    torch.addmm(dw_VD, d_TV.T, x_TD, out_dtype=torch.float32, beta=0 if first else 1, out=dw_VD)


def scale_into(x: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, factor, out=out)


def loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, words: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """d loss / d logits for the words held here, and the loss over all words."""
    dtype, logits = logits.dtype, logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = labels != IGNORE_INDEX
    column = (labels - words.first)[:, None]
    held = (column >= 0) & (column < logits.shape[1])
    column = column * held
    largest = words.largest(logits.amax(-1, keepdim=True))
    log_sum = words.total((logits - largest).exp_().sum(-1, keepdim=True)).log_() + largest
    target = words.total(logits.gather(1, column) * held)
    loss = ((log_sum - target).squeeze(1) * valid).sum()
    logits.sub_(log_sum).exp_()
    logits.scatter_add_(1, column, -held.to(logits.dtype))
    return logits.mul_(valid[:, None]).to(dtype), loss


@cross_entropy.register_cases
def _(device: str, dtype: torch.dtype):
    for t, d, v in [(1, 8, 4), (33, 16, 257), (512, 32, 1000)]:
        labels = torch.randint(v, (t,), generator=torch.Generator().manual_seed(t))
        labels[1::5] = IGNORE_INDEX
        x, w = seeded_randn(device, dtype, t, d), seeded_randn(device, dtype, v, d, seed=1)
        yield KernelCase(f"{t} tokens, {v} words", (x, w, labels.to(device)))
