"""`moefold doctor`: checks of this machine's packages, devices, disk and local ranks. Each check is one function."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moefold.bench.versions import installed_version
from moefold.cli import chaos, hang, parity
from moefold.layout.spawn import find_free_port
from moefold.presets.command_form import CommandForm
from moefold.presets.command_options import read_options
from moefold.version import __version__

OPTIONAL_PACKAGES = {
    "tokenizers": "Hugging Face tokenizers",
    "triton": "fast GPU kernels",
    "transformers": "comparisons",
}
REQUIRED_PACKAGES = ("torch", "numpy", "safetensors", "PyYAML", "tyro", "rich", "tensorboard")
RANK_TIMEOUT = 60  # seconds

# The program of each started rank: join a gloo group and all-reduce. os._exit skips the interpreter's last destructors,
# in which a communication thread of torch may abort a finished rank.
RANK_SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo"); x = torch.ones(1); dist.all_reduce(x); assert x.item() == dist.get_world_size()
dist.barrier(); dist.destroy_process_group(); os._exit(0)
"""


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine: versions, devices, free disk, local ranks. `moefold doctor parity PRESET --world 8
    --parallel.tp 2 ...` proves a layout equal to one rank; `moefold doctor hang RUN` reads the report of a hang;
    `moefold doctor chaos` disturbs a small run by faults, and shows what it survives."""

    ranks: int = 2
    """How many ranks to start for the check; 0 leaves it out."""


FORM = CommandForm("doctor", DoctorOptions)


@dataclass(frozen=True)
class Finding:
    ok: bool
    text: str


def run_command(argv: Sequence[str]) -> int:
    if argv and argv[0] == "parity":
        return parity.run_command(argv[1:])
    if argv and argv[0] == "chaos":
        return chaos.run_command(argv[1:])
    if argv and argv[0] == "hang":
        return hang.run_command(argv[1:])
    options, _ = read_options(FORM, argv)
    failures = 0
    for finding in run_every_check(options):
        verdict = "ok " if finding.ok else "BAD"
        print(f"{verdict}  {finding.text}", flush=True)
        failures += not finding.ok
    print(f"{failures} to mend" if failures else "all is well")
    return 1 if failures else 0


def run_every_check(options: DoctorOptions) -> Iterator[Finding]:
    yield from check_versions()
    yield from check_devices()
    yield from check_disk_space()
    yield from check_local_ranks(options.ranks)


def check_versions() -> Iterator[Finding]:
    new_enough = sys.version_info >= (3, 11)
    python = f"Python {platform.python_version()} on {platform.machine()}"
    yield Finding(new_enough, f"{python} (needs 3.11 or newer)")
    versions = {name: installed_version(name) for name in REQUIRED_PACKAGES}
    pairs = versions.items()
    installed = [f"{name} {version}" for name, version in pairs if version]
    listed = ", ".join(installed)
    yield Finding(True, f"moefold {__version__}, {listed}")
    for name, version in versions.items():
        if version is None:
            yield Finding(False, f"{name} is missing; run pip install {name}")
    yield optional_packages()


def optional_packages() -> Finding:
    present: list[str] = []
    absent: list[str] = []
    for name, purpose in OPTIONAL_PACKAGES.items():
        if version := installed_version(name):
            present.append(f"{name} {version} ({purpose})")
        else:
            absent.append(f"{name} ({purpose})")
    return Finding(True, f"optional: {', '.join(present) or 'none'}; not here: {', '.join(absent) or 'none'}")


def check_devices() -> Iterator[Finding]:
    import torch

    pages = os.sysconf("SC_PHYS_PAGES")
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Finding(True, f"{os.cpu_count()} CPU cores, {memory:.0f} GiB memory")
    if not torch.cuda.is_available():
        yield Finding(True, "no CUDA device: training runs on the CPU in fp32")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        size = gpu.total_memory / 2**30
        yield Finding(True, f"cuda:{index} {gpu.name}, {size:.0f} GiB, capability {gpu.major}.{gpu.minor}")


def check_disk_space() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free / 2**30
    yield Finding(free > 1, f"{free:.1f} GiB free here (a checkpoint of tiny takes 0.03)")


def check_local_ranks(count: int) -> Iterator[Finding]:
    """Start processes that join a group over the loopback address and all-reduce a number."""
    if count < 1:
        return
    port = str(find_free_port())
    every_rank = range(count)
    processes = [start_rank(rank, count, port) for rank in every_rank]
    errors = [rank_error(process) for process in processes]
    errors = [error for error in errors if error]
    if errors:
        yield Finding(False, f"{count} ranks on {socket.gethostname()} could not meet: {errors[0]}")
    else:
        yield Finding(True, f"{count} ranks started, met over gloo and agreed")


def start_rank(rank: int, count: int, port: str) -> subprocess.Popen[str]:
    rendezvous = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "RANK": str(rank),
    }
    return subprocess.Popen(
        [sys.executable, "-c", RANK_SCRIPT],
        env={**os.environ, **rendezvous},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def rank_error(process: subprocess.Popen[str]) -> str:
    """The last line of a failed rank's errors; empty for a rank that succeeded."""
    try:
        _, errors = process.communicate(timeout=RANK_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"no answer within {RANK_TIMEOUT} s"
    if process.returncode == 0:
        return ""
    lines = errors.strip().split("\n")
    return lines[-1]
