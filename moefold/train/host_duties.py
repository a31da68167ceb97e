"""What the host does beside launching work: hear requests to stop, tell the other ranks, and collect its garbage when
that costs nothing."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.comm.host_copies import ToHost, integers_on_device
from moefold.layout.axes import World


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """SIGTERM and Ctrl-C ask the loop to save and leave after the step it is in; a second Ctrl-C leaves at once."""
    requests: list[str] = []

    def record_signal(number: int, _frame: object) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        requests.append(signal.Signals(number).name)

    before = {number: signal.signal(number, record_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def any_rank_asks(wishes: Sequence[object], world: World) -> ToHost:
    """Whether any rank has a wish: to be read a step later, when it is there anyway, and then the same on all."""
    return ToHost(all_reduce_max_no_grad(integers_on_device([len(wishes)], world.device), world.everyone))


@contextmanager
def collect_garbage_manually() -> Iterator[Callable[[], object]]:
    """Python looks for garbage only when the function given is called, not in the middle of launching a step. What is
    there already, a model and all modules, stays and is not looked through again."""
    before = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if before:
            gc.enable()
