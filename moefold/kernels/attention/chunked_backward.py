"""Attention's backward over a sequence whose scores do not fit: pairs of a chunk of queries and a chunk of keys, one
after the other, with gradients added up in fp32. The order is fixed, so two runs agree to the bit.

S positions, H query heads, G key/value heads, D head width; all tensors of heads are (B, S, heads, D).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.kernels.attention.workspace import ChunkPlan

Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v
PairBackward = Callable[..., Gradients]  # dy, q, k, v, lse_BHS, delta_BHS, causal -> gradients of one pair of chunks


class QuerySide(NamedTuple):
    """What belongs to queries."""

    dy: Tensor
    q: Tensor
    lse_BHS: Tensor
    delta_BHS: Tensor

    def of_heads(self, sequence: int, heads: slice) -> QuerySide:
        one = slice(sequence, sequence + 1)
        dy = self.dy[one, :, heads]
        q = self.q[one, :, heads]
        lse = self.lse_BHS[one, heads]
        delta = self.delta_BHS[one, heads]
        return QuerySide(dy, q, lse, delta)

    def of_positions(self, chunk: slice) -> QuerySide:
        dy = self.dy[:, chunk]
        q = self.q[:, chunk]
        lse = self.lse_BHS[..., chunk]
        delta = self.delta_BHS[..., chunk]
        return QuerySide(dy, q, lse, delta)


class KeySide(NamedTuple):
    """Keys and values."""

    k: Tensor
    v: Tensor

    def of_heads(self, sequence: int, heads: slice) -> KeySide:
        one = slice(sequence, sequence + 1)
        k = self.k[one, :, heads]
        v = self.v[one, :, heads]
        return KeySide(k, v)

    def of_positions(self, chunk: slice) -> KeySide:
        k = self.k[:, chunk]
        v = self.v[:, chunk]
        return KeySide(k, v)

    def empty_sums(self) -> KeySide:
        k = wide_zeros(self.k)
        v = wide_zeros(self.v)
        return KeySide(k, v)


def backward_in_chunks(
    pair_backward: PairBackward,
    queries: QuerySide,
    keys: KeySide,
    plan: ChunkPlan,
    causal: bool,
) -> Gradients:
    dq = torch.empty_like(queries.q)
    dk = torch.empty_like(keys.k)
    dv = torch.empty_like(keys.v)
    sequences, _, heads, _ = queries.q.shape
    kv_heads = keys.k.shape[2]
    group = heads // kv_heads
    for sequence, some in product(range(sequences), slices(kv_heads, plan.kv_heads)):
        served = slice(some.start * group, some.stop * group)
        queries_here = queries.of_heads(sequence, served)
        keys_here = keys.of_heads(sequence, some)
        found = gradients_of_heads(pair_backward, queries_here, keys_here, plan.positions, causal)
        of_queries, of_keys = found
        dq[sequence, :, served] = of_queries[0]
        dk[sequence, :, some] = of_keys.k[0]
        dv[sequence, :, some] = of_keys.v[0]
    return dq, dk, dv


def gradients_of_heads(
    pair_backward: PairBackward,
    queries: QuerySide,
    keys: KeySide,
    size: int,
    causal: bool,
) -> tuple[Tensor, KeySide]:
    """Those of some heads of one sequence."""
    positions = queries.q.shape[1]
    chunks = slices(positions, size)
    sums = keys.empty_sums()
    of_queries: list[Tensor] = []
    for number, chunk in enumerate(chunks):
        seen = chunks[: number + 1] if causal else chunks
        chunk_queries = queries.of_positions(chunk)
        dy, q, lse, delta = chunk_queries
        dq_sum = wide_zeros(q)
        for other in seen:
            on_diagonal = causal and other == chunk
            k, v = keys.of_positions(other)
            found = pair_backward(dy, q, k, v, lse, delta, on_diagonal)
            dq_part, dk_part, dv_part = found
            dq_sum += dq_part
            sums.k[:, other] += dk_part
            sums.v[:, other] += dv_part
        dq_chunk = dq_sum.to(q.dtype)
        of_queries.append(dq_chunk)
    dq = torch.cat(of_queries, dim=1)
    return dq, sums


def wide_zeros(x: Tensor) -> Tensor:
    """Zeros in fp32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_zeros(x.shape, dtype=wide)


def slices(count: int, size: int) -> list[slice]:
    """Slices of so many of `count`, the last one as long as what is left."""
    found: list[slice] = []
    for first in range(0, count, size):
        end = min(first + size, count)
        part = slice(first, end)
        found.append(part)
    return found
