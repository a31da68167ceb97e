"""Context parallelism: queries meet keys that other ranks hold. A mechanism is called as the op `attention` is, with
this rank's positions of q, k and v, and with the document begins of all positions; where cp is 1, it is that op.

    all_gather  every rank gets all keys and values; its queries, two chunks, attend to what lies before them
    all_to_all  ranks swap sequence for heads (Ulysses): each attends over whole sequences with its share of the heads
    ring        keys and values go round; the next block travels while this one is computed
    hierarchical  all-to-all inside a node, ring across nodes

B sequences, s positions held here (S in all), H query heads, G key/value heads, D head width, V that of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_to_all
from moefold.comm.ring_shift import RingShift
from moefold.config.errors import UserError
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.masked import sink_gradient
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, merge_attention_block
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import Axis, World
from moefold.model.token_layout import zigzag_positions

# q, k, v, scale of scores, window (keys back that a query sees; 0: all), sink_H, begins_BS -> y
ContextMechanism = Callable[[Tensor, Tensor, Tensor, float, int, Tensor | None, Tensor | None], Tensor]
ChunkPair = tuple[slice, slice, int]  # a chunk of queries, a chunk of keys, how far ahead the queries stand
PAIRS_OF_TWO = list(product((0, 1), (0, 1)))


def all_gather_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    """Keys and values of all ranks, in the order of their positions; each of this rank's two chunks of queries is a
    causal attention over the keys up to its end."""

    attend = kernels[attention]
    cp = world.axis("cp")

    def attend_across_ranks(q_BsHD, k_BsGD, v_BsGV, scale, window, sink_H, begins_BS) -> Tensor:
        k_BSGD = gather_positions(k_BsGD, cp)
        v_BSGV = gather_positions(v_BsGV, cp)
        chunks = q_BsHD.chunk(2, dim=1)
        ends = zigzag_chunk_ends(k_BSGD.shape[1], cp)
        begins = document_begins_of_chunks(begins_BS, cp)
        parts = []
        for q, end, begins_Bs in zip(chunks, ends, begins, strict=True):
            k = k_BSGD[:, :end]
            v = v_BSGV[:, :end]
            part = attend(q, k, v, scale, window, sink_H, begins_Bs)
            parts.append(part)
        return torch.cat(parts, dim=1)

    return attend_across_ranks


def gather_positions(x_BsGD: Tensor, cp: Axis) -> Tensor:
    """All positions of the cp ranks, in the sequence's order."""
    sequence_first = x_BsGD.transpose(0, 1)
    gathered_SBGD = all_gather(sequence_first, cp)
    length = len(gathered_SBGD)
    held = zigzag_positions(length, cp.size, x_BsGD.device)
    order = held.flatten().argsort()
    return gathered_SBGD[order].transpose(0, 1)


def document_begins_of_chunks(begins_BS: Tensor | None, cp: Axis) -> Sequence[Tensor | None]:
    """Where the documents of this rank's two chunks of queries begin, if attention stays within documents."""
    if begins_BS is None:
        return None, None
    length = begins_BS.shape[1]
    held = zigzag_positions(length, cp.size, begins_BS.device)
    begins_Bs = begins_BS[:, held[cp.index]]
    return begins_Bs.chunk(2, dim=1)


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of the sequence that a rank holds: the r-th, and the r-th from the end."""
    return rank, 2 * ranks - 1 - rank


def zigzag_chunk_ends(length: int, cp: Axis) -> tuple[int, int]:
    """Where this rank's early and late chunk end in the sequence."""
    size = length // (2 * cp.size)
    early, late = zigzag_chunks(cp.index, cp.size)
    return (early + 1) * size, (late + 1) * size


def ulysses_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    cp = world.axis("cp")
    return ulysses_attention(kernels[attention], cp, cp)


def hierarchical_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    """Inside a node ranks swap positions for heads, which makes the node's positions one early and one late chunk: a
    zig-zag over nodes, round which the ring goes."""
    across_nodes = ring_attention(world.cp_nodes, kernels)
    return ulysses_attention(across_nodes, world.cp_inside, world.axis("cp"))


def ulysses_attention(attention: ContextMechanism, axis: Axis, cp: Axis) -> ContextMechanism:
    """Attention over all positions of the ranks along an axis, all of cp or those of a node, with each rank's share of
    the heads."""
    first = 0
    if axis.size < cp.size:  # ranks of a node
        first = cp.index - axis.index

    def attend_across_ranks(q_BsHD, k_BsGD, v_BsGV, scale, window, sink_H, begins_BS) -> Tensor:
        # all positions of the ranks, of this rank's share of the heads
        check_heads_divide(k_BsGD.shape[2], axis)
        length = q_BsHD.shape[1] * cp.size
        held = zigzag_positions(length, cp.size, q_BsHD.device)
        positions = held[first : first + axis.size]
        order = positions.flatten().argsort()
        q = heads_for_positions(q_BsHD, axis, order)
        k = heads_for_positions(k_BsGD, axis, order)
        v = heads_for_positions(v_BsGV, axis, order)
        if sink_H is not None:
            sink_H = sink_H.chunk(axis.size)[axis.index]
        # and back: all heads of this rank's positions
        y = attention(q, k, v, scale, window, sink_H, begins_BS)
        return positions_for_heads(y, axis, order)

    return attend_across_ranks


def check_heads_divide(heads: int, axis: Axis) -> None:
    if heads % axis.size:
        raise UserError(
            f"parallel.context swaps heads over {axis.size} ranks, which does not divide the {heads} "
            "key and value heads of a rank; set parallel.context to ring"
        )


def heads_for_positions(x_BsHD: Tensor, axis: Axis, order: Tensor) -> Tensor:
    """(B, s, H, D) -> (B, s x n, H / n, D): all positions of the n ranks, in order, of this rank's heads."""
    n = axis.size
    heads = x_BsHD.shape[2]
    even = [heads // n] * n
    x_HsBD = x_BsHD.permute(2, 1, 0, 3)
    x = all_to_all(x_HsBD, even, even, axis, what="heads")  # each rank's positions of my heads
    by_rank = x.unflatten(0, (n, -1))
    by_head = by_rank.transpose(0, 1)
    x_hSBD = by_head.flatten(1, 2)[:, order]
    return x_hSBD.permute(2, 1, 0, 3)


def positions_for_heads(y_BShD: Tensor, axis: Axis, order: Tensor) -> Tensor:
    """The way back: (B, s x n, H / n, D) -> (B, s, H, D)."""
    n = axis.size
    heads = y_BShD.shape[2]
    even = [heads] * n
    y_hSBD = y_BShD.permute(2, 1, 0, 3)
    as_held = y_hSBD[:, order.argsort()]  # positions as the ranks hold them
    by_head = as_held.unflatten(1, (n, -1))
    by_rank = by_head.transpose(0, 1)
    y = by_rank.flatten(0, 1)  # heads x ranks, rank outermost
    y_HsBD = all_to_all(y, even, even, axis, what="heads")
    return y_HsBD.permute(2, 1, 0, 3)


def ring_context(kernels: BoundKernels, world: World) -> ContextMechanism:
    return ring_attention(world.axis("cp"), kernels)


def ring_attention(axis: Axis, kernels: BoundKernels) -> ContextMechanism:
    """Attention over what goes round a ring of ranks; the rules keep documents off it."""

    def attend_across_ranks(q, k, v, scale, window, sink_H, begins_BS) -> Tensor:
        assert begins_BS is None
        return RingAttention.apply(q, k, v, scale, window, sink_H, axis, kernels)  # pyright: ignore[reportReturnType]

    return attend_across_ranks


def causal_chunk_pairs(mine: int, theirs: int, ranks: int, size: int, window: int) -> list[ChunkPair]:
    """Which of my two query chunks meet which of their two key chunks, of `size` positions each, and how far ahead the
    queries stand. Zig-zag: chunk 0 of rank r is the r-th of the sequence, chunk 1 the r-th from its end; a chunk sees
    those before it, unless a window ends nearer, and part of itself."""
    my_chunks = zigzag_chunks(mine, ranks)
    their_chunks = zigzag_chunks(theirs, ranks)
    places = [slice(0, size), slice(size, 2 * size)]
    met: list[ChunkPair] = []
    for i, j in PAIRS_OF_TWO:
        ahead = (my_chunks[i] - their_chunks[j]) * size
        nearest = ahead - size + 1  # from the first query to the last key
        beyond_window = 0 < window <= nearest
        if ahead >= 0 and not beyond_window:
            pair = places[i], places[j], ahead
            met.append(pair)
    return met


def chunk_pairs_here(q: Tensor, theirs: int, cp: Axis, window: int) -> list[ChunkPair]:
    """The pairs of chunks of this rank's queries and a rank's keys."""
    size = q.shape[1] // 2
    return causal_chunk_pairs(cp.index, theirs, cp.size, size, window)


def blocks_round_ring(travelling: Tensor, cp: Axis) -> Iterator[tuple[int, Tensor]]:
    """Each rank's block, and whose it is, beginning with this rank's. The next travels while one is in use."""
    for hop in range(cp.size):
        is_last = hop + 1 == cp.size
        turn = None if is_last else RingShift(travelling, cp)
        yield (cp.index - hop) % cp.size, travelling
        if turn:
            travelling = turn.arrived()


def log_sums_before_keys(q: Tensor, sink_H: Tensor | None, wide: torch.dtype) -> Tensor:
    """(B, H, S): the log-sum-exp of scores before any key is met, that of the sinks alone."""
    b, s, h, _ = q.shape
    if sink_H is None:
        shape = (b, h, s)
        return q.new_full(shape, -torch.inf, dtype=wide)
    sink_H = sink_H.to(wide)
    sink_H1 = sink_H[:, None]
    sink_X1 = sink_H1.repeat(b, 1, s)
    return sink_X1.view(b, h, s)


class RingAttention(torch.autograd.Function):
    """Keys and values travel once round the ring in forward; in backward they travel again, and their gradients with
    them. Only the local q, k, v, the result and its log-sum-exp are kept. A sink is there from the start: it has a
    score and no value."""

    @staticmethod
    def forward(ctx, q, k, v, scale: float, window: int, sink_H: Tensor | None, cp: Axis, kernels: BoundKernels):
        attend = kernels[attention_block]
        merge_block = kernels[merge_attention_block]
        key_width = k.shape[-1]
        value_width = v.shape[-1]
        widths = [key_width, value_width]
        wide = torch.promote_types(q.dtype, torch.float32)
        out_shape = *q.shape[:-1], value_width
        out = q.new_zeros(out_shape, dtype=wide)
        lse = log_sums_before_keys(q, sink_H, wide)
        local = torch.cat((k, v), -1)
        # what each rank's keys and values add to the chunks of queries that see them
        for rank, block in blocks_round_ring(local, cp):
            keys, values = block.split(widths, dim=-1)
            pairs = chunk_pairs_here(q, rank, cp, window)
            for mine, theirs, ahead in pairs:
                queries = q[:, mine]
                met = keys[:, theirs], values[:, theirs]
                part, part_lse = attend(queries, *met, scale, ahead, window)
                so_far = out[:, mine], lse[..., mine]
                merge_block(*so_far, part, part_lse)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink_H, result, lse)
        ctx.rest = scale, window, cp, kernels
        return result

    @staticmethod
    def backward(ctx, *incoming):
        q, k, v, sink_H, out, lse = ctx.saved_tensors
        scale, window, cp, kernels = ctx.rest
        (dy,) = incoming
        attend_backward = kernels[attention_block_backward]
        key_width = k.shape[-1]
        value_width = v.shape[-1]
        widths = [key_width, value_width]
        wide = lse.dtype
        products = dy.to(wide) * out.to(wide)
        delta = products.sum(-1).transpose(1, 2)
        dq = q.new_zeros(q.shape, dtype=wide)
        local = torch.cat((k, v), -1)
        gradients = local.new_zeros(local.shape, dtype=wide)
        # the same blocks again; their gradients go with them, a hop behind
        for rank, block in blocks_round_ring(local, cp):
            keys, values = block.split(widths, dim=-1)
            dkeys, dvalues = gradients.split(widths, dim=-1)
            pairs = chunk_pairs_here(q, rank, cp, window)
            for mine, theirs, ahead in pairs:
                queries = dy[:, mine], q[:, mine]
                met = keys[:, theirs], values[:, theirs]
                lse_part = lse[..., mine]
                delta_part = delta[..., mine]
                parts = attend_backward(*queries, *met, lse_part, delta_part, scale, ahead, window)
                dq_part, dk_part, dv_part = parts
                dq[:, mine] += dq_part
                dkeys[:, theirs] += dk_part
                dvalues[:, theirs] += dv_part
            gradients = RingShift(gradients, cp).arrived()  # after the last hop they are home
        dq = dq.to(q.dtype)
        dkeys, dvalues = gradients.split(widths, dim=-1)
        dk = dkeys.to(k.dtype)
        dv = dvalues.to(v.dtype)
        d_sink = sink_gradient(sink_H, lse, delta)
        return dq, dk, dv, None, None, d_sink, None, None


MakeMechanism = Callable[[BoundKernels, World], ContextMechanism]
CONTEXT_MECHANISMS: dict[str, MakeMechanism] = {
    "all_gather": all_gather_context,
    "all_to_all": ulysses_context,
    "ring": ring_context,
    "hierarchical": hierarchical_context,
}


def choose_context_mechanism(name: str, kernels: BoundKernels, world: World) -> ContextMechanism:
    if world.axis("cp").size == 1:
        return kernels[attention]
    make_mechanism = CONTEXT_MECHANISMS[name]
    return make_mechanism(kernels, world)
