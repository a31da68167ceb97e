"""Context parallelism: queries meet keys that other ranks hold. A mechanism attends as the op `attention` does, with
this rank's positions of q, k and v, and with the document begins of all positions; where cp is 1, by that op. Where
logits are clipped, the largest are noted where a rank has queries and keys: together the ranks note all.

    all_gather  every rank gets all keys and values; its queries, two chunks, attend to what lies before them
    all_to_all  ranks swap sequence for heads (Ulysses): each attends over whole sequences with its share of the heads;
                key/value heads are copied where there are fewer than ranks
    ring        keys and values go round; the next block travels while this one is computed
    hierarchical  all-to-all inside a node, ring across nodes

B sequences, s positions held here (S in all), H query heads, G key/value heads, D head width, V that of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import lcm
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moefold.comm.collectives import all_gather, all_to_all
from moefold.comm.ring_shift import RingShift
from moefold.config.errors import UserError
from moefold.kernels.attention.attention import attention
from moefold.kernels.attention.masked import sink_gradient
from moefold.kernels.attention.ring_block import attention_block, attention_block_backward, begins_among_keys
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import Axis, ContextAxes, World
from moefold.model.attention.logit_watch import LogitWatch
from moefold.model.steps import Region
from moefold.model.token_layout import order_by_position, zigzag_positions

# q, k, v, scale of scores, window (keys back that a query sees; 0: all), sink_H, begins_BS -> y; across ranks also with
# a watch of logits
Attend = Callable[..., Tensor]
JoinHeads = Callable[[Tensor], Tensor]
RankBlock = tuple[int, Tensor]  # a rank, its keys and values
EarlyAndLate = tuple[int, int]  # a number for each of a rank's two chunks
ChunkPair = tuple[slice, slice, int]  # a chunk of queries, a chunk of keys, how far ahead the queries stand
SeenBlock = tuple[slice, slice, int, Tensor | None]  # likewise, and where documents begin, from the first query on
PAIRS_OF_TWO = list(product((0, 1), repeat=2))


class ContextMechanism(Protocol):
    @property
    def attend(self) -> Attend: ...

    def heads_joiner(self, swap: Region) -> JoinHeads:
        """The function from what `attend` gives to (B, s, N): this rank's positions, all their heads joined. `swap`:
        the region in which results are sent."""
        ...


@dataclass(frozen=True, eq=False)
class WholeHeads:
    """A mechanism whose `attend` gives all heads of this rank's positions."""

    attend: Attend

    def heads_joiner(self, swap: Region) -> JoinHeads:
        return partial(torch.flatten, start_dim=2)


def local_attention(kernels: BoundKernels) -> Attend:
    """Attention to keys that are all here, behind an exchange."""
    attend = kernels[attention]

    def note_and_attend(q, k, v, scale, window, sink_H, begins_BS, watch=None) -> Tensor:
        if watch is not None:
            watch.note(q, k, scale, window, begins_BS)
        return attend(q, k, v, scale, window, sink_H, begins_BS)

    return note_and_attend


def all_gather_context(kernels: BoundKernels, axes: ContextAxes) -> ContextMechanism:
    """Keys and values of all ranks, in the order of their positions; each of this rank's two chunks of queries is a
    causal attention over the keys up to its end."""

    attend = local_attention(kernels)
    cp = axes.cp

    def attend_across_ranks(q_BsHD, k_BsGD, v_BsGV, scale, window, sink_H, begins_BS, watch=None) -> Tensor:
        k_BSGD = gather_positions(k_BsGD, cp)
        v_BSGV = gather_positions(v_BsGV, cp)
        length = k_BSGD.shape[1]
        ends = zigzag_chunk_ends(length, cp)
        begins = document_begins_of_chunks(begins_BS, cp)
        chunks = q_BsHD.chunk(2, dim=1)
        parts = []
        for i, q in enumerate(chunks):
            end = ends[i]
            begins_Bs = begins[i]
            k = k_BSGD[:, :end]
            v = v_BSGV[:, :end]
            part = attend(q, k, v, scale, window, sink_H, begins_Bs, watch)
            parts.append(part)
        return torch.cat(parts, dim=1)

    return WholeHeads(attend_across_ranks)


def gather_positions(x_BsGD: Tensor, cp: Axis) -> Tensor:
    """All positions of the cp ranks, in the sequence's order."""
    sequence_first = x_BsGD.transpose(0, 1)
    gathered_SBGD = all_gather(sequence_first, cp)
    length = len(gathered_SBGD)
    held = positions_of_ranks(length, cp, x_BsGD)
    order = order_by_position(held)
    in_order_SBGD = gathered_SBGD[order]
    return in_order_SBGD.transpose(0, 1)


def positions_of_ranks(length: int, cp: Axis, like: Tensor) -> Tensor:
    """(cp, s): the positions that each cp rank holds, on the device of a tensor."""
    ranks = cp.size
    device = like.device
    return zigzag_positions(length, ranks, device)


def document_begins_of_chunks(begins_BS: Tensor | None, cp: Axis) -> Sequence[Tensor | None]:
    """Where the documents of this rank's two chunks of queries begin, if attention stays within documents."""
    if begins_BS is None:
        return None, None
    length = begins_BS.shape[1]
    held = positions_of_ranks(length, cp, begins_BS)
    held_here = held[cp.index]
    begins_Bs = begins_BS[:, held_here]
    return begins_Bs.chunk(2, dim=1)


def zigzag_chunks(rank: int, ranks: int) -> EarlyAndLate:
    """The two chunks of the sequence that a rank holds: the r-th, and the r-th from the end."""
    late = 2 * ranks - 1 - rank
    return rank, late


def zigzag_chunk_ends(length: int, cp: Axis) -> EarlyAndLate:
    """Where this rank's early and late chunk end in the sequence."""
    ranks = cp.size
    chunks = 2 * ranks
    size = length // chunks
    early, late = zigzag_chunks(cp.index, ranks)
    early_end = (early + 1) * size
    late_end = (late + 1) * size
    return early_end, late_end


def ulysses_context(kernels: BoundKernels, axes: ContextAxes) -> ContextMechanism:
    attend = local_attention(kernels)
    return ulysses_attention(attend, axes.cp, axes.cp)


def hierarchical_context(kernels: BoundKernels, axes: ContextAxes) -> ContextMechanism:
    """Inside a node ranks swap positions for heads, which makes the node's positions one early and one late chunk: a
    zig-zag over nodes, round which the ring goes."""
    across_nodes = ring_attention(axes.nodes, kernels)
    return ulysses_attention(across_nodes.attend, axes.inside, axes.cp)


def ulysses_attention(attend: Attend, axis: Axis, cp: Axis) -> SwappedAttention:
    first = 0
    if axis.size < cp.size:  # ranks of a node
        first = cp.index - axis.index
    return SwappedAttention(attend, axis, cp, first)


@dataclass(frozen=True, eq=False)
class SwappedAttention:
    """Attention over all positions of the ranks along an axis, all of cp or those of a node, with each rank's share of
    the heads. `first`: the first of these ranks along cp."""

    attend_whole: Attend
    axis: Axis
    cp: Axis
    first: int

    def attend(self, q_BsHD, k_BsGD, v_BsGV, scale, window, sink_H, begins_BS, watch=None) -> Tensor:
        """All positions of the ranks, of this rank's share of the heads."""
        axis = self.axis
        heads = q_BsHD.shape[2]
        k_BskD = replicate_heads(k_BsGD, axis, heads)
        v_BskV = replicate_heads(v_BsGV, axis, heads)
        held_here = q_BsHD.shape[1]
        swap = self.head_swap(held_here, q_BsHD)
        q = swap.positions_to_heads(q_BsHD)
        k = swap.positions_to_heads(k_BskD)
        v = swap.positions_to_heads(v_BskV)
        if sink_H is not None:
            sink_H = share_of_heads(sink_H, axis)
        if watch is not None:
            watch = watch.share(axis.index, axis.size)
        return self.attend_whole(q, k, v, scale, window, sink_H, begins_BS, watch)

    def heads_joiner(self, swap: Region) -> JoinHeads:
        return partial(swap, self.swap_and_join)

    def swap_and_join(self, y_BShV: Tensor) -> Tensor:
        positions = y_BShV.shape[1]
        held_here = positions // self.axis.size
        swap = self.head_swap(held_here, y_BShV)
        y_BsHV = swap.heads_to_positions(y_BShV)
        return y_BsHV.flatten(2)

    def head_swap(self, held_here: int, like: Tensor) -> HeadSwap:
        length = held_here * self.cp.size
        held = positions_of_ranks(length, self.cp, like)
        end = self.first + self.axis.size
        of_axis = held[self.first : end]
        order = order_by_position(of_axis)
        return HeadSwap(self.axis, order)


def share_of_heads(x_H: Tensor, axis: Axis) -> Tensor:
    """What belongs to this rank's heads, of the heads that the ranks of an axis share."""
    shares = x_H.chunk(axis.size)
    return shares[axis.index]


def replicate_heads(x_BsGD: Tensor, axis: Axis, heads: int) -> Tensor:
    """Key or value heads for an axis of any size: as many copies of each, side by side, as give all ranks the same
    number. Query heads are in the same order, so that every rank gets the copy that its queries share; the gradient of
    a head is the sum over its copies."""
    kv_heads = x_BsGD.shape[2]
    together = lcm(kv_heads, axis.size)
    if heads % together:
        raise UserError(
            f"parallel.context swaps heads over {axis.size} ranks, which do not share {heads} query heads and "
            f"{kv_heads} key and value heads of a rank evenly; expected query heads in a multiple of {together}: set "
            "parallel.context to ring"
        )
    copies = together // kv_heads
    return x_BsGD if copies == 1 else x_BsGD.repeat_interleave(copies, dim=2)


class HeadSwap(NamedTuple):
    """Positions swapped for heads among the n ranks of an axis. `order`: where each position stands when those of the
    ranks are joined."""

    axis: Axis
    order: Tensor

    def positions_to_heads(self, x_BsHD: Tensor) -> Tensor:
        """(B, s, H, D) -> (B, s x n, H / n, D): all positions of the n ranks, in order, of this rank's heads."""
        x_HsBD = x_BsHD.transpose(0, 2)
        x = self.exchange(x_HsBD)  # each rank's positions of my heads
        by_rank = x.unflatten(0, self.ranks)
        by_head = by_rank.transpose(0, 1)
        as_held = by_head.flatten(1, 2)
        x_hSBD = as_held[:, self.order]
        return x_hSBD.transpose(0, 2)

    def heads_to_positions(self, y_BShD: Tensor) -> Tensor:
        """The way back: (B, s x n, H / n, D) -> (B, s, H, D)."""
        y_hSBD = y_BShD.transpose(0, 2)
        place = self.order.argsort()  # of each position, as the ranks hold them
        as_held = y_hSBD[:, place]
        by_head = as_held.unflatten(1, self.ranks)
        by_rank = by_head.transpose(0, 1)
        y = by_rank.flatten(0, 1)  # heads x ranks, rank outermost
        y_HsBD = self.exchange(y)
        return y_HsBD.transpose(0, 2)

    @property
    def ranks(self) -> tuple[int, int]:
        """The shape of a dim that has the ranks outermost."""
        return self.axis.size, -1

    def exchange(self, x: Tensor) -> Tensor:
        """An all-to-all of the first dim in even parts: the r-th goes to rank r."""
        ranks = self.axis.size
        size = len(x) // ranks
        even = [size] * ranks
        axis = self.axis
        return all_to_all(x, even, even, axis, what="heads")


def ring_context(kernels: BoundKernels, axes: ContextAxes) -> ContextMechanism:
    return ring_attention(axes.cp, kernels)


class RingSetting(NamedTuple):
    scale: float
    window: int
    cp: Axis
    kernels: BoundKernels
    watch: LogitWatch | None


def ring_attention(axis: Axis, kernels: BoundKernels) -> WholeHeads:
    """Attention over what goes round a ring of ranks."""

    def attend_across_ranks(q, k, v, scale, window, sink_H, begins_BS, watch=None) -> Tensor:
        setting = RingSetting(scale, window, axis, kernels, watch)
        begins_Bs = begins_from_chunks(begins_BS, axis)
        return RingAttention.apply(q, k, v, sink_H, begins_Bs, setting)  # pyright: ignore[reportReturnType]

    return WholeHeads(attend_across_ranks)


def begins_from_chunks(begins_BS: Tensor | None, cp: Axis) -> Tensor | None:
    """Where the documents of this rank's queries begin, counted from the first query of their chunk, if attention
    stays within documents: a document that began in an earlier chunk is below zero."""
    early, late = document_begins_of_chunks(begins_BS, cp)
    if begins_BS is None or early is None or late is None:
        return None
    size = early.shape[1]
    length = begins_BS.shape[1]
    early_end, late_end = zigzag_chunk_ends(length, cp)
    from_early = early - (early_end - size)
    from_late = late - (late_end - size)
    begins_Bs = torch.cat((from_early, from_late), dim=1)
    return begins_Bs.int()


def causal_chunk_pairs(mine: int, theirs: int, ranks: int, size: int, window: int) -> list[ChunkPair]:
    """Which of my two query chunks meet which of their two key chunks, of `size` positions each, and how far ahead the
    queries stand, the nearest first. Zig-zag: chunk 0 of rank r is the r-th of the sequence, chunk 1 the r-th from its
    end; a chunk sees those before it, unless a window ends nearer, and part of itself."""
    met: list[ChunkPair] = []
    length = 2 * size
    early = slice(0, size)
    late = slice(size, length)
    places = (early, late)
    my_chunks = zigzag_chunks(mine, ranks)
    their_chunks = zigzag_chunks(theirs, ranks)
    for i, j in PAIRS_OF_TWO:
        my_chunk = my_chunks[i]
        their_chunk = their_chunks[j]
        ahead = (my_chunk - their_chunk) * size
        nearest = ahead - size + 1  # from the first query to the last key
        beyond_window = 0 < window <= nearest
        if ahead >= 0 and not beyond_window:
            queries = places[i]
            keys = places[j]
            pair = (queries, keys, ahead)
            met.append(pair)
    met.sort(key=positions_ahead)
    return met


def positions_ahead(pair: ChunkPair) -> int:
    _, _, ahead = pair
    return ahead


def blocks_seen(q: Tensor, begins_Bs: Tensor | None, theirs: int, setting: RingSetting) -> Iterator[SeenBlock]:
    """The pairs of chunks of this rank's queries and a rank's keys, without those that no query's document reaches. The
    first that a chunk of queries meets is itself."""
    cp = setting.cp
    size = q.shape[1] // 2
    pairs = causal_chunk_pairs(cp.index, theirs, cp.size, size, setting.window)
    for queries, keys, ahead in pairs:
        begins = None if begins_Bs is None else begins_Bs[:, queries]
        last_key = size - 1 - ahead
        if begins is None or may_reach(begins, last_key):
            yield queries, keys, ahead, begins


def may_reach(begins_Bs: Tensor, position: int) -> bool:
    """Whether a document of these queries may reach back to a position. A GPU would have to be waited for: there the
    answer is always yes, and kernels skip the keys that no query sees."""
    if begins_Bs.device.type != "cpu":
        return True
    earliest_B = begins_Bs[:, 0]
    is_reached = earliest_B <= position
    return bool(is_reached.any())


def blocks_round_ring(travelling: Tensor, cp: Axis) -> Iterator[RankBlock]:
    """Each rank's block, and whose it is, beginning with this rank's. The next travels while one is in use."""
    ranks = cp.size
    for hop in range(ranks):
        is_last = hop + 1 == ranks
        turn = None if is_last else RingShift(travelling, cp)
        owner = (cp.index - hop) % ranks
        yield owner, travelling
        if turn:
            travelling = turn.arrived()


def log_sums_before_keys(q: Tensor, sink_H: Tensor | None, wide: torch.dtype) -> Tensor:
    """(B, H, S): the log-sum-exp of scores before any key is met, that of the sinks alone."""
    b, s, h, _ = q.shape
    if sink_H is None:
        shape = (b, h, s)
        nothing = -torch.inf
        return q.new_full(shape, nothing, dtype=wide)
    wide_H = sink_H.to(wide)
    wide_H1 = wide_H[:, None]
    return wide_H1.repeat(b, 1, s)


class RingAttention(torch.autograd.Function):
    """Keys and values travel once round the ring in forward; in backward they travel again, and their gradients with
    them. Only the local q, k, v, the result and its log-sum-exp are kept. A sink is there from the start: it has a
    score and no value."""

    @staticmethod
    def forward(ctx, q, k, v, sink_H: Tensor | None, begins_Bs: Tensor | None, setting: RingSetting):
        scale, window, cp, kernels, watch = setting
        attend = kernels[attention_block]
        # nothing but the sinks met yet; a chunk's first block writes its result
        wide = torch.promote_types(q.dtype, torch.float32)
        by_head = q.shape[:-1]
        value_width = v.shape[-1]
        shape = (*by_head, value_width)
        out = q.new_empty(shape, dtype=wide)
        lse = log_sums_before_keys(q, sink_H, wide)
        # what each rank's keys and values add to the chunks of queries that see them
        local = join_keys_and_values(k, v)
        for rank, block in blocks_round_ring(local, cp):
            keys, values = split_like(block, k, v)
            for mine, theirs, ahead, begins in blocks_seen(q, begins_Bs, rank, setting):
                q_part = q[:, mine]
                k_part = keys[:, theirs]
                v_part = values[:, theirs]
                if watch is not None:
                    from_keys = begins_among_keys(begins, ahead)
                    watch.note(q_part, k_part, scale, window, from_keys, ahead)
                out_part = out[:, mine]
                lse_part = lse[..., mine]
                fresh = ahead == 0
                attend(out_part, lse_part, q_part, k_part, v_part, scale, ahead, window, begins, fresh)
        dtype = q.dtype
        result = out.to(dtype)
        ctx.save_for_backward(q, k, v, sink_H, begins_Bs, result, lse)
        ctx.setting = setting
        return result

    @staticmethod
    def backward(ctx, *incoming):
        q, k, v, sink_H, begins_Bs, out, lse = ctx.saved_tensors
        setting = ctx.setting
        scale, window, cp, kernels, _ = setting
        (dy,) = incoming
        add_gradients = kernels[attention_block_backward]
        wide = lse.dtype
        # which a chunk's first block writes
        delta = torch.empty_like(lse)
        dq = q.new_empty(q.shape, dtype=wide)
        # the same blocks again; their gradients go with them, a hop behind
        local = join_keys_and_values(k, v)
        gradients = local.new_zeros(local.shape, dtype=wide)
        for rank, block in blocks_round_ring(local, cp):
            keys, values = split_like(block, k, v)
            dkeys, dvalues = split_like(gradients, k, v)
            for mine, theirs, ahead, begins in blocks_seen(q, begins_Bs, rank, setting):
                dq_part = dq[:, mine]
                dk_part = dkeys[:, theirs]
                dv_part = dvalues[:, theirs]
                delta_part = delta[..., mine]
                sums = (dq_part, dk_part, dv_part, delta_part)
                dy_part = dy[:, mine]
                q_part = q[:, mine]
                k_part = keys[:, theirs]
                v_part = values[:, theirs]
                heads = (dy_part, q_part, k_part, v_part)
                out_part = out[:, mine]
                lse_part = lse[..., mine]
                fresh = ahead == 0
                add_gradients(*sums, *heads, out_part, lse_part, scale, ahead, window, begins, fresh)
            turn = RingShift(gradients, cp)
            gradients = turn.arrived()  # after the last hop they are home
        dkeys, dvalues = split_like(gradients, k, v)
        dq = dq.to(q.dtype)
        dk = dkeys.to(k.dtype)
        dv = dvalues.to(v.dtype)
        d_sink = sink_gradient(sink_H, lse, delta)
        return dq, dk, dv, d_sink, None, None


def join_keys_and_values(k: Tensor, v: Tensor) -> Tensor:
    """One tensor for one message."""
    both = (k, v)
    return torch.cat(both, dim=-1)


def split_like(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """The parts of a joined tensor that have the widths of keys and values."""
    key_width = k.shape[-1]
    value_width = v.shape[-1]
    widths = [key_width, value_width]
    return joined.split(widths, dim=-1)


MakeMechanism = Callable[[BoundKernels, ContextAxes], ContextMechanism]
CONTEXT_MECHANISMS: dict[str, MakeMechanism] = {
    "all_gather": all_gather_context,
    "all_to_all": ulysses_context,
    "ring": ring_context,
    "hierarchical": hierarchical_context,
}


def choose_context_mechanisms(name: str, kernels: BoundKernels, world: World) -> dict[int, ContextMechanism]:
    """By the number of ranks that share a sequence: one too, which projections may leave whole sequences to."""
    mechanisms: dict[int, ContextMechanism] = {1: WholeHeads(kernels[attention])}
    for size in world.context_axes:
        mechanisms[size] = choose_context_mechanism(name, kernels, world, size)
    return mechanisms


def choose_context_mechanism(
    name: str, kernels: BoundKernels, world: World, size: int | None = None
) -> ContextMechanism:
    axes = world.context(size)
    if axes.cp.size == 1:
        return WholeHeads(kernels[attention])
    make_mechanism = CONTEXT_MECHANISMS[name]
    return make_mechanism(kernels, axes)
