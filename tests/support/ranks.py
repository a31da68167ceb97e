"""Run any function on N gloo ranks of this machine and get what each returned.

Processes are forked from a server that has torch and moefold loaded already, so that a test on four ranks costs about
a second instead of four imports of torch. The function must be at the top of a module, as for any child process.

    def add(world, x):
        return sum_(torch.full((1,), x), world.everyone).item()

    assert run_ranks(add, 4, 2.0) == [8.0] * 4
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 280.0  # seconds for a whole call, also on a busy machine, less than a test has; a rank that hangs is named
END = 60.0  # seconds for ranks to be killed in

ARRAY_TYPES = {f"torch.{name}" for name in ("float64", "float32", "int64", "int32", "int16", "uint8", "bool")}

CONTEXT = multiprocessing.get_context("forkserver")
# The last of them has all; where the server is not started in the repository's root, it finds the others alone.
CONTEXT.set_forkserver_preload(["torch.distributed.checkpoint", "moefold.train.loop", "tests.support.warm"])


def run_ranks(function: Callable[..., Any], size: int, *args: Any, **parallel: int) -> list[Any]:
    """`function(world, *args)` on every rank, in a world folded by `parallel` (tp=2, ...); results by rank."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
        answers = [writer for _, writer in pipes]
        wanted, hold = CONTEXT.Pipe(duplex=False)
        work = (function, folder, parallel, args, answers, wanted)
        parent = CONTEXT.Process(target=fork_ranks, args=work, daemon=True)
        parent.start()
        for connection in (wanted, *answers):
            connection.close()
        try:
            return collect([reader for reader, _ in pipes])
        finally:
            hold.close()
            parent.join(END)
            parent.kill()
            parent.join()


def fork_ranks(
    function: Callable[..., Any],
    folder: str,
    parallel: dict[str, int],
    args: tuple[Any, ...],
    answers: list[Connection],
    wanted: Connection,
) -> None:
    """Fork ranks from a process that has imported the function's module, once for all of them. Ranks live until the
    other end of `wanted` is closed, also by the death of its owner."""
    ranks = []
    for rank, answer in enumerate(answers):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            for other in answers[rank + 1 :]:
                other.close()
            try:
                be_rank(function, rank, len(answers), folder, parallel, args, answer)
            finally:
                os._exit(1)
        answer.close()
    wait([wanted])
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
    for rank in ranks:
        os.waitpid(rank, 0)


def run_device_ranks(function: Callable[..., Any], size: int, *args: Any, device: str, **parallel: int) -> list[Any]:
    """The same with ranks that share a device, in processes that are started anew: one that has looked for a GPU cannot
    be forked."""
    spawning = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [spawning.Pipe(duplex=False) for _ in range(size)]
        ranks = []
        for rank, (_, answer) in enumerate(pipes):
            work = (function, rank, size, folder, parallel, args, answer, device)
            ranks.append(spawning.Process(target=be_rank, args=work, daemon=True))
            ranks[-1].start()
            answer.close()
        try:
            return collect([reader for reader, _ in pipes])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join(END)


def collect(readers: list[Connection]) -> list[Any]:
    """Results in order of rank; the first failure is raised at once, since the other ranks may wait for that one."""
    results: dict[int, Any] = {}
    waiting = list(readers)
    while waiting:
        ready = wait(waiting, timeout=TIMEOUT)
        assert ready, f"ranks {[readers.index(r) for r in waiting]} gave no answer within {TIMEOUT:g} s"
        for reader in ready:
            number = readers.index(reader)  # pyright: ignore[reportArgumentType]
            waiting.remove(reader)  # pyright: ignore[reportArgumentType]
            try:
                failure, results[number] = pickle.loads(reader.recv_bytes())  # pyright: ignore[reportAttributeAccessIssue]
            except EOFError:
                failure = "it died without a word"
            assert failure is None, f"rank {number} of {len(readers)} failed: {failure}"
    return [results[number] for number in range(len(readers))]


def be_rank(
    function: Callable[..., Any],
    rank: int,
    size: int,
    folder: str,
    parallel: dict[str, int],
    args: tuple[Any, ...],
    answer: Connection,
    device: str = "cpu",
) -> None:
    import torch
    import torch.distributed as dist

    from moefold.config.run import ParallelConfig
    from moefold.layout.axes import create_world
    from moefold.layout.gloo import share_device

    torch.set_num_threads(1)
    try:
        if size > 1:
            share_device()
            store = (
                dist.FileStore(str(Path(folder) / "store"), size) if device == "cpu" else tcp_store(folder, rank, size)
            )
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
        world = create_world(rank, size, torch.device(device), ParallelConfig(**parallel))
        answer.send_bytes(pickled((None, function(world, *args))))
    except BaseException:
        answer.send_bytes(pickled((traceback.format_exc(), None)))
    signal.pause()  # until killed: a rank that leaves early closes connections that others may still be making


def tcp_store(folder: str, rank: int, size: int) -> Any:
    """A store as runs have it, for memory that is shared through it. Its port stands in a file."""
    import torch.distributed as dist

    told = Path(folder) / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        written = told.with_suffix(".new")
        written.write_text(str(store.port))
        written.rename(told)
        return store
    while not told.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(told.read_text()), size, False, wait_for_workers=False)


def pickled(value: Any) -> bytes:
    written = io.BytesIO()
    ArrayPickler(written, pickle.HIGHEST_PROTOCOL).dump(value)
    return written.getvalue()


class ArrayPickler(pickle.Pickler):
    """Tensors are written as arrays: torch's own way saves a file for each of them, 0.5 ms to write and read where an
    array takes 0.04, and traces have thousands."""

    def reducer_override(self, obj: Any) -> Any:
        import torch

        if type(obj) is not torch.Tensor or obj.requires_grad or str(obj.dtype) not in ARRAY_TYPES:
            return NotImplemented
        return torch.from_numpy, (obj.numpy(),)
