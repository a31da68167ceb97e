"""What the balance of experts is judged by: for each sequence, how often its tokens chose each expert, and the sum of
the scores they gave it.

T tokens of B sequences, E experts, K choices. Token t belongs to sequence (first + t) / length: a rank may hold a part
of its first and of its last.
"""

from __future__ import annotations

import torch

from moefold.kernels.registry import Case, op, random


@op
def tally(
    shares_TE: torch.Tensor, ids_TK: torch.Tensor, first: int, length: int, sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums_BE, counts_BE). A choice of -1 is none. Counts are sums of whole numbers, so the same in any order."""
    tokens, experts = shares_TE.shape
    sequence_T = (first + torch.arange(tokens, device=ids_TK.device)) // length
    belongs_BT = sequence_T == torch.arange(sequences, device=ids_TK.device)[:, None]
    place_TK = sequence_T[:, None] * experts + ids_TK.clamp(min=0)
    counts = torch.zeros(sequences * experts, dtype=torch.int64, device=ids_TK.device)
    counts.scatter_add_(0, place_TK.flatten(), (ids_TK >= 0).long().flatten())
    return belongs_BT.to(shares_TE.dtype) @ shares_TE, counts.view(sequences, experts)


@tally.fast("triton")
def _(shares_TE, ids_TK, first, length, sequences) -> tuple[torch.Tensor, torch.Tensor]:
    return Tally.apply(shares_TE, ids_TK, first, length, sequences)  # pyright: ignore[reportReturnType]


class Tally(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shares_TE, ids_TK, first, length, sequences):
        from moefold.kernels import tally_kernels

        ctx.place = (len(ids_TK), first, length)
        ctx.set_materialize_grads(False)
        sums_BE, counts_BE = tally_kernels.tally(shares_TE, ids_TK, first, length, sequences)
        ctx.mark_non_differentiable(counts_BE)
        return sums_BE, counts_BE

    @staticmethod
    def backward(ctx, *gradients):
        from moefold.kernels import tally_kernels

        dsums_BE, _ = gradients
        dshares_TE = None if dsums_BE is None else tally_kernels.spread(dsums_BE, *ctx.place)
        return dshares_TE, None, None, None, None


@tally.cases
def _(device: str, dtype: torch.dtype):
    wide = torch.promote_types(dtype, torch.float32)
    for t, e, k, first, length, sequences in [
        (12, 8, 2, 0, 4, 3),
        (90, 5, 2, 40, 70, 2),
        (300, 64, 3, 0, 300, 1),
        (7, 130, 1, 2, 3, 4),
        (0, 8, 2, 0, 4, 2),
    ]:
        ids = torch.randint(-1, e, (t, k), generator=torch.Generator().manual_seed(t))
        name = f"{t} tokens from {first} of {sequences} x {length}, {e} experts"
        yield Case(name, (random(device, wide, t, e), ids.to(device), first, length, sequences))
