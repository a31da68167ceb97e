"""Two lanes: compute, and communication that runs beside it. The only place that knows of threads and streams.

What is given to the comm lane runs there in order, on a thread of its own; on CUDA also on a stream of its own, and
whoever waits for a ticket makes its stream wait for the event behind it. On a CPU, gloo waits for other ranks without
holding the interpreter, so the compute lane goes on.

    compute   attend.F   experts.B | route.F  |   experts.F ...
    comm                 | combine.B |  dispatch.F |
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class Ticket:
    """Work under way on the comm lane. `result` waits for it."""

    def __init__(self, future: Future[tuple[Any, Any]]):
        self.future = future

    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        if not self.future.done():
            return False
        event = self.future.result()[1]
        return event is None or event.query()

    def result(self) -> Any:
        found, event = self.future.result()
        if event is not None:
            here = torch.cuda.current_stream()
            here.wait_event(event)
            record_on_stream(found, here)
        return found


class Lanes:
    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="comm lane")

    def send(self, work: Callable[[], Any], inputs: Any = None) -> Ticket:
        """Begin work on the comm lane; `inputs` are what it reads of the compute lane."""
        if self.stream is None:
            return Ticket(self.thread.submit(lambda: (work(), None)))
        ready = torch.cuda.current_stream().record_event()
        return Ticket(self.thread.submit(self.run_on_stream, work, inputs, ready))

    def run_on_stream(self, work: Callable[[], Any], inputs: Any, ready: Any) -> tuple[Any, Any]:
        assert self.stream is not None
        torch.cuda.set_device(self.stream.device)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(ready)
            record_on_stream(inputs, self.stream)
            return work(), self.stream.record_event()


def record_on_stream(tree: Any, stream: torch.cuda.Stream) -> None:
    """Memory of these tensors is not given to others before the stream is through with it."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)
