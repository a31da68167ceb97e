"""The embedding: out_TD[t] = w_VD[words_T[t]], zeros where the token id is -1 (held by another rank).

T tokens, D width, V vocabulary rows held here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moefold.kernels.registry import CaseInputs, Cases, KernelCase, register_op
from moefold.layout.gradient_sink import memory_for_gradient


@register_op
def embedding(words_T: Tensor, w_VD: Tensor, holes: bool = False) -> Tensor:
    """Only with `holes` may token ids be -1."""
    if not holes:
        return F.embedding(words_T, w_VD)
    held_T = words_T >= 0
    some_row_T = words_T.clamp(min=0)
    rows_TD = F.embedding(some_row_T, w_VD)
    return rows_TD * held_T[:, None]


@embedding.register_fast("triton")
def embedding_triton(words_T: Tensor, w_VD: Tensor, holes: bool = False) -> Tensor:
    return EmbeddingFunction.apply(words_T, w_VD)  # pyright: ignore[reportReturnType]


class EmbeddingFunction(torch.autograd.Function):
    """A row's gradient is the sum over its tokens, in their order: one pass that writes every row once."""

    @staticmethod
    def forward(ctx, words_T, w_VD):
        from moefold.kernels.routing.rows_triton import gather_by_index

        ctx.save_for_backward(words_T)
        ctx.weight = w_VD  # the Parameter object, not a saved tensor: its gradient sink is an attribute
        return gather_by_index(w_VD, words_T)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.vocabulary.embedding_triton import embedding_wgrad

        (words_T,) = ctx.saved_tensors
        dw_VD = memory_for_gradient(ctx.weight)
        (dy_TD,) = gradients
        dw_VD = embedding_wgrad(dy_TD, words_T, dw_VD)
        return None, dw_VD


EMBEDDING_SIZES = [  # T, V, D
    (1, 2, 4),
    (33, 7, 16),
    (0, 3, 8),
    (40, 100, 24),
]


@embedding.register_cases
def embedding_cases(draw: CaseInputs) -> Cases:
    for t, v, d in EMBEDDING_SIZES:
        name = f"{t} of {v} words of {d}"
        w = draw.normal(v, d)
        generator = torch.Generator().manual_seed(t)
        tokens = (t,)
        spread = torch.randint(v, tokens, generator=generator)
        last_word = v - 1
        one_word = torch.full(tokens, last_word)
        both_signs = spread * 2 - v
        half = both_signs.clamp(min=-1)
        # on the device
        spread = spread.to(draw.device)
        one_word = one_word.to(draw.device)
        half = half.to(draw.device)
        yield KernelCase(f"{name}, spread", (spread, w))
        yield KernelCase(f"{name}, one word", (one_word, w))
        yield KernelCase(f"{name}, half elsewhere", (half, w, True))
