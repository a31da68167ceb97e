"""The head and its loss in one: the sum over tokens of -log softmax(x W^T)[label].

T tokens, D width, V vocabulary. Logits of all tokens together are often the largest tensor of a step; the chunked form
holds those of a few thousand tokens and has both gradients ready when forward ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moefold.config.refused import Refused
from moefold.kernels.registry import Case, op, random

IGNORED = -100  # a label that counts for nothing
CHUNK_LOGITS = 1 << 26  # logits held at a time


class Words(NamedTuple):
    """Which words a matrix holds, when the vocabulary is cut over ranks: those from `first` on. `total` and `largest`
    act on a tensor in place, over the ranks that hold the rest."""

    first: int
    total: Callable[[torch.Tensor], torch.Tensor]
    largest: Callable[[torch.Tensor], torch.Tensor]


ALL_WORDS = Words(0, lambda x: x, lambda x: x)


@op
def cross_entropy(
    x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor, words: Words = ALL_WORDS
) -> torch.Tensor:
    if words is not ALL_WORDS:
        raise Refused(
            "kernels.force: cross_entropy=reference needs the whole vocabulary; leave it out, or set parallel.tp to 1"
        )
    logits = x_TD @ w_VD.T
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels_T, reduction="sum", ignore_index=IGNORED)


@cross_entropy.fast("chunked")
def _(x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor, words: Words = ALL_WORDS) -> torch.Tensor:
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    return Chunked.apply(x_TD, w_VD, labels_T, words)  # pyright: ignore[reportReturnType]


class Chunked(torch.autograd.Function):
    """d logits = softmax - onehot is known as soon as the logits are, so each chunk yields its gradients at once."""

    @staticmethod
    def forward(ctx, x_TD, w_VD, labels_T, words):
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        wants_x, wants_w, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x_TD) if wants_x else None
        dw = torch.zeros_like(w_VD, dtype=wide) if wants_w else None
        total = x_TD.new_zeros((), dtype=wide)
        size = max(1, CHUNK_LOGITS // w_VD.shape[0])
        for start in range(0, x_TD.shape[0], size):
            part = slice(start, start + size)
            x, labels = x_TD[part], labels_T[part]
            d_logits, loss = loss_and_gradient((x @ w_VD.T).to(wide), labels, words)
            total += loss
            d_logits = d_logits.to(x.dtype)
            if dx is not None:
                dx[part] = d_logits @ w_VD
            if dw is not None:
                dw += d_logits.T @ x
        ctx.save_for_backward(dx, dw)
        ctx.weight_dtype = w_VD.dtype
        return total

    @staticmethod
    def backward(ctx, d_total):
        dx, dw = ctx.saved_tensors
        return (
            None if dx is None else dx * d_total.to(dx.dtype),
            None if dw is None else (dw * d_total).to(ctx.weight_dtype),
            None,
            None,
        )


def loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor, words: Words) -> tuple[torch.Tensor, torch.Tensor]:
    """d loss / d logits for the words held here, written over the logits, and the loss over all words."""
    valid = labels != IGNORED
    column = (labels - words.first)[:, None]
    held = (column >= 0) & (column < logits.shape[1])
    column = column * held
    largest = words.largest(logits.amax(-1, keepdim=True))
    log_sum = words.total((logits - largest).exp_().sum(-1, keepdim=True)).log_() + largest
    target = words.total(logits.gather(1, column) * held)
    loss = ((log_sum - target).squeeze(1) * valid).sum()
    logits.sub_(log_sum).exp_()
    logits.scatter_add_(1, column, -held.to(logits.dtype))
    return logits.mul_(valid[:, None]), loss


@cross_entropy.cases
def _(device: str, dtype: torch.dtype):
    for t, d, v in [(1, 8, 4), (33, 16, 257), (512, 32, 1000)]:
        labels = torch.randint(v, (t,), generator=torch.Generator().manual_seed(t))
        labels[1::5] = IGNORED
        x, w = random(device, dtype, t, d), random(device, dtype, v, d, seed=1)
        yield Case(f"{t} tokens, {v} words", (x, w, labels.to(device)))
