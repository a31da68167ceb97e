"""Recompute: what a region makes is not kept between forward and backward, and its function is run again when backward
first needs it.

    in forward     a tensor that autograd saves inside a region is dropped; of its outputs, a promise is saved instead
    in backward    the first saved tensor or promise that is asked for runs the region's function again

A promise is what a consumer's backward holds in place of the region's output: nobody keeps the output, so its memory is
free once the consumers have run. The autograd graph is that of the first run, so that gradients are equal to the bit.
Inputs are kept, and an input that is an output of another rebuilt region is a promise too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from moefold.comm.lanes import MadeHere
from moefold.layout.rerun import rerun_key, rerunning
from moefold.layout.token_numbers import CURRENT, computing_tokens
from moefold.model.steps import Carry, FollowsFromFirst, Step

Function = Callable[..., Any]
Values = Sequence[Any]


class ViewForm(NamedTuple):
    """Where the elements of a tensor lie in its memory, in the order in which torch takes these."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> ViewForm:
        offset = int(x.storage_offset())
        return cls(x.size(), x.stride(), offset)


class Promise(NamedTuple):
    """A saved tensor that is an output of a region's call, or a view of one."""

    call: RegionCall
    output: int
    form: ViewForm

    def tensor(self) -> Tensor:
        output = self.call.output(self.output)
        return output.as_strided(*self.form)


class PromisedOutput(NamedTuple):
    """An output of a region's call, by the memory that it lies in."""

    memory: StorageWeakRef
    dtype: torch.dtype
    call: RegionCall
    output: int


class Promises:
    """The outputs of rebuilt regions that are still in memory, by that memory."""

    def __init__(self) -> None:
        self.outputs: dict[int, PromisedOutput] = {}

    def add(self, outputs: Values, call: RegionCall, inputs: Values) -> None:
        """Promise each output that is a tensor in memory of its own."""
        taken = {memory_of(x) for x in inputs if isinstance(x, Tensor)}
        for number, y in enumerate(outputs):
            if not isinstance(y, Tensor):
                continue
            address = memory_of(y)
            if address in taken:
                continue
            taken.add(address)
            memory = StorageWeakRef(y.untyped_storage())
            self.outputs[address] = PromisedOutput(memory, y.dtype, call, number)

    def forget_freed(self) -> None:
        present = list(self.outputs.items())
        for address, promised in present:
            if promised.memory.expired():
                self.outputs.pop(address, None)

    def withdraw(self, call: RegionCall) -> None:
        """Promise the outputs of a call no longer; promises that were made stay."""
        promised_outputs = list(self.outputs.items())
        for address, promised in promised_outputs:
            if promised.call is call:
                self.outputs.pop(address, None)

    def call_of(self, x: Tensor) -> RegionCall | None:
        """The call whose output a tensor is, if that is promised."""
        address = memory_of(x)
        promised = self.outputs.get(address)
        return promised.call if promised else None

    def promise_for(self, x: Tensor) -> Promise | None:
        # A weak reference holds the address, so no other memory has it.
        address = memory_of(x)
        promised = self.outputs.get(address)
        if promised is None or promised.dtype != x.dtype:
            return None
        form = ViewForm.of(x)
        return Promise(promised.call, promised.output, form)

    @contextmanager
    def replacing_saved_tensors(self) -> Iterator[None]:
        """What autograd saves inside is replaced by promises, where it can be; all else is saved as outside."""
        outer = SaveHooks.current()

        def pack(x: Tensor) -> Promise | SavedTensor:
            promise = self.promise_for(x)
            return promise or outer.save(x)

        with saved_tensors_hooks(pack, unpack_saved):
            yield

    def around_step(self, step: Step) -> Step:
        def run_with_promises(carry: Carry) -> Carry:
            with self.replacing_saved_tensors():
                carry = step.run(carry)
            self.forget_freed()
            return carry

        return replace(step, run=run_with_promises)


class SavedTensor(NamedTuple):
    """A tensor as autograd would save it: through the hooks that are open, if any."""

    packed: Any
    unpack: Callable[[Any], Tensor]

    def tensor(self) -> Tensor:
        return self.unpack(self.packed)


def as_it_is(x: Tensor) -> Tensor:
    return x


class SaveHooks(NamedTuple):
    """The innermost hooks on tensors that autograd saves."""

    pack: Callable[[Tensor], Any] = as_it_is
    unpack: Callable[[Any], Tensor] = as_it_is

    @classmethod
    def current(cls) -> SaveHooks:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType, reportAttributeAccessIssue]
        if hooks is None:
            return cls()
        return cls(*hooks)  # pyright: ignore[reportUnknownArgumentType]

    def save(self, x: Tensor) -> SavedTensor:
        if not x.is_leaf:
            x = x.detach()  # an output of a node would hold its node, which holds the output
        packed = self.pack(x)
        return SavedTensor(packed, self.unpack)


def unpack_saved(saved: Promise | SavedTensor) -> Tensor:
    return saved.tensor()


def memory_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType, reportAttributeAccessIssue]


class KeptInput(NamedTuple):
    """An input of a region's call, without the graph that made it."""

    saved: SavedTensor
    requires_grad: bool

    def tensor(self) -> Tensor:
        x = self.saved.tensor()
        if x.requires_grad or not self.requires_grad:
            return x
        detached = x.detach()
        return detached.requires_grad_()


def kept_inputs(inputs: Values) -> list[Any]:
    """Inputs of a region's call: tensors as `KeptInput`, all else as it is."""
    hooks = SaveHooks.current()
    kept: list[Any] = []
    for x in inputs:
        if isinstance(x, Tensor):
            saved = hooks.save(x)
            kept.append(KeptInput(saved, x.requires_grad))
        else:
            kept.append(x)
    return kept


class RegionCall:
    """One call of a region's function, which can be run again. `saved`: the tensors that autograd saves inside, in
    their order, between the second run and their use in backward."""

    def __init__(self, policy: Rebuild, fn: Function, inputs: Values):
        self.policy = policy
        self.fn = fn
        self.token_numbers = CURRENT.numbers
        self.inputs = kept_inputs(inputs)
        self.dropped = 0
        self.saved: list[Tensor | None] | None = None
        self.outputs: list[Any] | None = None
        self.made = MadeHere()  # the outputs, once they are rebuilt
        self.lock = threading.RLock()  # segments may run backward on two threads
        if NOTED_CALLS.open is not None:
            NOTED_CALLS.open.append(self)

    # ---- forward

    def run_dropping(self, inputs: Values) -> Any:
        """The first run; of what autograd saves inside, a number is saved instead."""
        with inside_call(), saved_tensors_hooks(self.drop, self.restore):
            return self.fn(*inputs)

    def drop(self, _: Tensor) -> int:
        number = self.dropped
        self.dropped += 1
        return number

    # ---- backward

    def restore(self, number: int) -> Tensor:
        with self.lock:
            if self.saved is None:
                self.run_again()
            assert self.saved is not None
            x = self.saved[number]
            self.saved[number] = None  # backward's node is its last reader
        if x is None:
            raise RuntimeError("a second backward through a recomputed region; run the forward pass again")
        return x

    def output(self, number: int) -> Tensor:
        with self.lock:
            if self.outputs is None:
                self.run_again()
            assert self.outputs is not None
            output = self.outputs[number]
            self.made.hand_over(output)
            return output

    def run_again(self) -> None:
        inputs = [x.tensor() if isinstance(x, KeptInput) else x for x in self.inputs]
        policy = self.policy
        tokens = computing_tokens(self.token_numbers)
        with tokens, rerunning(uses_expert_outputs=policy.uses_expert_outputs):
            if policy.drops_saved:
                outputs = self.run_and_capture(inputs)
            else:
                outputs = self.run_plainly(inputs)
        if policy.promises_outputs:
            every_output = as_sequence(outputs)
            self.outputs = [y.detach() if isinstance(y, Tensor) else y for y in every_output]
            self.made = MadeHere.by_current_stream()

    def begin_anew(self) -> None:
        """Free what was rebuilt, so that a second backward through the same graph rebuilds it."""
        self.saved = None
        self.outputs = None

    @torch.no_grad()
    def run_plainly(self, inputs: Values) -> Any:
        return self.fn(*inputs)

    @torch.enable_grad()
    def run_and_capture(self, inputs: Values) -> Any:
        """Run with a graph, as the first time, to learn what autograd saves. The graph itself holds nothing."""
        captured: list[Tensor | None] = []

        def capture(x: Tensor) -> None:
            captured.append(x.detach())

        with saved_tensors_hooks(capture, refuse_to_unpack):
            outputs = self.fn(*inputs)
        if len(captured) != self.dropped:
            raise RuntimeError(
                f"a recomputed region saved {len(captured)} tensors, and {self.dropped} in its first run; "
                "its function must do the same in both"
            )
        self.saved = captured
        return outputs


def refuse_to_unpack(_: Any) -> Tensor:
    raise RuntimeError("backward through the second run of a recomputed region")


def as_sequence(outputs: Any) -> Values:
    if isinstance(outputs, (tuple, list)):
        return outputs  # pyright: ignore[reportUnknownVariableType]
    return (outputs,)


class NotedCalls(threading.local):
    """The list of calls that this thread's forward adds to, if one is open."""

    open: list[RegionCall] | None = None


NOTED_CALLS = NotedCalls()


@contextmanager
def noting_calls() -> Iterator[list[RegionCall]]:
    """The calls of rebuilt regions that are made inside."""
    calls: list[RegionCall] = []
    NOTED_CALLS.open = calls
    try:
        yield calls
    finally:
        NOTED_CALLS.open = None


class InsideCall(threading.local):
    """Whether this thread runs the function of a region that keeps nothing of what is inside it."""

    active: bool = False


INSIDE_CALL = InsideCall()


@contextmanager
def inside_call() -> Iterator[None]:
    INSIDE_CALL.active = True
    try:
        yield
    finally:
        INSIDE_CALL.active = False


@dataclass(frozen=True)
class Rebuild:
    """The policy of one region. `drops_saved`: tensors saved inside are dropped; `promises_outputs`: outputs are, too.
    `uses_expert_outputs`: whether something saved inside follows from the output of routed experts."""

    promises: Promises
    drops_saved: bool
    promises_outputs: bool
    uses_expert_outputs: bool = True

    def around(self, fn: Function, *inputs: Any) -> Any:
        is_rerun = rerun_key() is not None
        if not torch.is_grad_enabled() or INSIDE_CALL.active or is_rerun:
            return fn(*inputs)
        if isinstance(fn, FollowsFromFirst) and not self.drops_saved:
            outputs = fn(*inputs)
            first = outputs[:1]
            call = RegionCall(self, fn.again, first)
            self.promise(outputs, call, first)
            return outputs
        call = RegionCall(self, fn, inputs)
        if self.drops_saved:
            outputs = call.run_dropping(inputs)
        else:
            outputs = fn(*inputs)
        if self.promises_outputs:
            self.promise(outputs, call, inputs)
        return outputs

    def promise(self, outputs: Any, call: RegionCall, inputs: Values) -> None:
        every_output = as_sequence(outputs)
        self.promises.add(every_output, call, inputs)
