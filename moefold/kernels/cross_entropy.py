"""The head and its loss in one: the sum over tokens of -log softmax(x W^T)[label].

T tokens, D width, V vocabulary. Logits of all tokens together are often the largest tensor of a step; the chunked form
holds those of a few thousand tokens and has both gradients ready when forward ends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import Case, op, random

IGNORED = -100  # a label that counts for nothing
CHUNK_LOGITS = 1 << 26  # logits held at a time


@op
def cross_entropy(x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    logits = x_TD @ w_VD.T
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels_T, reduction="sum", ignore_index=IGNORED)


@cross_entropy.fast("chunked")
def _(x_TD: torch.Tensor, w_VD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():
        x_TD, w_VD = x_TD.detach(), w_VD.detach()
    return Chunked.apply(x_TD, w_VD, labels_T)  # pyright: ignore[reportReturnType]


class Chunked(torch.autograd.Function):
    """d logits = softmax - onehot is known as soon as the logits are, so each chunk yields its gradients at once."""

    @staticmethod
    def forward(ctx, x_TD, w_VD, labels_T):
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        wants_x, wants_w, _ = ctx.needs_input_grad
        dx = torch.empty_like(x_TD) if wants_x else None
        dw = torch.zeros_like(w_VD, dtype=wide) if wants_w else None
        total = x_TD.new_zeros((), dtype=wide)
        size = max(1, CHUNK_LOGITS // w_VD.shape[0])
        for start in range(0, x_TD.shape[0], size):
            part = slice(start, start + size)
            x, labels = x_TD[part], labels_T[part]
            d_logits, loss = loss_and_gradient((x @ w_VD.T).to(wide), labels)
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
        )


def loss_and_gradient(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d loss / d logits, written over the logits, and the loss."""
    valid = labels != IGNORED
    column = labels.clamp(min=0)[:, None]
    log_sum = logits.logsumexp(-1, keepdim=True)
    loss = ((log_sum - logits.gather(1, column)).squeeze(1) * valid).sum()
    logits.sub_(log_sum).exp_()
    logits.scatter_add_(1, column, logits.new_full((1, 1), -1.0).expand_as(column))
    return logits.mul_(valid[:, None]), loss


@cross_entropy.cases
def _(device: str, dtype: torch.dtype):
    for t, d, v in [(1, 8, 4), (33, 16, 257), (512, 32, 1000)]:
        labels = torch.randint(v, (t,), generator=torch.Generator().manual_seed(t))
        labels[1::5] = IGNORED
        x, w = random(device, dtype, t, d), random(device, dtype, v, d, seed=1)
        yield Case(f"{t} tokens, {v} words", (x, w, labels.to(device)))
