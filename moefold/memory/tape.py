"""A tape: the step of a CPU run as the list of the ops that it runs, recorded once and replayed without Python's model
and without autograd.

For small models most of a step's time on a CPU is spent between ops: in modules, in autograd's nodes, in allocations. A
replay calls the recorded ops one after another, each with memory for its results at the address that it will have in
every replay: views need not be made again, and nothing is allocated. What is read of Python is what it was in the
recording, as in a CUDA graph (memory/graphs.py).

    recording   ops are run and noted; memory is noted by its number, offset, shape and strides, and may be freed
    planning    memory that is still alive behind the step stays; memory that was freed gets a place in one arena,
                where places are shared by what is not alive at the same time
    replay      the calls, on tensors that lie in these places
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from moefold.layout.tape_entries import OPEN_TAPES, WritingFunction

T = TypeVar("T")
Replay = Callable[[], None]
ALIGNMENT = 64  # bytes
MOST_MEMORIES = 5000  # of a step
HOST_READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::lift_fresh"}
INDEXED = {"aten::index.Tensor", "aten::index_put", "aten::index_put_"}  # by flags: as many rows as flags are set
WITHOUT_VALUES = {
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
}
OF_SHAPES = {"aten::squeeze_", "aten::squeeze_.dim", "aten::unsqueeze_", "aten::t_", "aten::transpose_"}
COUNTS_CHANGES = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # of tensors; a replay counts none


class Place(NamedTuple):
    """A tensor by the number of its memory; memory of the recording's own is numbered."""

    memory: int
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Memory:
    """Memory that was allocated in the recording. `weak`: torch's weak reference to it."""

    size: int
    weak: Any
    first: int  # the calls that write it first and use it last
    last: int


@dataclass
class Call:
    function: Callable[..., Any]
    leaves: list[Any]  # of arguments; tensors are Places, or the tensors themselves if the recording found them
    form: Any
    outputs: list[Any] = field(default_factory=list)  # Places to which results are written or copied
    copies: bool = False


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.memories: list[Memory] = []
        self.number_of: dict[int, int] = {}  # by torch's address of a storage
        self.obstacle = ""  # why the step cannot be replayed; it goes on
        self.is_whole = False  # inside a function that is one entry
        self.thread = get_ident()

    def stop(self, obstacle: str) -> None:
        """End the recording; the step goes on."""
        self.obstacle = obstacle
        self.calls = []

    def note_list(self) -> None:
        """A tensor becomes a list, which is no op: this thread's step depends on values."""
        if get_ident() == self.thread and not self.is_whole:
            self.stop("a list of a tensor's values is read on the host")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.obstacle:
            return func(*args, **kwargs)
        if reads_on_host(func, args):
            self.stop(f"{func.name()} reads or makes a value on the host")
        given = storages_in((args, kwargs))
        results = func(*args, **kwargs)
        made, _ = tree_flatten(results)
        tensors = [x for x in made if isinstance(x, Tensor)]
        fresh = [x for x in tensors if address_of(x) not in given]
        for x in fresh:
            self.note_memory(x)
        if func.name() in WITHOUT_VALUES | OF_SHAPES:
            return results
        if func._schema.is_mutable:
            self.note_call(func, (args, kwargs))
        elif fresh:
            self.note_result(func, args, kwargs, tensors)
        return results

    def note_result(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        """An op with new results: the op's form that writes to given memory, or the op and copies of its results."""
        out = out_form(func)
        if out is None:
            self.note_call(func, (args, kwargs))
            call = self.calls[-1]
            call.outputs = [self.place_of(x) for x in tensors]
            call.copies = True
            return
        names = out_names(out)
        into = dict(zip(names, tensors, strict=True))
        known = argument_names(out)
        kept = {name: value for name, value in kwargs.items() if name in known}
        self.note_call(out, (args, kept | into))

    def note_call(self, function: Callable[..., Any], arguments: Any) -> None:
        leaves, form = tree_flatten(arguments)
        places = [self.place_of(x) if isinstance(x, Tensor) else x for x in leaves]
        call = Call(function, places, form)
        self.calls.append(call)

    def note_memory(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        number = len(self.memories)
        self.number_of[address] = number
        if number == MOST_MEMORIES:
            self.stop(f"a step of more than {MOST_MEMORIES} results is not bound by the host")
        now = len(self.calls)
        memory = Memory(storage.nbytes(), storage._weak_ref(), now, now)
        self.memories.append(memory)

    def place_of(self, x: Tensor) -> Place | Tensor:
        """The place of a tensor; or the tensor itself, if the recording has found it."""
        number = self.number_of.get(address_of(x))
        if number is None:
            return x.detach()
        self.memories[number].last = len(self.calls)
        return Place(number, int(x.storage_offset()), x.shape, x.stride(), x.dtype)

    def call_whole(self, function: WritingFunction, args: tuple[Any, ...]) -> None:
        with _disable_current_modes(), torch.no_grad():
            self.note_call(function, (args, {}))
            self.is_whole = True
            function(*args)
            self.is_whole = False


def reads_on_host(func: Any, args: Any) -> bool:
    name = func.name()
    if name in INDEXED:
        return any_flags(args[1])
    return name in HOST_READS


def any_flags(indices: Sequence[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def address_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def storages_in(arguments: Any) -> set[int]:
    leaves, _ = tree_flatten(arguments)
    return {address_of(x) for x in leaves if isinstance(x, Tensor)}


@cache
def out_form(func: Any) -> Any | None:
    """The overload of an op that writes its results to given tensors."""
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    returns = len(func._schema.returns)
    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [a for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        is_subset = [pair for pair in wanted if pair in rest] == rest
        if outs and len(outs) == returns and is_subset and covers(wanted, rest):
            return overload
    return None


ONLY_OF_NEW_TENSORS = {"dtype", "layout", "device", "pin_memory"}  # given memory has these already


def covers(wanted: list[tuple[str, str]], rest: list[tuple[str, str]]) -> bool:
    """Whether an overload takes all arguments but those that describe new tensors."""
    missing = {name for name, kind in wanted if (name, kind) not in rest}
    return missing <= ONLY_OF_NEW_TENSORS


@cache
def out_names(overload: Any) -> list[str]:
    return [a.name for a in overload._schema.arguments if a.is_out]


@cache
def argument_names(overload: Any) -> set[str]:
    return {a.name for a in overload._schema.arguments}


Prepared = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class PlannedCall(NamedTuple):
    """A call on tensors at fixed addresses. `outputs`: tensors that results are copied to; None: it writes them."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor] | None = None

    def prepared(self) -> Prepared:
        function = getattr(self.function, "_op", self.function)  # an overload's own function, without its wrapper
        if self.outputs is not None:
            function = partial(copy_results, function, self.outputs)
        return function, self.args, self.kwargs


class Plan:
    """The calls of a tape on tensors at fixed addresses. `rest`: calls for which memory that was freed is left alone,
    so that calls may change their order."""

    def __init__(self, tape: Tape, rest: int = 0):
        for memory in tape.memories:
            memory.last += rest
        self.storages = living_storages(tape.memories)
        offsets, size = arena_offsets(tape.memories, self.storages)
        arena = torch.empty(size, dtype=torch.uint8)
        self.arena = arena.untyped_storage()
        self.offsets = offsets
        self.tensors: dict[Place, Tensor] = {}
        self.calls = [self.planned(call) for call in tape.calls]
        self.prepared = [call.prepared() for call in self.calls]

    def planned(self, call: Call) -> PlannedCall:
        leaves = [self.at(x) if isinstance(x, Place) else x for x in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.form)
        outputs = [self.at(x) for x in call.outputs] if call.copies else None
        return PlannedCall(call.function, tuple(args), dict(kwargs), outputs)

    def at(self, place: Place) -> Tensor:
        known = self.tensors.get(place)
        if known is not None:
            return known
        number, offset, shape, strides, dtype = place
        storage = self.storages.get(number)
        if storage is None:
            storage = self.arena
            offset += self.offsets[number] // dtype.itemsize
        x = torch.empty(0, dtype=dtype)
        x.set_(storage, offset, shape, strides)
        self.tensors[place] = x
        return x

    def replay(self) -> None:
        run_calls(self.prepared)


def run_calls(calls: Iterable[Prepared]) -> None:
    with without_autograd():
        for function, args, kwargs in calls:
            function(*args, **kwargs)


@contextmanager
def without_autograd() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(COUNTS_CHANGES):
        yield


def copy_results(function: Callable[..., Any], outputs: list[Tensor], *args: Any, **kwargs: Any) -> None:
    results, _ = tree_flatten(function(*args, **kwargs))
    tensors = (x for x in results if isinstance(x, Tensor))
    for output, result in zip(outputs, tensors, strict=True):
        output.copy_(result)


def living_storages(memories: list[Memory]) -> dict[int, torch.UntypedStorage]:
    """Memory that outlives the recorded step, by number."""
    gc.collect()
    living: dict[int, torch.UntypedStorage] = {}
    for number, memory in enumerate(memories):
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.weak)
        if storage is not None:
            living[number] = storage
        torch.UntypedStorage._free_weak_ref(memory.weak)
    return living


def arena_offsets(memories: list[Memory], living: dict[int, Any]) -> tuple[dict[int, int], int]:
    """Where each freed memory lies in the arena, in bytes, and the arena's size: the lowest place that is free as long
    as the memory is used; large memory chooses first."""
    numbers = [number for number in range(len(memories)) if number not in living]
    numbers.sort(key=lambda number: -memories[number].size)
    placed: list[tuple[int, int, Memory]] = []  # begin, end, by begin
    offsets: dict[int, int] = {}
    size = 0
    for number in numbers:
        memory = memories[number]
        wanted = -(-max(memory.size, 1) // ALIGNMENT) * ALIGNMENT
        begin = lowest_free_place(placed, memory, wanted)
        offsets[number] = begin
        placed.append((begin, begin + wanted, memory))
        placed.sort(key=lambda entry: entry[0])
        size = max(size, begin + wanted)
    return offsets, size


def lowest_free_place(placed: list[tuple[int, int, Memory]], memory: Memory, wanted: int) -> int:
    begin = 0
    for other_begin, other_end, other in placed:
        if other.last < memory.first or memory.last < other.first:
            continue
        if other_begin - begin >= wanted:
            return begin
        begin = max(begin, other_end)
    return begin


class TapeRecorder:
    """Records a step on a CPU. What it records has run: the replay that follows the recording is left out."""

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def record(self, work: Callable[[], T]) -> tuple[T, Replay | str]:
        tape = Tape()
        with open_tape(tape):
            result = work()
        replay_plan = self.replay_of(tape)
        if tape.obstacle:
            return result, tape.obstacle
        has_run = True

        def replay() -> None:
            nonlocal has_run
            if not has_run:
                replay_plan()
            has_run = False

        return result, replay

    def replay_of(self, tape: Tape) -> Replay:
        return Plan(tape).replay


@contextmanager
def open_tape(tape: Tape) -> Iterator[None]:
    """Record ops, and notice where lists are made of tensors."""
    read_list = Tensor.tolist

    def noticed_list(x: Tensor) -> Any:
        tape.note_list()
        return read_list(x)

    OPEN_TAPES.append(tape)
    Tensor.tolist = noticed_list  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with tape:
            yield
    finally:
        Tensor.tolist = read_list
        OPEN_TAPES.pop()
