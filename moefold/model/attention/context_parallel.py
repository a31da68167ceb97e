"""Context parallelism: queries meet keys that other ranks hold. Each mechanism is one callable,
(q, k, v, share, sight) -> y.

    whole       cp is 1: nothing to meet
    all_gather  every rank gets all keys and values; its queries, two chunks, attend to what lies before them
    all_to_all  ranks swap sequence for heads (Ulysses): each attends over whole sequences with its share of the heads
    ring        keys and values go round; the next block travels while this one is computed
    hierarchical  all-to-all inside a node, ring across nodes

B sequences, s positions held here (S in all), H query heads, G key/value heads, D head width, V that of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from moefold.comm.collectives import all_gather, all_to_all
from moefold.comm.ring_shift import RingShift
from moefold.config.errors import UserError
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import Axis, World
from moefold.model.token_layout import TokenShard


class AttendSpec(NamedTuple):
    """What a query makes of the keys: the factor on scores, how many keys back it sees (0: all), and each head's score
    for looking at nothing."""

    scale: float
    window: int = 0
    sink_H: torch.Tensor | None = None


ContextMechanism = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, TokenShard, AttendSpec], torch.Tensor]


def local_context(kernels: BoundKernels) -> ContextMechanism:
    return lambda q, k, v, share, sight: kernels[attention](q, k, v, *sight, share.begins_BS)


def all_gather_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    """Keys and values of all ranks, in the order of their positions; each of this rank's two chunks of queries is a
    causal attention over the keys up to its end."""

    def attend_across_ranks(q_BsHD, k_BsGD, v_BsGV, share: TokenShard, sight: AttendSpec) -> torch.Tensor:
        k, v = (all_gather(x.transpose(0, 1), share.cp)[share.sequence_order].transpose(0, 1) for x in (k_BsGD, v_BsGV))
        begins = (None, None) if share.begins_BS is None else share.begins_BS[:, share.local_positions].chunk(2, dim=1)
        parts = zip(q_BsHD.chunk(2, dim=1), zigzag_chunk_ends(share), begins, strict=True)
        return torch.cat([kernels[attention](p, k[:, :e], v[:, :e], *sight, b) for p, e, b in parts], dim=1)

    return attend_across_ranks


def zigzag_chunk_ends(share: TokenShard) -> tuple[int, int]:
    """Where this rank's early and late chunk end in the sequence."""
    size = share.length // (2 * share.cp.size)
    return (share.cp.index + 1) * size, (2 * share.cp.size - share.cp.index) * size


def ulysses_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    return ulysses_attention(kernels[attention], world.axis("cp"))


def hierarchical_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    """Inside a node ranks swap positions for heads, which makes the node's positions one early and one late chunk: a
    zig-zag over nodes, round which the ring goes."""
    nodes = world.cp_nodes
    inside = world.cp_inside
    return ulysses_attention(ring_attention(nodes, kernels), inside)


def ulysses_attention(attention: Callable[..., torch.Tensor], axis: Axis) -> ContextMechanism:
    """Attention over all positions of the ranks along an axis, with each rank's share of the heads."""

    def attend_across_ranks(q_BsHD, k_BsGD, v_BsGV, share: TokenShard, sight: AttendSpec) -> torch.Tensor:
        if k_BsGD.shape[2] % axis.size:
            raise UserError(
                f"parallel.context swaps heads over {axis.size} ranks, which does not divide the {k_BsGD.shape[2]} "
                "key and value heads of a rank; set parallel.context to ring"
            )
        first = share.cp.index - axis.index if axis.size < share.cp.size else 0
        order = share.joined[first : first + axis.size].flatten().argsort()
        q, k, v = (heads_for_positions(x, axis, order) for x in (q_BsHD, k_BsGD, v_BsGV))
        if sight.sink_H is not None:
            sight = sight._replace(sink_H=sight.sink_H.chunk(axis.size)[axis.index])
        return positions_for_heads(attention(q, k, v, *sight, share.begins_BS), axis, order)

    return attend_across_ranks


def heads_for_positions(x_BsHD: torch.Tensor, axis: Axis, order: torch.Tensor) -> torch.Tensor:
    """(B, s, H, D) -> (B, s x n, H / n, D): all positions of the n ranks, in order, of this rank's heads."""
    n, heads = axis.size, x_BsHD.shape[2]
    even = [heads // n] * n
    x = all_to_all(x_BsHD.permute(2, 1, 0, 3), even, even, axis, what="heads")  # each rank's positions of my heads
    x = x.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)[:, order]
    return x.permute(2, 1, 0, 3)


def positions_for_heads(y_BShD: torch.Tensor, axis: Axis, order: torch.Tensor) -> torch.Tensor:
    """The way back: (B, s x n, H / n, D) -> (B, s, H, D)."""
    n, heads = axis.size, y_BShD.shape[2]
    y = y_BShD.permute(2, 1, 0, 3)[:, order.argsort()]  # positions as the ranks hold them
    y = y.unflatten(1, (n, -1)).transpose(0, 1).flatten(0, 1)  # heads x ranks, rank outermost
    even = [heads] * n
    return all_to_all(y, even, even, axis, what="heads").permute(2, 1, 0, 3)


def ring_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    attention = ring_attention(world.axis("cp"), kernels)
    return lambda q, k, v, share, sight: attention(q, k, v, *sight, share.begins_BS)


def ring_attention(axis: Axis, kernels: BoundKernels) -> Callable[..., torch.Tensor]:
    """Attention over what goes round a ring of ranks; the rules keep documents off it."""

    def attend_across_ranks(q, k, v, scale, window, sink_H, begins_BS) -> torch.Tensor:
        assert begins_BS is None
        return RingAttention.apply(q, k, v, scale, window, sink_H, axis, kernels)  # pyright: ignore[reportReturnType]

    return attend_across_ranks


def causal_chunk_pairs(mine: int, theirs: int, ranks: int, size: int, window: int) -> list[tuple[slice, slice, int]]:
    """Which of my two query chunks meet which of their two key chunks, of `size` positions each, and how far ahead the
    queries stand. Zig-zag: chunk 0 of rank r is the r-th of the sequence, chunk 1 the r-th from its end; a chunk sees
    those before it, unless a window ends nearer, and part of itself."""
    at = [(r, 2 * ranks - 1 - r) for r in (mine, theirs)]
    met = [(i, j, (at[0][i] - at[1][j]) * size) for i in (0, 1) for j in (0, 1)]
    chunk = [slice(0, size), slice(size, 2 * size)]
    return [(chunk[i], chunk[j], ahead) for i, j, ahead in met if ahead >= 0 and not 0 < window <= ahead - size + 1]


class RingAttention(torch.autograd.Function):
    """Keys and values travel once round the ring in forward; in backward they travel again, and their gradients with
    them. Only the local q, k, v, the result and its log-sum-exp are kept. A sink is there from the start: it has a
    score and no value."""

    @staticmethod
    def forward(ctx, q, k, v, scale: float, window: int, sink_H: torch.Tensor | None, cp: Axis, kernels: BoundKernels):
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=wide, device=q.device)
        nothing = torch.full(q.shape[2:3], -torch.inf, device=q.device) if sink_H is None else sink_H
        lse = nothing.to(wide).expand(q.shape[:-1]).clone()
        size, travelling = q.shape[1] // 2, torch.cat((k, v), dim=-1)
        for hop in range(cp.size):
            turn = RingShift(travelling, cp) if hop + 1 < cp.size else None
            there = travelling.split((k.shape[-1], v.shape[-1]), dim=-1)
            for mine, theirs, ahead in causal_chunk_pairs(cp.index, (cp.index - hop) % cp.size, cp.size, size, window):
                keys, values = (x[:, theirs] for x in there)
                part, part_lse = kernels[attention_block](q[:, mine], keys, values, scale, ahead, window)
                merge_softmax_block(out[:, mine], lse[:, mine], part, part_lse)
            travelling = turn.arrived() if turn else travelling
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink_H, result, lse)
        ctx.rest = scale, window, cp, kernels
        return result

    @staticmethod
    def backward(ctx, *incoming):
        q, k, v, sink_H, out, lse = ctx.saved_tensors
        scale, window, cp, kernels = ctx.rest
        (dy,), size, widths = incoming, q.shape[1] // 2, (k.shape[-1], v.shape[-1])
        delta = (dy.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        travelling = torch.cat((k, v), dim=-1)
        gradients = torch.zeros(travelling.shape, dtype=lse.dtype, device=q.device)
        for hop in range(cp.size):
            turn = RingShift(travelling, cp) if hop + 1 < cp.size else None
            there, d_there = travelling.split(widths, dim=-1), gradients.split(widths, dim=-1)
            for mine, theirs, ahead in causal_chunk_pairs(cp.index, (cp.index - hop) % cp.size, cp.size, size, window):
                keys, values = (x[:, theirs] for x in there)
                queries, sums = (dy[:, mine], q[:, mine]), (lse[:, mine], delta[:, mine])
                found = kernels[attention_block_backward](*queries, keys, values, *sums, scale, ahead, window)
                dq[:, mine] += found[0]
                d_there[0][:, theirs] += found[1]
                d_there[1][:, theirs] += found[2]
            gradients = RingShift(gradients, cp).arrived()  # after the last hop they are home
            travelling = turn.arrived() if turn else travelling
        dk, dv = gradients.split(widths, dim=-1)
        d_sink = None if sink_H is None else -((sink_H - lse).exp() * delta).sum((0, 1)).to(sink_H.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, d_sink, None, None


def merge_softmax_block(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Add a block to what earlier blocks gave, in place: softmax over both sets of keys. Neither may have seen any
    key: then both weights are zero."""
    joint = torch.logaddexp(lse, part_lse)
    old, new = ((x - joint).nan_to_num(nan=-torch.inf).exp()[..., None] for x in (lse, part_lse))
    out.mul_(old).add_(part * new)
    lse.copy_(joint)


CONTEXT_MECHANISMS: dict[str, Callable[[BoundKernels, World], ContextMechanism]] = {
    "all_gather": all_gather_context,
    "all_to_all": ulysses_context,
    "ring": ring_context,
    "hierarchical": hierarchical_context,
}


def choose_context_mechanism(name: str, kernels: BoundKernels, world: World) -> ContextMechanism:
    return local_context(kernels) if world.axis("cp").size == 1 else CONTEXT_MECHANISMS[name](kernels, world)
