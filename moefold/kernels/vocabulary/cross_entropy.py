"""The head and its loss in one op: the sum over tokens of -log softmax(x W^T)[label].

T tokens, D width, V vocabulary. The logits of all tokens together are often the largest tensor of a step. The chunked
form holds the logits of a few thousand tokens and has both gradients ready when forward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.config.errors import UserError
from moefold.kernels.linear.matmul import matmul, matmul_into, plain_product, tiled_product
from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.kernels.vocabulary.vocab_shard import WHOLE_VOCABULARY, VocabShard
from moefold.layout.gradient_sink import memory_for_gradient
from moefold.layout.labels import IGNORE_INDEX

CHUNK_LOGITS = 1 << 26  # logits held at a time
FP16_FACTOR = 2.0**10  # of logits' gradients in fp16: probabilities down to 2^-34 stay above zero
LOGITS_IN_PLACE = 10 << 26  # where the gradient overwrites the logits: 4096 tokens of a vocabulary of 150k


@register_op
def cross_entropy(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard = WHOLE_VOCABULARY) -> Tensor:
    refuse_vocab_shards("cross_entropy", words)
    logits = wide_logits(x_TD, w_VD)
    return F.cross_entropy(logits, labels_T, reduction="sum", ignore_index=IGNORE_INDEX)


def refuse_vocab_shards(op: str, words: VocabShard) -> None:
    """A reference has the whole vocabulary."""
    if words is not WHOLE_VOCABULARY:
        raise UserError(
            f"kernels.force: {op}=reference needs the whole vocabulary; leave it out, or set parallel.tp to 1"
        )


def wide_logits(x_TD: Tensor, w_VD: Tensor) -> Tensor:
    logits = plain_product(x_TD, w_VD)
    return logits.to(wide_dtype(logits))


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp32 or better."""
    return torch.promote_types(x.dtype, torch.float32)


TwoTensors = tuple[Tensor, Tensor]
LossAndGradient = Callable[[Tensor, Tensor, VocabShard], TwoTensors]
AddProduct = Callable[[Tensor, Tensor, Tensor, bool], None]
Multiply = Callable[[Tensor, Tensor], Tensor]
ScaleInto = Callable[[Tensor, Tensor, Tensor], Tensor]


class ChunkStrategy(NamedTuple):
    """The parts in which the chunked implementations differ."""

    logits: int  # at most so many logits in a chunk
    loss_and_gradient: LossAndGradient
    add_product: AddProduct  # accumulates the head's gradient
    scale_into: ScaleInto  # writes gradients in their places
    multiply: Multiply = plain_product


@cross_entropy.register_fast("chunked")
def cross_entropy_chunked(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard = WHOLE_VOCABULARY) -> Tensor:
    return apply_in_chunks(x_TD, w_VD, labels_T, words, PLAIN_CHUNKS)


@cross_entropy.register_fast("invariant")
def cross_entropy_invariant(
    x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard = WHOLE_VOCABULARY
) -> Tensor:
    strategy = PLAIN_CHUNKS._replace(multiply=tiled_product)
    return apply_in_chunks(x_TD, w_VD, labels_T, words, strategy)


@cross_entropy.register_fast("triton")
def cross_entropy_triton(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard = WHOLE_VOCABULARY) -> Tensor:
    from moefold.kernels.vocabulary import cross_entropy_triton as kernels

    strategy = ChunkStrategy(LOGITS_IN_PLACE, kernels.loss_and_gradient, add_product_in_fp32, kernels.scale_into)
    return apply_in_chunks(x_TD, w_VD, labels_T, words, strategy)


def apply_in_chunks(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, words: VocabShard, strategy: ChunkStrategy) -> Tensor:
    if not torch.is_grad_enabled():
        x_TD = x_TD.detach()
        w_VD = w_VD.detach()
    return ChunkedCrossEntropy.apply(x_TD, w_VD, labels_T, words, strategy)  # pyright: ignore[reportReturnType]


class ChunkedCrossEntropy(torch.autograd.Function):
    """d logits = softmax - onehot is known as soon as the logits are, so forward computes each chunk's gradients."""

    @staticmethod
    def forward(ctx, x_TD, w_VD, labels_T, words: VocabShard, strategy: ChunkStrategy):
        wide = wide_dtype(x_TD)
        wants_dx, wants_dw, *_ = ctx.needs_input_grad
        dx = dw = None
        if wants_dx:
            dx = torch.empty_like(x_TD)
        if wants_dw:
            dw = torch.empty_like(w_VD, dtype=wide)  # the first chunk overwrites it
            if not len(x_TD):
                dw.zero_()
        total = x_TD.new_zeros((), dtype=wide)
        tokens = len(x_TD)
        vocabulary = len(w_VD)
        size = tokens_of_chunk(strategy.logits, vocabulary)
        for start in range(0, tokens, size):
            # the loss of this chunk and the gradient of its logits, for which the logits' own memory may be used
            part = slice(start, start + size)
            x = x_TD[part]
            labels = labels_T[part]
            d_logits, loss = strategy.loss_and_gradient(strategy.multiply(x, w_VD), labels, words)
            total += loss
            # both gradients
            if dx is not None:
                dx_part = dx[part]
                matmul_into(dx_part, d_logits, w_VD)
            if dw is not None:
                is_first = start == 0
                strategy.add_product(dw, d_logits, x, is_first)
            del d_logits  # free it before the next chunk's logits are made
        ctx.save_for_backward(dx, dw)
        ctx.weight = w_VD
        ctx.scale_into = strategy.scale_into
        return total

    @staticmethod
    def backward(ctx, d_total):
        dx, dw = ctx.saved_tensors
        factor = gradient_factor(ctx.weight.dtype)
        d_total = d_total / factor
        if dx is not None:
            scaled = torch.empty_like(dx)
            dx = ctx.scale_into(dx, d_total, scaled)
        if dw is not None:
            scaled = memory_for_gradient(ctx.weight)
            dw = ctx.scale_into(dw, d_total, scaled)
        return dx, dw, None, None, None


def gradient_factor(dtype: torch.dtype) -> float:
    """What the gradients of logits, and of all that follows, are multiplied by until backward."""
    return FP16_FACTOR if dtype == torch.float16 else 1.0


def tokens_of_chunk(logits: int, words: int) -> int:
    """The largest power of two of tokens that fits: chunks are then whole tiles of the GEMMs."""
    tokens = max(1, logits // words)
    exponent = tokens.bit_length() - 1
    return 1 << exponent


def add_product(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, first: bool) -> None:
    """dw += d^T x; the first product overwrites."""
    if d_TV.dtype == torch.float16:  # a sum over tokens may be too large for it
        d_TV = d_TV.float()
        x_TD = x_TD.float()
    product = matmul(d_TV.T, x_TD)
    if first:
        dw_VD.copy_(product)
    else:
        dw_VD.add_(product)


def add_product_in_fp32(dw_VD: Tensor, d_TV: Tensor, x_TD: Tensor, first: bool) -> None:
    """The same in one GEMM that accumulates in fp32: no product is rounded to bf16."""
    beta = 0 if first else 1
    d_VT = d_TV.T
    torch.addmm(dw_VD, d_VT, x_TD, out_dtype=torch.float32, beta=beta, out=dw_VD)


def scale_into(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, factor, out=out)


def label_columns(labels: Tensor, logits: Tensor, words: VocabShard) -> TwoTensors:
    """Whether the vocabulary rows held here have the label of each token, and its column; 0 where they have not."""
    label = labels - words.first
    column = label[:, None]
    width = logits.shape[1]
    is_behind_first = column >= 0
    held = is_behind_first & (column < width)
    return held, column * held


def largest_of_shards(logits: Tensor, words: VocabShard) -> Tensor:
    largest = logits.amax(-1, keepdim=True)
    return words.largest(largest)


def log_sum_of_shards(logits: Tensor, words: VocabShard) -> Tensor:
    """The log-sum-exp of each token over the shards of all ranks."""
    largest = largest_of_shards(logits, words)
    powers = logits - largest
    powers.exp_()
    total = powers.sum(-1, keepdim=True)
    del powers  # as large as the logits
    total = words.total(total)
    return total.log_() + largest


def loss_and_gradient(logits: Tensor, labels: Tensor, words: VocabShard) -> TwoTensors:
    """d loss / d logits for the vocabulary rows held here, times the factor of the dtype, and the loss over the whole
    vocabulary."""
    dtype = logits.dtype
    wide = wide_dtype(logits)
    logits = logits.to(wide)
    valid = labels != IGNORE_INDEX
    held, column = label_columns(labels, logits, words)
    largest = largest_of_shards(logits, words)
    found = logits.gather(1, column)
    # Powers, in place of the logits: of both the loss and the gradient.
    logits.sub_(largest).exp_()
    total = words.total(logits.sum(-1, keepdim=True))
    # The loss.
    log_sum = total.log() + largest
    target = words.total(found * held)
    loss_T1 = log_sum - target
    loss_T = loss_T1.squeeze(1)
    valid_loss_T = loss_T * valid
    loss = valid_loss_T.sum()
    # softmax - onehot, in the same place.
    factor = gradient_factor(dtype)
    factor_T1 = valid[:, None] * factor
    logits.mul_(factor_T1 / total)
    onehot = held.to(logits.dtype)
    logits.scatter_add_(1, column, onehot.mul_(-factor_T1))
    return logits.to(dtype), loss


PLAIN_CHUNKS = ChunkStrategy(CHUNK_LOGITS, loss_and_gradient, add_product, scale_into)

CROSS_ENTROPY_SIZES = [  # T, D, V
    (1, 8, 4),
    (33, 16, 257),
    (512, 32, 1000),
]


@cross_entropy.register_cases
def cross_entropy_cases(draw: CaseInputs) -> Cases:
    for t, d, v in CROSS_ENTROPY_SIZES:
        generator = torch.Generator().manual_seed(t)
        labels = torch.randint(v, (t,), generator=generator)
        labels[1::5] = IGNORE_INDEX
        labels = labels.to(draw.device)
        x = draw.normal(t, d)
        w = draw.normal(v, d, seed=1)
        yield KernelCase(f"{t} tokens, {v} words", (x, w, labels))
