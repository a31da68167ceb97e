"""Duties of the host besides launching kernels: the exchange of stop requests between ranks, and garbage collection at
a time when it delays nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moefold.comm.collectives import all_reduce_max_no_grad
from moefold.comm.host_copies import ToHost, integers_on_device
from moefold.layout.axes import World


def any_rank_asks(requests: Sequence[object], world: World, more: Sequence[int] = ()) -> ToHost:
    """Whether any rank has a request: a number that is above 0 on all ranks. Behind it are the largest of all ranks'
    `more`. It is read a step later, when it has arrived on the host without anybody waiting."""
    numbers = integers_on_device([len(requests), *more], world.device)
    return ToHost(all_reduce_max_no_grad(numbers, world.everyone))


@contextmanager
def collect_garbage_manually() -> Iterator[Callable[[], object]]:
    """Collect garbage only when the yielded function is called, not while a step is being launched. Objects that exist
    already (the model, all modules) are frozen: they are not scanned again."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield gc.collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
