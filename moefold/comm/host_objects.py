"""Objects of the host sent between ranks, pickled by torch. Where a rank is alone nothing is sent.

    broadcast_object   the first rank's object, on every rank
    first_object       the object of the first rank that has one, on every rank
    gather_objects     every rank's object, on the first rank alone
    choose_object      what the first rank makes of every rank's object, on every rank
    scatter_objects    one object for every rank, from the first rank
    union_of_sets      the union of every rank's set, on every rank

No rank but the first holds more than two of them, whatever the size of the axis. Bytes travel in host memory: the
device is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from moefold.comm.byte_counters import note_object_bytes
from moefold.layout.axes import Axis

T = TypeVar("T")
Chosen = TypeVar("Chosen")
CPU = torch.device("cpu")


def broadcast_object(item: T, axis: Axis) -> T:
    return broadcast_from(0, item, axis)


def first_object(item: T | None, axis: Axis) -> T | None:
    """The item of the first rank whose item is not None; None where no rank has one."""
    if axis.is_alone:
        return item
    nobody = axis.size
    mine = nobody if item is None else axis.index
    first = torch.tensor([mine])
    smallest = dist.ReduceOp.MIN
    dist.all_reduce(first, op=smallest, group=axis.group)
    source = int(first)
    if source == nobody:
        return None
    return broadcast_from(source, item, axis)


def gather_objects(item: T, axis: Axis) -> list[T] | None:
    """The items of all ranks, in order, on the first rank of the axis; None on the others."""
    if axis.is_alone:
        return [item]
    raw = encode_object(item)
    rows = None
    row = pad_to_longest(raw, axis)
    if axis.index == 0:
        every = range(axis.size)
        rows = [torch.empty_like(row) for _ in every]
    dist.gather(row, rows, group=axis.group, group_dst=0)
    if rows is None:
        return None
    received = len(rows) * row.nbytes
    note_object_bytes(axis, received)
    return list(map(decode_object, rows))


def scatter_objects(items: Sequence[T] | None, axis: Axis) -> T:
    """This rank's item of those that the first rank of the axis has; the others have None."""
    if axis.is_alone:
        assert items is not None
        return items[0]
    rows = None
    longest = torch.zeros(1, dtype=torch.int64)
    if items is not None:
        raw = list(map(encode_object, items))
        length = max(map(len, raw))
        longest[0] = length
        rows = [padded(one, length) for one in raw]
    dist.broadcast(longest, group=axis.group, group_src=0)
    size = int(longest)
    row = torch.zeros(size, dtype=torch.uint8)
    dist.scatter(row, rows, group=axis.group, group_src=0)
    note_object_bytes(axis, row.nbytes)
    return decode_object(row)


def choose_object(item: T, choose: Callable[[list[T]], Chosen], axis: Axis) -> Chosen:
    """What `choose` makes of the items of all ranks, in order. The first rank of the axis alone calls it."""
    items = gather_objects(item, axis)
    chosen: Any = None if items is None else choose(items)
    return broadcast_object(chosen, axis)


def union_of_sets(own: set[T], axis: Axis) -> set[T]:
    return choose_object(own, unite_sets, axis)


def unite_sets(sets: list[set[T]]) -> set[T]:
    return set[T]().union(*sets)


def broadcast_from(source: int, item: T, axis: Axis) -> T:
    """The item of one rank of the axis, by its index."""
    if axis.is_alone:
        return item
    raw = encode_object(item)
    size = torch.tensor([len(raw)])
    dist.broadcast(size, group=axis.group, group_src=source)
    length = int(size)
    raw = padded(raw[:length], length)
    dist.broadcast(raw, group=axis.group, group_src=source)
    note_object_bytes(axis, raw.nbytes)
    if axis.index == source:
        return item
    return decode_object(raw)


def encode_object(item: object) -> Tensor:
    raw, _ = distributed_c10d._object_to_tensor(item, CPU, None)  # pyright: ignore[reportPrivateUsage]
    return raw


def decode_object(raw: Tensor) -> Any:
    """The object that the bytes begin with; those behind it are not read."""
    return distributed_c10d._tensor_to_object(raw, len(raw), None)  # pyright: ignore[reportPrivateUsage]


def pad_to_longest(raw: Tensor, axis: Axis) -> Tensor:
    longest = torch.tensor([len(raw)])
    largest = dist.ReduceOp.MAX
    dist.all_reduce(longest, op=largest, group=axis.group)
    return padded(raw, int(longest))


def padded(raw: Tensor, length: int) -> Tensor:
    row = raw.new_zeros(length)
    row[: len(raw)] = raw
    return row
