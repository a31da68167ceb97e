"""The comm lane: communication that runs concurrently with compute. The only file that uses threads and streams for it.

Work sent to the comm lane runs there in order, on a thread of its own; on CUDA also on a stream of its own, and the
stream of whoever takes a ticket's result waits for the event behind the work. On a CPU, gloo waits for other ranks
without holding the interpreter, so the compute lane goes on.

    compute   attend.F   experts.B | route.F  |   experts.F ...
    comm                 | combine.B |  dispatch.F |
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moefold.comm.blocked_times import blocked

Work = Callable[[], Any]
LaneResult = tuple[Any, Any]  # the work's output, and the event behind it; None on a CPU


class Ticket:
    """Work in progress on the comm lane. `result` waits for it."""

    def __init__(self, future: Future[LaneResult]):
        self.future = future

    def done(self) -> bool:
        """Whether `result` would return without waiting, on the host and on the device."""
        if not self.future.done():
            return False
        _, event = self.future.result()
        return event is None or event.query()

    def result(self) -> Any:
        with blocked():
            output, event = self.future.result()
            if event is not None:
                current = torch.cuda.current_stream()
                current.wait_event(event)
                record_on_stream(output, current)
        return output

    def require_success(self) -> None:
        """Raise what the work has raised, for work behind it on the lane."""
        self.future.result()


class ThisLane(threading.local):
    """Whether this thread is a comm lane."""

    is_comm: bool = False


THIS_LANE = ThisLane()


def mark_comm_lane() -> None:
    THIS_LANE.is_comm = True


class Lanes:
    def __init__(self, device: torch.device):
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="comm lane", initializer=mark_comm_lane)

    def send(self, work: Work, inputs: Any = None) -> Ticket:
        """Begin work on the comm lane; `inputs` are the tensors of the compute lane that it reads, but for those that
        it takes itself (`keep_for_this_stream`)."""
        if self.stream is None:
            future = self.thread.submit(run_without_stream, work)
        else:
            current = torch.cuda.current_stream()
            ready = current.record_event()
            future = self.thread.submit(self.run_on_stream, work, inputs, ready)
        return Ticket(future)

    def run_on_stream(self, work: Work, inputs: Any, ready: Any) -> LaneResult:
        stream = self.stream
        assert stream is not None
        torch.cuda.set_device(stream.device)
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            record_on_stream(inputs, stream)
            output = work()
            return output, stream.record_event()


class MadeHere(NamedTuple):
    """Tensors that one lane has made and another may read. No event: on a CPU."""

    stream: Any = None
    event: Any = None

    @classmethod
    def by_current_stream(cls) -> MadeHere:
        if not torch.cuda.is_initialized():
            return cls()
        stream = torch.cuda.current_stream()
        return cls(stream, stream.record_event())

    def hand_over(self, x: Tensor) -> None:
        """Let the current stream wait for a tensor, if another one has made it."""
        if self.event is None:
            return
        current = torch.cuda.current_stream()
        if current != self.stream:
            current.wait_event(self.event)
            record_on_stream(x, current)


def run_without_stream(work: Work) -> LaneResult:
    return work(), None


def keep_for_this_stream(tree: Any) -> None:
    """Keep the memory of tensors that another lane has made, and may let go of, until this one is done with it."""
    if torch.cuda.is_initialized():
        current = torch.cuda.current_stream()
        record_on_stream(tree, current)


def record_on_stream(tree: Any, stream: torch.cuda.Stream) -> None:
    """Keep the allocator from reusing the memory of these tensors before the stream is done with it."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)
