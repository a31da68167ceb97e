"""Checkpoints in memory: every few steps the state of the run is copied to keepers, processes that outlive the ranks,
and a run that is started again takes it from there. The disk is the last resort.

    training   | step 9 | begin | forward, backward of 10 | update | step 11 ...
    saver                       | copy to the host |         ^ waits for the copy, if it is not done
                                                   | to the keepers of this node and of the next one, hashed, commit |
                                                                                the generation before is dropped |

It is the checkpoint of the disk, written to other storage by a saver of its own (live/background_saver.py), found and
verified as any other. A keeper that fails ends checkpoints in memory, and not the run.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath

from moefold.checkpoint.format.retention import RetentionPolicy, committed_checkpoints, newest_step, step_of_folder
from moefold.checkpoint.format.storage import RemotePath, StoragePath, remove_tree
from moefold.checkpoint.format.verify import OpenedCheckpoint
from moefold.checkpoint.keeper.files import (
    COPIES,
    GENERATIONS,
    KeeperAddress,
    KeptFiles,
    greet_keeper,
    keeper_name,
    start_keeper,
)
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.load import find_checkpoint
from moefold.checkpoint.live.save import checkpoint_bytes, run_on_rank_zero
from moefold.comm.consensus import gather_results
from moefold.comm.host_objects import broadcast_object
from moefold.config.errors import RunFailure, UserError
from moefold.config.run import CheckpointConfig
from moefold.layout.axes import World
from moefold.layout.environment import Rendezvous, launcher_pid, read_environment
from moefold.observe.printer import Printer, print_nothing
from moefold.train.assemble import Run
from moefold.train.resume import begin_checkpoint, run_tensors

GIB = 2**30


def open_kept_folder(config: CheckpointConfig, world: World, out: Path, say: Printer) -> RemotePath | None:
    """The folder of the run's checkpoints in the memory of keepers, which are started where there are none; None
    without such checkpoints. Every rank calls this."""
    limit = int(config.memory_gib * GIB)
    if not config.memory_every:
        return None
    launcher = launcher_pid(os.environ)
    if launcher is None:
        say("no checkpoints in memory: nobody would start this run again; use --restarts, or torchrun")
        return None
    place = read_environment(os.environ)
    greet = partial(keeper_of_node, place, launcher, limit)
    keepers = gather_results(greet, world) or []
    found = tuple(keeper for keeper in keepers if keeper is not None)
    root = PurePosixPath(out.absolute())
    folder = broadcast_object(RemotePath(KeptFiles(found), root), world.everyone)
    say(f"checkpoints in memory: every {config.memory_every} steps, {where_copies_are(folder)}")
    return folder


def where_copies_are(folder: RemotePath) -> str:
    nodes = len(folder.files.keepers)
    if nodes < COPIES:
        return "at the keeper of this node; one node: no copy at a peer"
    return f"at the keepers of {nodes} nodes, each rank's at its own and at the next one's"


def keeper_of_node(place: Rendezvous, launcher: int, limit: int) -> KeeperAddress | None:
    """The keeper of this node, from its first rank; None from the others."""
    if place.local_rank:
        return None
    if sys.platform != "linux":
        raise UserError(f"checkpoint.memory_every needs Linux, and this is {sys.platform}; set it to 0")
    name = keeper_name(launcher)
    try:
        known = greet_keeper(name)
    except OSError:
        start_keeper(name, launcher, limit, place.size > place.local_size)
        known = greet_keeper(name)
    return KeeperAddress(name, host_for_others(place), known["port"], known["secret"])


def host_for_others(place: Rendezvous) -> str:
    """The address by which other nodes reach this one: that of its way to the meeting place; at the meeting place
    itself, where that way may be a loop, the name by which all have come there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((place.host, place.port))  # sends nothing
        own = way.getsockname()[0]
    return place.host if own.startswith("127.") else own


def require_keeper_room(run: Run, kept: RemotePath | None) -> None:
    """Refuse a run whose checkpoints in memory are larger than what a node may hold."""
    if kept is None:
        return
    whole = checkpoint_bytes(run_tensors(run), run.world)
    nodes = len(kept.files.keepers)
    needed = GENERATIONS * min(COPIES, nodes) * whole / nodes / GIB
    most = run.config.checkpoint.memory_gib
    if needed > most:
        raise UserError(
            f"checkpoints in memory need {needed:.4g} GiB on each node, and checkpoint.memory_gib = {most:g}; "
            f"set checkpoint.memory_gib to {needed:.2g} or more, or checkpoint.memory_every to 0"
        )


def find_kept(kept: RemotePath | None, own: StoragePath, world: World, say: Printer) -> OpenedCheckpoint | None:
    """The newest intact checkpoint in memory, unless the run's folder on the disk has a later one."""
    if kept is None:
        return None
    try:
        if run_on_rank_zero(partial(is_disk_later, kept, own), world, kept):
            return None
        drop = partial(kept.files.drop_damaged, kept.key)
        for name in run_on_rank_zero(drop, world, kept):
            say(f"a keeper's copy of {name} was damaged and is dropped")
        return find_checkpoint(kept, world, say)
    except UserError as problem:
        say(f"checkpoints in memory cannot be used: {problem}")
        return None


def is_disk_later(kept: RemotePath, own: StoragePath) -> bool:
    in_memory = newest_step(kept)
    return newest_step(own) > in_memory


def forget_kept(kept: RemotePath | None, step: int, world: World) -> None:
    """Remove all that keepers have of this run but the checkpoint of a step: unfinished ones, and abandoned ones."""
    if kept is not None:
        run_on_rank_zero(partial(remove_others, kept, step), world, kept)


def remove_others(kept: RemotePath, step: int) -> None:
    with suppress(OSError):  # without its keeper the first save fails, and is the last
        committed = committed_checkpoints(kept)
        for path in kept.iterdir() if kept.is_dir() else ():
            if path not in committed or step_of_folder(path) != step:
                remove_tree(path)


class MemoryCheckpoints:
    """Saves to keepers every few steps. `waited`: seconds for which training has waited since that was last taken."""

    def __init__(self, run: Run, kept: RemotePath | None, say: Printer):
        self.every = run.config.checkpoint.memory_every
        self.say = say
        self.waited = 0.0
        self.waited_in_all = 0.0
        self.began_saving: float | None = None
        self.saver: BackgroundSaver | None = None
        if kept is not None:
            self.saver = BackgroundSaver(kept, RetentionPolicy(last=1), run.world, print_nothing)
            self.saver.rehearse(run_tensors(run))  # before the first step, which a save would delay by as much
            run.before_update = partial(self.wait_for_copies, run.before_update)

    def is_due(self, step: int) -> bool:
        return self.saver is not None and step % self.every == 0

    def __enter__(self) -> MemoryCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """The save in progress is awaited: all ranks take part in it. Whether it succeeds matters no more."""
        thread = self.saver.thread if self.saver else None
        if thread and not (kind and issubclass(kind, KeyboardInterrupt)):
            thread.join()
        if kind is None and self.began_saving is not None:
            self.say(self.describe_stall(self.began_saving))

    def begin(self, run: Run) -> None:
        """Begin a save, when the one before is done. If that has failed, on all ranks alike, there are no more."""
        assert self.saver is not None
        if self.began_saving is None:
            self.began_saving = time.monotonic()
        with self.counted_wait():
            try:
                begin_checkpoint(run, self.saver)
            except RunFailure as problem:
                self.say(f"no more checkpoints in memory: {problem}")
                self.saver = None

    def wait_for_copies(self, wait_for_other: Callable[[], None]) -> None:
        """Wait until what this saver reads, and another one, may change."""
        wait_for_other()
        if self.saver is not None:
            with self.counted_wait():
                self.saver.wait_for_copy()

    @contextmanager
    def counted_wait(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - begun
            self.waited += seconds
            self.waited_in_all += seconds

    @property
    def has_saved(self) -> bool:
        return self.began_saving is not None

    def describe_stall(self, began_saving: float) -> str:
        """For how long training has waited in all, and which share of its time since the first save that is."""
        share = self.waited_in_all / (time.monotonic() - began_saving)
        return f"training waited {self.waited_in_all:.2f} s for checkpoints in memory: {share:.2%} of its time"

    def take_waited(self) -> float:
        waited = self.waited
        self.waited = 0.0
        return waited
