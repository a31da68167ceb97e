"""Nodes of keepers on one machine: a process for each, which stands for a launcher. A keeper ends with its launcher."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moefold.checkpoint.keeper.files import KeeperAddress, ask_keeper
from moefold.config.run import CheckpointConfig
from moefold.layout.axes import World
from moefold.train.memory_checkpoints import open_kept_folder
from tests.support.launched import is_alive

IN_MEMORY = CheckpointConfig(memory_every=1, memory_gib=0.25)


@contextmanager
def idle_launcher() -> Iterator[int]:
    """The number of a process that does nothing until the block ends, or it is killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield pid
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def be_on_node(launchers: list[int], rank: int, size: int) -> None:
    """Give this process the environment of a rank whose node has the launcher of that number."""
    local_size = size // len(launchers)
    node, local_rank = divmod(rank, local_size)
    os.environ |= {
        "MOEFOLD_LAUNCHER": str(launchers[node]),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def kept_folder(world: World, launchers: list[int], said: list[str] | None = None):
    """The folder of checkpoints in memory of a rank on one of some nodes."""
    be_on_node(launchers, world.rank, world.size)
    lines: list[str] = [] if said is None else said
    folder = open_kept_folder(IN_MEMORY, world, Path("/run"), lines.append)
    assert folder is not None
    return folder


def keeper_processes(launcher: int) -> list[int]:
    """The processes that keep for a launcher."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "moefold.checkpoint.keeper.process" in words and str(launcher) in words:
            found.append(int(entry.name))
    return found


def flip_kept_bits(keeper: KeeperAddress) -> int:
    """Change a bit of each rank's file in the memory of a keeper; the number of files."""
    answer, _ = ask_keeper(keeper, {"verb": "list", "under": "/"})
    files = {name: size for name, size in answer["files"].items() if name.endswith(".safetensors")}
    for name, size in files.items():
        _, (file,) = ask_keeper(keeper, {"verb": "get", "name": name})
        flip_bit(file, size - 1)
        os.close(file)
    return len(files)


def flip_bit(file: int, place: int) -> None:
    (byte,) = os.pread(file, 1, place)
    os.pwrite(file, bytes([byte ^ 4]), place)
