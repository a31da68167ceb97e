"""From every token's experts to rows in expert order: which token each row is, which rows each token has.

N tokens, K choices of each, R = N K rows, E experts, all here. Within an expert, rows keep the order of the tokens.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random

Arranged = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@op
def arrange_rows(ids_NK: torch.Tensor, gates_NK: torch.Tensor, experts: int) -> Arranged:
    """index_R, slots_NK (its inverse), gate_R, and the end of each expert's rows, all whole numbers int32."""
    ids = ids_NK.flatten()
    order = ids.argsort(stable=True)
    ends_E = torch.searchsorted(ids[order], torch.arange(experts, device=ids.device), right=True)
    slots = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    index_R = order // max(ids_NK.shape[1], 1)
    return index_R.int(), slots.view(ids_NK.shape).int(), gates_NK.flatten()[order], ends_E.int()


@arrange_rows.fast("triton")
def _(ids_NK: torch.Tensor, gates_NK: torch.Tensor, experts: int) -> Arranged:
    return Arrange.apply(ids_NK, gates_NK, experts)  # pyright: ignore[reportReturnType]


class Arrange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids_NK, gates_NK, experts):
        from moefold.kernels import router_kernels

        index_R, slots_NK, gate_R, ends_E = router_kernels.arrange(ids_NK, gates_NK, experts)
        ctx.save_for_backward(slots_NK)
        ctx.mark_non_differentiable(index_R, slots_NK, ends_E)
        ctx.set_materialize_grads(False)
        return index_R, slots_NK, gate_R, ends_E

    @staticmethod
    def backward(ctx, _index, _slots, dgate_R, _ends):
        (slots_NK,) = ctx.saved_tensors
        if dgate_R is None:
            return None, None, None
        return None, dgate_R.index_select(0, slots_NK.flatten()).view(slots_NK.shape), None  # takes int32 as they are


@arrange_rows.cases
def _(device: str, dtype: torch.dtype):
    for n, k, e in [(1, 1, 2), (33, 2, 8), (0, 2, 4), (200, 8, 128), (700, 1, 3)]:
        scores = random("cpu", torch.float64, n, e)
        gates = random(device, torch.promote_types(dtype, torch.float32), n, k, seed=1)
        for name, ids in {"spread": scores.argsort(1)[:, :k], "one expert": torch.full((n, k), e - 1)}.items():
            yield Case(f"{n} x {k} to {e}, {name}", (ids.to(device), gates, e))
