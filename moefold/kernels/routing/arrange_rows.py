"""From every token's experts to rows in expert order: which token each row is, which rows each token has.

N tokens, K choices of each, R = N K rows, E experts, all here. Within an expert, rows keep the order of the tokens.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import KernelCase, register_op, seeded_randn

ArrangedRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@register_op
def arrange_rows(ids_NK: torch.Tensor, weights_NK: torch.Tensor, experts: int) -> ArrangedRows:
    """index_R, slots_NK (its inverse), gate_R, and the end of each expert's rows, all whole numbers int32."""
    ids = ids_NK.flatten()
    order = ids.argsort(stable=True)
    ends_E = torch.searchsorted(ids[order], torch.arange(experts, device=ids.device), right=True)
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    index_R = order // max(ids_NK.shape[1], 1)
    return index_R.int(), slots.view(ids_NK.shape).int(), weights_NK.flatten()[order], ends_E.int()


@arrange_rows.register_fast("triton")
def _(ids_NK: torch.Tensor, weights_NK: torch.Tensor, experts: int) -> ArrangedRows:
    return ArrangeRowsFunction.apply(ids_NK, weights_NK, experts)  # pyright: ignore[reportReturnType]


class ArrangeRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_NK, weights_NK, experts):
        from moefold.kernels.routing import router_triton

        index_R, slots_NK, weight_R, ends_E = router_triton.launch_arrange_rows(ids_NK, weights_NK, experts)
        ctx.save_for_backward(slots_NK)
        ctx.mark_non_differentiable(index_R, slots_NK, ends_E)
        ctx.set_materialize_grads(False)
        return index_R, slots_NK, weight_R, ends_E

    @staticmethod
    def backward(ctx, _index, _slots, dweight_R, _ends):
        (slots_NK,) = ctx.saved_tensors
        if dweight_R is None:
            return None, None, None
        return None, dweight_R.index_select(0, slots_NK.flatten()).view(slots_NK.shape), None  # takes int32 as they are


@arrange_rows.register_cases
def _(device: str, dtype: torch.dtype):
    for n, k, e in [(1, 1, 2), (33, 2, 8), (0, 2, 4), (200, 8, 128), (700, 1, 3)]:
        scores = seeded_randn("cpu", torch.float64, n, e)
        gates = seeded_randn(device, torch.promote_types(dtype, torch.float32), n, k, seed=1)
        for name, ids in {"spread": scores.argsort(1)[:, :k], "one expert": torch.full((n, k), e - 1)}.items():
            yield KernelCase(f"{n} x {k} to {e}, {name}", (ids.to(device), gates, e))
