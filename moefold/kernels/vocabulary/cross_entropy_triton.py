"""Cross-entropy between the head's GEMMs, in Triton: from logits to their gradient and the loss. Imported only where
Triton is.

T tokens of a chunk, V vocabulary rows held here. The logits are read once for their maximum and the sum of their
exponentials, and once more to be overwritten by softmax - onehot; between the two passes, maximum and sum are
all-reduced over tp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from moefold.kernels.tile_triton import load_as_fp32, load_or_zero, program_block, wide_program_id
from moefold.kernels.vocabulary.vocab_shard import VocabShard
from moefold.layout.labels import IGNORE_INDEX

BLOCK = 2048


@triton.jit
def load_logits(row, v, V):
    logits = tl.load(row + v, mask=v < V, other=-1e30)
    return logits.to(tl.float32)


@triton.jit
def log_sum_exp_kernel(logits_TV, column_T, largest_T, sum_T, target_T, V, BLOCK: constexpr):
    """Each lane keeps its own maximum and sum over the row; lanes are reduced once, at the end. Four blocks at a time,
    so that several loads are in flight and one rescaling serves them all."""
    t = wide_program_id(0)
    row = logits_TV + t * V
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)  # in place of -inf: its differences are finite
    total = tl.zeros([BLOCK], tl.float32)
    # main loop over the vocabulary, four blocks at a time
    for start in range(0, V, BLOCK * 4):
        v = start + lane
        a = load_logits(row, v, V)
        b = load_logits(row, v + BLOCK, V)
        c = load_logits(row, v + 2 * BLOCK, V)
        d = load_logits(row, v + 3 * BLOCK, V)
        # the new maximum
        of_first = tl.maximum(top, a)
        of_middle = tl.maximum(b, c)
        of_others = tl.maximum(of_middle, d)
        higher = tl.maximum(of_first, of_others)
        # the sum: what is left of the old one, and the four blocks
        total *= tl.exp(top - higher)
        power_a = tl.exp(a - higher)
        power_b = tl.exp(b - higher)
        first_two = power_a + power_b
        power_c = tl.exp(c - higher)
        power_d = tl.exp(d - higher)
        last_two = power_c + power_d
        total += first_two + last_two
        top = higher
    # epilogue: reduce the lanes
    largest = tl.max(top, 0)
    tl.store(largest_T + t, largest)
    shrunk = tl.exp(top - largest)
    rescaled = total * shrunk
    overall = tl.sum(rescaled, 0)
    tl.store(sum_T + t, overall)
    # the label's logit
    column = tl.load(column_T + t)
    is_behind_first = column >= 0
    held = is_behind_first & (column < V)
    target = load_as_fp32(row + column, held)
    tl.store(target_T + t, target)


@triton.jit
def logit_gradient_kernel(logits_TV, column_T, log_sum_T, valid_T, V, BLOCK: constexpr):
    """softmax - onehot in place of the logits; zeros for tokens without a label."""
    t = wide_program_id(0)
    v = program_block(1, BLOCK)
    inside = v < V
    at = logits_TV + t * V + v
    logits = load_or_zero(at, inside)
    # softmax - onehot
    log_sum = tl.load(log_sum_T + t)
    x = logits.to(tl.float32)
    softmax = tl.exp(x - log_sum)
    label = tl.load(column_T + t)
    is_label = v == label
    onehot = tl.where(is_label, 1.0, 0.0)
    d = softmax - onehot
    # zeros without a label
    valid = tl.load(valid_T + t)
    has_label = valid != 0
    d = tl.where(has_label, d, 0.0)
    d = d.to(logits_TV.dtype.element_ty)
    tl.store(at, d, mask=inside)


@triton.jit
def scale_into_kernel(x, factor, out, n, BLOCK: constexpr):
    first = wide_program_id(0) * BLOCK
    lane = tl.arange(0, BLOCK)
    i = first + lane
    there = i < n
    value = load_or_zero(x + i, there)
    number = tl.load(factor)
    number = number.to(tl.float32)
    y = value * number
    y = y.to(out.dtype.element_ty)
    at = out + i
    tl.store(at, y, mask=there)


def scale_into(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """out = x times a number on the device, in the dtype of `out`; torch's own kernel takes three times as long."""
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    launch = scale_into_kernel[(blocks,)]
    launch(x, factor, out, n, BLOCK, num_warps=8)
    return out


def loss_and_gradient(logits_TV: Tensor, labels_T: Tensor, words: VocabShard) -> tuple[Tensor, Tensor]:
    """d loss / d logits for the vocabulary rows held here, written over the logits, and the loss over the whole
    vocabulary."""
    tokens, held = logits_TV.shape
    valid_T = labels_T != IGNORE_INDEX
    column_T = labels_T - words.first
    # First pass: maximum, sum and the label's logit, of this shard.
    wide = torch.float32
    statistics_3T = logits_TV.new_empty(3, tokens, dtype=wide)
    largest_T, sum_T, target_T = statistics_3T
    launch = log_sum_exp_kernel[(tokens,)]
    block = BLOCK // 2
    launch(logits_TV, column_T, *statistics_3T, held, block, num_warps=4)
    # Maximum and sum over all ranks' shards.
    overall_T = largest_T.clone()
    overall_T = words.largest(overall_T)
    below_T = largest_T - overall_T
    shrunk_T = below_T.exp()
    total_T = words.total(sum_T * shrunk_T)
    log_sum_T = total_T.log() + overall_T
    # Second pass: the gradient.
    blocks = triton.cdiv(held, BLOCK)
    has_label_T = valid_T.to(torch.int8)
    tensors = (logits_TV, column_T, log_sum_T, has_label_T)
    launch = logit_gradient_kernel[tokens, blocks]
    launch(*tensors, held, BLOCK, num_warps=8)
    target_T = words.total(target_T)
    loss_T = log_sum_T - target_T
    valid_loss_T = loss_T * valid_T
    loss = valid_loss_T.sum()
    return logits_TV, loss
