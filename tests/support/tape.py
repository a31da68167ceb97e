"""A tape of the ops that a function runs on the CPU: what a CUDA graph is on a GPU.

A replay runs the same ops on the same tensors, whatever Python would do now: numbers of the host are those of the
recording, results stay at their addresses, and a tensor that was replaced by another one is not followed. What a
capture refuses is refused here: a host that reads a value, a size that depends on values, a copy of host data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moefold.layout.tape_entries import OPEN_TAPES
from tests.support.host_waits import MASKED, WAITS

T = TypeVar("T")
HOST_DATA = {"aten::lift_fresh"}  # torch.tensor(values)
WITHOUT_VALUES = {"aten::empty.memory_format", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}

COUNTS_CHANGES = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # of tensors; a graph counts none


class Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_what_no_graph_has(func, args)
        outputs = func(*args, **kwargs)
        if func.name() not in WITHOUT_VALUES:
            self.calls.append((func, args, kwargs, outputs))
        return outputs

    def call_whole(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        """A function that writes to its arguments, as one entry of the tape: one kernel on a GPU, and on a CPU a
        composition that reads numbers on the host."""
        read_list = torch.Tensor.tolist
        torch.Tensor.tolist = LIST  # pyright: ignore[reportAttributeAccessIssue]
        with _disable_current_modes(), torch.no_grad():
            function(*args)
        torch.Tensor.tolist = read_list
        self.calls.append((function, args, {}, None))

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(COUNTS_CHANGES):
            for call, args, kwargs, outputs in self.calls:
                again = call(*args, **kwargs)
                for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def refuse_what_no_graph_has(func: Any, args: Any) -> None:
    name = func.name()
    waits = bool(WAITS & set(func.tags))
    if name in MASKED:
        waits = any(index is not None and index.dtype == torch.bool for index in args[1])
    assert not waits, f"{name} waits for the device"
    assert name not in HOST_DATA, "data of the host would be copied once, in the capture"


def list_for_others() -> Callable[[Tensor], Any]:
    """`tolist` that refuses this thread alone: others may go on beside a capture."""
    own = threading.get_ident()

    def read_unless_captured(x: Tensor) -> Any:
        assert threading.get_ident() != own, "tolist waits for the device"
        return LIST(x)

    return read_unless_captured


class TapeRecorder:
    """A recorder on the CPU. Work that it records has run once; a capture has not, so the replay that follows it is
    left out."""

    def __init__(self) -> None:
        self.recordings = 0

    def with_own_pool(self) -> TapeRecorder:
        return self  # nothing on a tape shares memory

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        self.recordings += 1
        tape = Tape()
        read_list = torch.Tensor.tolist
        torch.Tensor.tolist = list_for_others()  # pyright: ignore[reportAttributeAccessIssue]
        OPEN_TAPES.append(tape)
        try:
            with tape:
                result = work()
        finally:
            torch.Tensor.tolist = read_list
            OPEN_TAPES.pop()
        has_run = True

        def replay() -> None:
            nonlocal has_run
            if not has_run:
                tape.replay()
            has_run = False

        return result, replay


LIST = torch.Tensor.tolist
