"""Calls of a tape in two parts, for two processes (shared_replay.py), with the bits of the whole call: attention by
sequences, activations by rows, entries as they say themselves (layout/tape_entries.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moefold.layout.tape_entries import ENTRY_FACTS, EntryFacts
from moefold.memory.call_order import Bytes, Touched
from moefold.memory.tape import PlannedCall

BY_FIRST_DIMENSION = {  # ops of which no part of a result depends on another part of an input
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::silu.out",
    "aten::silu_backward.grad_input",
}
LEAST_BYTES = 1 << 17  # of a result; less is not worth a second call
WHOLE_VECTORS = 64  # elements: a part ends where a vector does, on any CPU
Cut = Callable[[Tensor], Tensor]


def call_in_halves(call: PlannedCall) -> list[PlannedCall]:
    """The call, or two that do the same together."""
    facts = ENTRY_FACTS.get(call.function, EntryFacts())
    if facts.halves is not None:
        halves = facts.halves(*call.args)
        return [PlannedCall(call.function, tuple(args), {}) for args in halves] or [call]
    if name_of(call) not in BY_FIRST_DIMENSION:
        return [call]
    mask = call.kwargs.get("attn_mask")
    if mask is not None and mask.dim() == 2:  # of queries and keys, one for all sequences
        return [call]
    tensors = tensors_of(call)
    (size, *others) = {x.shape[0] for x in tensors}
    middle = size // 2
    row = min(x[:1].numel() for x in tensors)
    is_large = max(x.nbytes for x in tensors) >= LEAST_BYTES
    if others or not is_large or not middle or middle * row % WHOLE_VECTORS:
        return [call]
    return [cut_call(call, lambda x: x[:middle]), cut_call(call, lambda x: x[middle:])]


def cut_call(call: PlannedCall, cut: Cut) -> PlannedCall:
    def cut_tensor(x: Any) -> Any:
        return cut(x) if isinstance(x, Tensor) else x

    args, kwargs, outputs = tree_map(cut_tensor, (call.args, call.kwargs, call.outputs))
    return PlannedCall(call.function, args, kwargs, outputs)


def name_of(call: PlannedCall) -> str:
    schema = getattr(call.function, "_schema", None)
    return "" if schema is None else call.function.name()  # pyright: ignore[reportFunctionMemberAccess]


def tensors_of(call: PlannedCall) -> list[Tensor]:
    return [x for x in tree_leaves((call.args, call.kwargs, call.outputs)) if isinstance(x, Tensor)]


def touched_by(call: PlannedCall, whole: int = 0) -> Touched:
    schema = getattr(call.function, "_schema", None)
    if schema is None:
        return touched_by_entry(call, whole)
    reads: list[Bytes] = []
    writes = ranges_of(call.outputs)
    for number, argument in enumerate(schema.arguments):
        given = call.args[number] if number < len(call.args) else call.kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            writes += ranges_of(given)
        if not argument.is_out:
            reads += ranges_of(given)
    return Touched(reads, writes, whole)


def touched_by_entry(call: PlannedCall, whole: int) -> Touched:
    written = ENTRY_FACTS.get(call.function, EntryFacts()).written
    if written is None:
        written = len(call.args)
    return Touched(ranges_of(call.args[written:]), ranges_of(call.args[:written]), whole)


def ranges_of(arguments: Any) -> list[Bytes]:
    tensors = (x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.numel())
    return [range_of(x) for x in tensors]


def range_of(x: Tensor) -> Bytes:
    """From the first to behind the last byte of a tensor."""
    begin = x.data_ptr()
    sizes_and_strides = zip(x.shape, x.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_and_strides)
    return begin, begin + (last + 1) * x.element_size()
