"""`moefold doctor`: what this machine has and whether moefold can work here. Each check is one function."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from moefold.cli import parity
from moefold.layout.spawn import find_free_port
from moefold.presets.command_options import read_options
from moefold.version import __version__

OPTIONAL_PACKAGES = {
    "tokenizers": "Hugging Face tokenizers",
    "triton": "fast GPU kernels",
    "transformers": "comparisons",
}
REQUIRED_PACKAGES = ("torch", "numpy", "safetensors", "PyYAML", "tyro", "rich", "tensorboard")

# What each started rank does: meet the others and add up.
RANK_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo"); x = torch.ones(1); dist.all_reduce(x); assert x.item() == dist.get_world_size()
"""


@dataclass(frozen=True)
class DoctorOptions:
    """Check this machine: versions, devices, ranks that can be started, free disk. `moefold doctor parity PRESET
    --world 8 --parallel.tp 2 ...` proves a layout equal to one rank."""

    ranks: int = 2
    """How many ranks to start for the check; 0 leaves it out."""


@dataclass(frozen=True)
class Finding:
    ok: bool
    what: str


def run_command(argv: Sequence[str]) -> int:
    if argv and argv[0] == "parity":
        return parity.run_command(argv[1:])
    options, _ = read_options(DoctorOptions, argv, "doctor", config_keys=False)
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_versions,
        check_devices,
        check_disk_space,
        lambda: check_local_ranks(options.ranks),
    ]
    bad = 0
    for check in checks:
        for finding in check():
            print(f"{'ok ' if finding.ok else 'BAD'}  {finding.what}", flush=True)
            bad += not finding.ok
    print("all is well" if not bad else f"{bad} to mend")
    return 1 if bad else 0


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield Finding(good, f"Python {platform.python_version()} on {platform.machine()} (needs 3.11 or newer)")
    found = {name: installed_version(name) for name in REQUIRED_PACKAGES}
    yield Finding(True, f"moefold {__version__}, " + ", ".join(f"{n} {v}" for n, v in found.items() if v))
    for name in (n for n, v in found.items() if v is None):
        yield Finding(False, f"{name} is missing; run pip install {name}")
    have = [
        f"{name} {installed_version(name)} ({what})"
        for name, what in OPTIONAL_PACKAGES.items()
        if installed_version(name)
    ]
    lack = [f"{name} ({what})" for name, what in OPTIONAL_PACKAGES.items() if not installed_version(name)]
    yield Finding(True, f"optional: {', '.join(have) or 'none'}; not here: {', '.join(lack) or 'none'}")


def check_devices() -> Iterator[Finding]:
    import torch

    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield Finding(True, f"{os.cpu_count()} CPU cores, {pages:.0f} GiB memory")
    if not torch.cuda.is_available():
        yield Finding(True, "no CUDA device: training runs on the CPU in fp32")
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield Finding(True, f"cuda:{i} {p.name}, {p.total_memory / 2**30:.0f} GiB, capability {p.major}.{p.minor}")


def check_disk_space() -> Iterator[Finding]:
    free = shutil.disk_usage(".").free / 2**30
    yield Finding(free > 1, f"{free:.1f} GiB free here (a checkpoint of tiny takes 0.03)")


def check_local_ranks(count: int) -> Iterator[Finding]:
    """Start real processes that meet over the loopback address and exchange a number."""
    if count < 1:
        return
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(count)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    errors: list[str] = []
    for process in started:
        try:
            _, error = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            error = "no answer within 60 s"
        if process.returncode:
            errors.append(error.strip().split("\n")[-1])
    if errors:
        yield Finding(False, f"{count} ranks on {socket.gethostname()} could not meet: {errors[0]}")
    else:
        yield Finding(True, f"{count} ranks started, met over gloo and agreed")
