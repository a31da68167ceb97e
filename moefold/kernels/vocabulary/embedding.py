"""Words to vectors: out_TD[t] = w_VD[words_T[t]], zeros where the word is -1, none that is held here.

T tokens, D width, V words held here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moefold.kernels.registry import KernelCase, register_op, seeded_randn
from moefold.layout.gradient_sink import memory_for_gradient


@register_op
def embedding(words_T: torch.Tensor, w_VD: torch.Tensor, holes: bool = False) -> torch.Tensor:
    """Only with `holes` may words be -1."""
    if not holes:
        return F.embedding(words_T, w_VD)
    return F.embedding(words_T.clamp(min=0), w_VD) * (words_T >= 0)[:, None]


@embedding.register_fast("triton")
def _(words_T: torch.Tensor, w_VD: torch.Tensor, holes: bool = False) -> torch.Tensor:
    return EmbeddingFunction.apply(words_T, w_VD)  # pyright: ignore[reportReturnType]


class EmbeddingFunction(torch.autograd.Function):
    """The gradient of a word is the sum over its tokens, in their order: one pass that writes every word once."""

    @staticmethod
    def forward(ctx, words_T, w_VD):
        from moefold.kernels.routing import rows_triton

        ctx.save_for_backward(words_T)
        ctx.weight = w_VD
        return rows_triton.gather_by_index(w_VD, words_T)

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels.vocabulary import embedding_triton

        (words_T,) = ctx.saved_tensors
        return None, embedding_triton.embedding_wgrad(gradients[0], words_T, memory_for_gradient(ctx.weight))


@embedding.register_cases
def _(device: str, dtype: torch.dtype):
    for t, v, d in [(1, 2, 4), (33, 7, 16), (0, 3, 8), (40, 100, 24)]:
        words, w = torch.randint(v, (t,), generator=torch.Generator().manual_seed(t)), seeded_randn(device, dtype, v, d)
        for name, some in {"spread": words, "one word": words * 0 + v - 1}.items():
            yield KernelCase(f"{t} of {v} words of {d}, {name}", (some.to(device), w))
        yield KernelCase(
            f"{t} of {v} words of {d}, half elsewhere", ((words * 2 - v).clamp(min=-1).to(device), w, True)
        )
