"""Checkpoints saved in the background: a step waits only, at its end, for the copy of what it is about to change.

    training   | step 9 | save | forward, backward of 10 | update | step 11 ...
    saver                      | copy to the host |          ^ waits for the copy, if it is not done
                                                  | write, hash, agree with the other ranks, commit |

Where host memory has no room for whole files, the step waits until all ranks have written theirs. At most one save is
in progress; the next one waits for it. The error of a failed save is raised at the next save. `save_failures` reports
it after any step, so that all ranks stop at the same one.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.live.copy_lanes import CopyLanes
from moefold.checkpoint.live.file_passage import FilePassage
from moefold.checkpoint.live.host_window import HostWindow, Parts
from moefold.checkpoint.live.logical_tensors import LogicalTensors, TensorPart, as_tensor_part
from moefold.checkpoint.live.save import SavePlan, gather_write_plan, open_window, write_checkpoint
from moefold.config.errors import RunFailure, UserError
from moefold.layout.axes import World
from moefold.observe.printer import Printer
from moefold.watch.position import slow_phase

GLOO_TIMEOUT = timedelta(hours=2)  # how long ranks wait for the slowest to write its file

RunState = dict[str, Any]  # becomes state.json


class BackgroundSaver:
    """Saves checkpoints into one folder from a thread. The savers of all ranks communicate over a process group of
    their own, concurrently with the collectives of training. `window_bytes`: host memory that this rank's file may
    take; None: as much as it has bytes."""

    def __init__(
        self,
        checkpoints: StoragePath,
        keep: RetentionPolicy,
        world: World,
        say: Printer,
        window_bytes: int | None = None,
    ):
        self.checkpoints = checkpoints
        self.keep = keep
        self.say = say
        self.window_bytes = window_bytes
        group = make_gloo_group(world)
        own_group = replace(world.everyone, group=group)
        self.world = replace(world, everyone=own_group)
        self.prepared: tuple[SavePlan, HostWindow] | None = None
        self.thread: threading.Thread | None = None
        self.step = 0
        self.error: BaseException | None = None
        self.copied = threading.Event()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Finish the save in progress, unless the run was interrupted by hand."""
        if kind is None:
            self.wait_until_written()
        elif self.thread and not issubclass(kind, KeyboardInterrupt):
            self.thread.join()

    def begin_save(self, step: int, tensors: LogicalTensors, state: RunState) -> None:
        """Begin a checkpoint. Every rank calls this, after the same step. A plain tensor may change at once; a
        TensorPart may change after `wait_for_copy`, and no sooner."""
        if self.thread and self.thread.is_alive():
            self.say(f"step {step}: waiting for the checkpoint of step {self.step}, which is still being written")
        self.wait_until_written()
        parts = snapshot_parts(tensors)
        plan, window = self.prepare(parts)
        self.step = step
        self.copied = threading.Event()
        passage = FilePassage(window, parts, CopyLanes(self.world.device), self.copied)
        save = partial(self.write_and_commit, plan, passage, state)
        self.thread = threading.Thread(target=save, daemon=True, name="checkpoint")
        self.thread.start()

    def prepare(self, parts: Parts) -> tuple[SavePlan, HostWindow]:
        """Plan and host memory of all saves: what ranks hold does not change during a run. Every rank calls this at
        the same time; the first time it takes seconds."""
        if self.prepared is None:
            plan = gather_write_plan(parts, self.world)
            window = open_window(plan, self.world, self.window_bytes)
            self.prepared = plan, window
        return self.prepared

    def rehearse(self, tensors: LogicalTensors) -> None:
        """Prepare saves and copy once: kernels that make chunks are compiled then, and not while a step waits."""
        parts = snapshot_parts(tensors)
        _, window = self.prepare(parts)
        if self.world.device.type == "cuda":
            with FilePassage(window, parts, CopyLanes(self.world.device), threading.Event()) as passage:
                passage.wait_until_filled()

    def write_and_commit(self, plan: SavePlan, passage: FilePassage, state: RunState) -> None:
        """The body of the thread. Its error, of any kind, is kept for the training thread to raise."""
        try:
            with passage:
                write_checkpoint(self.checkpoints, self.step, plan, passage, state, self.keep, self.world, self.say)
        except BaseException as error:
            self.error = error
        finally:
            self.copied.set()  # nothing is copied any more, also where nothing was

    def wait_for_copy(self) -> None:
        """Wait until the tensors of the save in progress may change."""
        if self.thread is None or self.copied.is_set():
            return
        with nullcontext() if self.holds_file else slow_phase("checkpoint"):
            self.copied.wait()

    @property
    def holds_file(self) -> bool:
        """Whether a copy to the host needs not wait until files are written."""
        return self.prepared is None or self.prepared[1].holds_file

    def save_failures(self) -> list[str]:
        """The failure of the last save: a reason to stop, which all ranks must hear of."""
        if self.error is None:
            return []
        return [f"the checkpoint of step {self.step} failed"]

    def wait_until_written(self) -> None:
        """Wait until no save is in progress. A save that has failed is a fault of the run, which a
        restart may mend: the disk may have room again."""
        if self.thread:
            self.thread.join()
            self.thread = None
        error = self.error
        self.error = None
        if error:
            reason = error.problems[0] if isinstance(error, UserError) else error
            raise RunFailure(f"the checkpoint of step {self.step} was not written: {reason}") from error


def snapshot_parts(tensors: LogicalTensors) -> Parts:
    """Parts to be copied later; plain tensors are cloned now."""
    parts: Parts = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, TensorPart):
            parts[name] = tensor
        else:
            copied = tensor.clone()
            parts[name] = as_tensor_part(copied)
    return parts


def make_gloo_group(world: World) -> dist.ProcessGroup | None:
    """A group of all ranks over gloo: savers exchange host data, which must not wait for work on a GPU."""
    if world.size == 1:
        return None
    ranks = list(world.everyone.ranks)
    return dist.new_group(ranks, timeout=GLOO_TIMEOUT, backend="gloo")  # pyright: ignore[reportReturnType]
