"""Checkpoints beside the training: a step waits for nothing but, at its end, the copy of what it is about to change.

    training   | step 9 | save | forward, backward of 10 | update | step 11 ...
    saver                      | copy to the host |          ^ waits for the copy, if it is not done
                                                  | write, hash, agree with the other ranks, commit |

One save is under way at most; the next one waits for it. What goes wrong there is raised at the next save, and `failed`
tells at the end of any step, so that all ranks stop at the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.format.write_plan import WritePlan
from moefold.checkpoint.live.host_image import HostImage
from moefold.checkpoint.live.logical_tensors import LogicalTensors, TensorPart, as_tensor_part
from moefold.checkpoint.live.save import gather_write_plan, write_checkpoint
from moefold.config.errors import RunFailure, UserError
from moefold.layout.axes import World

GLOO_TIMEOUT = timedelta(hours=2)  # ranks wait so long for the slowest to write its file


class BackgroundSaver:
    """Saves to one shelf. Its ranks agree over a process group of their own, beside the collectives of training."""

    def __init__(self, shelf: StoragePath, keep: RetentionPolicy, world: World, say: Callable[[str], None]):
        self.shelf, self.keep, self.print_message = shelf, keep, say
        self.world = replace(world, everyone=replace(world.everyone, group=make_gloo_group(world)))
        self.plan: WritePlan | None = None
        self.image: HostImage | None = None
        self.under_way: threading.Thread | None = None
        self.step, self.problem = 0, None
        self.copied = threading.Event()

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """What is under way is finished, unless somebody cannot wait."""
        if kind is None:
            self.wait()
        elif self.under_way and not issubclass(kind, KeyboardInterrupt):
            self.under_way.join()

    def save(self, step: int, tensors: LogicalTensors, state: dict[str, Any]) -> None:
        """Begin a checkpoint. What is only described may change from `await_copy` on, and no sooner; what is a plain
        tensor at once. Every rank calls this, after the same step."""
        if self.under_way and self.under_way.is_alive():
            self.print_message(
                f"step {step}: waiting for the checkpoint of step {self.step}, which is still being written"
            )
        self.wait()
        parts = {name: as_tensor_part(t if isinstance(t, TensorPart) else t.clone()) for name, t in tensors.items()}
        if self.plan is None or self.image is None:
            self.plan = gather_write_plan(parts, self.world)
            self.image = HostImage(self.plan, self.world.rank, pinned=self.world.device.type == "cuda")
        self.step, self.copied = step, threading.Event()
        ready = torch.cuda.current_stream(self.world.device).record_event() if runs_on_gpu(self.world) else None
        self.under_way = threading.Thread(
            target=self.work, args=(self.plan, self.image, parts, state, ready), daemon=True, name="checkpoint"
        )
        self.under_way.start()

    def work(
        self, plan: WritePlan, image: HostImage, parts: dict[str, TensorPart], state: dict[str, Any], ready: Any
    ) -> None:
        try:
            try:
                copy_to_host(image, parts, ready, self.world)
            finally:
                self.copied.set()
            write_checkpoint(self.shelf, self.step, plan, image, state, self.keep, self.world)
        except BaseException as error:
            self.problem = error

    def wait_for_copy(self) -> None:
        """Before anything described changes."""
        if self.under_way:
            self.copied.wait()

    def save_failures(self) -> list[str]:
        """Whether the last save went wrong: a reason to stop, for all ranks to hear of."""
        return [f"the checkpoint of step {self.step} failed"] if self.problem else []

    def wait(self) -> None:
        """Until nothing is under way. Raises what went wrong there."""
        if self.under_way:
            self.under_way.join()
            self.under_way = None
        problem, self.problem = self.problem, None
        if isinstance(problem, UserError):
            raise UserError(f"the checkpoint of step {self.step} was not written: {problem.problems[0]}")
        if problem:
            raise RunFailure(f"the checkpoint of step {self.step} was not written: {problem}") from problem


def runs_on_gpu(world: World) -> bool:
    return world.device.type == "cuda"


def make_gloo_group(world: World) -> dist.ProcessGroup | None:
    """Of all ranks, over gloo: what they tell each other lies on the host, and must not wait for work on a GPU."""
    if world.size == 1:
        return None
    return dist.new_group(list(world.everyone.ranks), timeout=GLOO_TIMEOUT, backend="gloo")  # pyright: ignore[reportReturnType]


def copy_to_host(image: HostImage, parts: dict[str, TensorPart], ready: Any, world: World) -> None:
    """Onto the host; on a GPU on a stream of its own, behind what was asked of it before the save."""
    if ready is None:
        image.fill(parts)
        return
    with torch.cuda.device(world.device), torch.cuda.stream(torch.cuda.Stream(world.device)):
        torch.cuda.current_stream().wait_event(ready)
        image.fill(parts)
