"""The order of expert rows from every token's choices: which token each row is, and which rows each token has.

N tokens, K choices of each, R = N K rows, E experts, all held here. Within an expert, rows keep the tokens' order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn

ArrangedRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # index_R, slots_NK, weight_R, ends_E


@register_op
def arrange_rows(ids_NK: torch.Tensor, weights_NK: torch.Tensor, experts: int) -> ArrangedRows:
    """index_R, slots_NK (its inverse), weight_R, and the end of each expert's rows; integers are int32."""
    ids = ids_NK.flatten()
    order = ids.argsort(stable=True)
    expert_E = torch.arange(experts, device=ids.device)
    ends_E = torch.searchsorted(ids[order], expert_E, right=True)
    row_R = torch.arange(len(order), device=order.device)
    slots = torch.empty_like(order).scatter_(0, order, row_R)
    slots_NK = slots.view(ids_NK.shape)
    index_R = order // max(ids_NK.shape[1], 1)
    weight_R = weights_NK.flatten()[order]
    return index_R.int(), slots_NK.int(), weight_R, ends_E.int()


@arrange_rows.register_fast("triton")
def arrange_rows_triton(ids_NK: torch.Tensor, weights_NK: torch.Tensor, experts: int) -> ArrangedRows:
    return ArrangeRowsFunction.apply(ids_NK, weights_NK, experts)  # pyright: ignore[reportReturnType]


class ArrangeRowsFunction(torch.autograd.Function):
    """Only the weights have a gradient: a gather through the slots."""

    @staticmethod
    def forward(ctx, ids_NK, weights_NK, experts):
        from moefold.kernels.routing.router_triton import launch_arrange_rows

        index_R, slots_NK, weight_R, ends_E = launch_arrange_rows(ids_NK, weights_NK, experts)
        ctx.save_for_backward(slots_NK)
        ctx.mark_non_differentiable(index_R, slots_NK, ends_E)
        ctx.set_materialize_grads(False)
        return index_R, slots_NK, weight_R, ends_E

    @staticmethod
    def backward(ctx, _index, _slots, dweight_R, _ends):
        (slots_NK,) = ctx.saved_tensors
        if dweight_R is None:
            return None, None, None
        dweights = dweight_R.index_select(0, slots_NK.flatten())  # index_select takes int32 indices
        return None, dweights.view(slots_NK.shape), None


@arrange_rows.register_cases
def arrange_rows_cases(device: str, dtype: torch.dtype) -> Iterator[KernelCase]:
    wide = torch.promote_types(dtype, torch.float32)
    for n, k, e in [(1, 1, 2), (33, 2, 8), (0, 2, 4), (200, 8, 128), (700, 1, 3)]:
        scores = seeded_randn("cpu", torch.float64, n, e)
        spread = scores.argsort(1)[:, :k].to(device)
        one_expert = torch.full((n, k), e - 1, device=device)
        weights = seeded_randn(device, wide, n, k, seed=1)
        yield KernelCase(f"{n} x {k} to {e}, spread", (spread, weights, e))
        yield KernelCase(f"{n} x {k} to {e}, one expert", (one_expert, weights, e))
