"""Tiles of dense products whose rows lie in shards of ranks, in Triton: where they are, and their main loop. Imported
only where Triton is.

A row of tiles has rows of one shard. Rows of tiles are counted by shard, from that of a given rank on.

C rows of all ranks, K inputs, N outputs, s ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr
from triton.tools.tensor_descriptor import TensorDescriptor

from moefold.kernels.linear.product_exchange import ProductExchange
from moefold.kernels.routing.arrival_pieces import PieceSignals
from moefold.kernels.routing.peer_rows_triton import address_table
from moefold.kernels.routing.peer_signals_triton import await_words, note_lost_rank
from moefold.kernels.tile_triton import numbers_from
from moefold.layout.peer_rooms import PeerRooms, as_peer_rooms

T = TypeVar("T")
LAYERS = 3  # of a launch


class TileSizes(NamedTuple):
    """Rows, columns and depth of a tile, rows of tiles whose columns are taken together, options of the launch, and
    whether operands are read by descriptors, where they can be."""

    rows: int
    columns: int
    depth: int
    band: int
    warps: int
    stages: int
    described: bool = False

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


TILES = {
    2: TileSizes(256, 128, 64, 4, 8, 4, described=True),
    4: TileSizes(128, 64, 32, 8, 8, 3),
}  # by bytes of a number


@triton.jit
def locate_shard(begins, m, first, RANKS: constexpr, ROWS: constexpr):
    """The rank of a row of tiles, its number there, the rank's first row and its rows."""
    shard = tl.zeros_like(m)
    number = tl.zeros_like(m)
    begin = tl.zeros_like(m)
    rows = tl.zeros_like(m)
    passed = tl.zeros_like(m)
    for turn in tl.static_range(RANKS):
        rank = (first + turn) % RANKS
        shard_begin = tl.load(begins + rank)
        shard_rows = tl.load(begins + rank + 1) - shard_begin
        tiles = tl.cdiv(shard_rows, ROWS)
        is_here = (m >= passed) & (m < passed + tiles)
        shard = tl.where(is_here, rank, shard)
        number = tl.where(is_here, m - passed, number)
        begin = tl.where(is_here, shard_begin, begin)
        rows = tl.where(is_here, shard_rows, rows)
        passed += tiles
    return shard, number, begin, rows


@triton.jit
def multiply_rows(
    total,
    x,
    row,
    x_stride,
    w,
    n,
    K,
    N,
    w_stride,
    TURNED: constexpr,
    EVEN: constexpr,
    DEPTH: constexpr,
):
    """The sum so far, plus rows of x times columns n of W^T. Rows all exist; what is not there of columns may be any
    number. `x_stride`: numbers from one row of x to the next. TURNED: neighbours in memory are numbers of the same
    input, not of the same output. EVEN: DEPTH divides K."""
    k = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    wide_stride = w_stride.to(tl.int64)
    if TURNED:
        is_column = (n < N)[None, :]
        w_at = w + k[:, None] * wide_stride + n[None, :]
    else:
        held = tl.minimum(n, N - 1)
        w_at = w + held[:, None] * wide_stride + k[None, :]
    for start in range(0, K, DEPTH):
        if EVEN:
            rows = tl.load(x_at)
        else:
            rows = tl.load(x_at, mask=(k < K - start)[None, :], other=0)
        if TURNED:
            inside = is_column
            if not EVEN:
                inside = is_column & (k < K - start)[:, None]
            weights = tl.load(w_at, mask=inside, other=0)
            total = tl.dot(rows, weights, total, input_precision="ieee")
            w_at += DEPTH * wide_stride
        else:
            if EVEN:
                weights = tl.load(w_at)
            else:
                weights = tl.load(w_at, mask=(k < K - start)[None, :], other=0)
            total = tl.dot(rows, tl.trans(weights), total, input_precision="ieee")
            w_at += DEPTH
        x_at += DEPTH
    return total


@triton.jit
def multiply_boxes(total, x, row, x_first, w, column, w_first, K, TURNED: constexpr, DEPTH: constexpr):
    """The same from descriptors of both matrices, for a tile of theirs from a row and a column on, and from an input of
    each. What is not there is zeros, or rows of others in the same matrix."""
    for start in range(0, K, DEPTH):
        rows = x.load([row, x_first + start])
        if TURNED:
            weights = w.load([w_first + start, column])
            total = tl.dot(rows, weights, total, input_precision="ieee")
        else:
            weights = w.load([column, w_first + start])
            total = tl.dot(rows, weights.T, total, input_precision="ieee")
    return total


@triton.jit
def of_layer(column, END0, END1, first, second, third):
    """What is that of the layer which a column of tiles is in."""
    chosen = first
    if column >= END1:
        chosen = third
    elif column >= END0:
        chosen = second
    return chosen


@triton.jit
def order_for_copies(x, CLOCKED: constexpr):
    """A number as it is. Behind this, copies by descriptors see what threads that were waited for have written."""
    if CLOCKED:
        fence: constexpr = "fence.proxy.async.global; mov.b32 $0, $1;"
        x = tl.inline_asm_elementwise(fence, "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
    return x


@triton.jit
def rows_of_tile(number, rows, ROWS: constexpr):
    """Rows of a shard; those behind its last are that one. And which exist."""
    r = numbers_from(number * ROWS, ROWS)
    return tl.minimum(r, rows - 1), r < rows


@triton.jit
def await_flags(
    own_flags,
    piece,
    sender,
    is_awaited,
    number,
    is_lost,
    own_words,
    fault_2,
    flags_of_sender,
    patience,
    RANKS: constexpr,
    WIDTH: constexpr,
    CLOCKED: constexpr,
):
    """Wait for a piece of each sender that is awaited; whether a rank is lost. A program that gave up once waits no
    more."""
    limit = tl.where(is_lost == 0, patience, 0)
    late = await_words(own_flags, sender * flags_of_sender + piece, number, is_awaited, limit, CLOCKED)
    note_lost_rank(late, sender, number, is_lost, own_words, fault_2, RANKS, WIDTH)
    tl.debug_barrier()  # all threads of the program are behind those that have looked
    return tl.where(tl.sum(late) > 0, is_lost + 1, is_lost)


def upload_begins(rooms: PeerRooms, shards: tuple[int, ...]) -> Tensor:
    """The first row of each rank among all, and their number."""
    begins = [sum(shards[:rank]) for rank in range(len(shards) + 1)]
    return torch.tensor(begins, dtype=torch.int32, device=rooms[0].device)


def begin_table(rooms: list[Tensor], shards: tuple[int, ...]) -> Tensor:
    return as_peer_rooms(rooms).keep(upload_begins, shards)


def exchange_tables(rooms: list[Tensor], exchange: ProductExchange, counters: int) -> tuple[Tensor, ...]:
    """What tiles find rows, rooms and signals by, and some counters of zero."""
    signals = exchange.signals
    assert signals is not None, "tiles wait for signals"
    begins = begin_table(rooms, exchange.shards)
    tail = signals.tail
    zeros = begins.new_zeros(counters)
    return begins, address_table(rooms), signals.flags, tail.addresses, tail.fault_2, zeros


def time_tables(signals: PieceSignals) -> tuple[Tensor, ...]:
    """Records of a launch, or any tensors where it keeps none."""
    return (signals.flags,) * 3 if signals.records is None else tuple(signals.records)


class LayerWeights(NamedTuple):
    """Weights of up to three layers, or descriptors of them, as many numbers from one row, or column, to the next, and
    whether these are columns."""

    operands: list[Tensor] | list[TensorDescriptor]
    strides: list[int]
    turned: bool


def layer_weights(weights: Sequence[Tensor], sizes: TileSizes, described: bool) -> LayerWeights:
    """Transposed views as they are; anything else in rows. A layer that is missing is the last one once more."""
    turned = all(weight.stride(0) == 1 and weight.stride(1) >= len(weight) for weight in weights)
    tensors = [weight.T for weight in weights] if turned else list(weights)
    tensors = [tensor.contiguous() for tensor in tensors]
    strides = [tensor.stride(0) for tensor in tensors]
    if not described:
        return LayerWeights(filled(tensors), filled(strides), turned)
    box = [sizes.depth, sizes.columns] if turned else [sizes.columns, sizes.depth]
    descriptors = [TensorDescriptor.from_tensor(tensor, box) for tensor in tensors]
    return LayerWeights(filled(descriptors), filled(strides), turned)


def can_describe(rows: int, *widths: int) -> bool:
    """Whether descriptors can tell of matrices of these widths: each row begins at a multiple of 16 bytes, as 16-bit
    numbers do, and there are rows."""
    return rows > 0 and all(width % 8 == 0 for width in widths)


def row_boxes(x_TD: Tensor, sizes: TileSizes) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x_TD, [sizes.rows, sizes.depth])


def filled(values: list[T]) -> list[T]:
    return values + values[-1:] * (LAYERS - len(values))


def tiles_of(shards: tuple[int, ...], rows: int) -> list[int]:
    """Rows of tiles of each rank."""
    return [triton.cdiv(shard, rows) for shard in shards]
