"""Dry run: the start of a run and its recorded steps for one rank of a large world, in one process, under torch's fake
process group, which sends nothing.

    python -m tests.support.dry_run --world 4096                 ranks 0, 2048 and 4095, one process each
    python -m tests.support.dry_run --world 4096 --rank 7        this rank, in this process

Nothing is computed on the device. Everything else is the trainer's own: groups, the comparison of settings between
ranks, model and buckets, records of a step, warnings, the stop request. Printed for each rank: seconds without imports,
process groups made, peak memory of the process and its growth since the imports, bytes of host objects that reached the
rank. In the fake group a rank receives its own object from every other rank, so what is gathered has its true size.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefold.comm.byte_counters import counted_object_bytes
from moefold.comm.host_copies import DeviceTime
from moefold.config.run import Config
from moefold.layout.axes import World, create_world
from moefold.presets.zoo import PRESETS
from moefold.train.assemble import Run, assemble_run
from moefold.train.host_duties import any_rank_asks
from moefold.train.loop import (
    FIRST_STEPS,
    introduction_lines,
    no_gradient_warnings,
    open_recorder,
    require_space_for_checkpoint,
)
from moefold.train.step import StepOutputs, StepReport

NODE_SIZE = 8
ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class DryRun:
    """What the start of one rank and its recorded steps cost the host."""

    world: int
    rank: int
    seconds: float
    groups: int
    peak_mib: int
    grown_mib: int
    object_bytes: int

    def __str__(self) -> str:
        memory = f"{self.peak_mib} MiB at most, {self.grown_mib} MiB more than after the imports"
        what = f"{self.seconds:.1f} s, {self.groups} groups, {memory}, {self.object_bytes:,} bytes of objects"
        return f"rank {self.rank} of {self.world}: {what}"


def large_config(world: int) -> Config:
    """The tiny preset on all kinds of axes: tp 2, cp 2, pp 4, ep 8, and dp takes the rest of the world."""
    tiny = PRESETS["tiny"]()
    parallel = replace(tiny.parallel, tp=2, cp=2, pp=4, ep=8)
    model = replace(tiny.model, layers=8)
    data_ranks = world // (parallel.tp * parallel.cp * parallel.pp)
    batch = data_ranks * tiny.train.micro_batch * parallel.pp
    train = replace(tiny.train, global_batch=batch, device="cpu")
    return replace(tiny, model=model, parallel=parallel, train=train)


@contextmanager
def fake_world(config: Config, size: int, rank: int) -> Iterator[World]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield create_world(rank, size, torch.device("cpu"), config.parallel, NODE_SIZE)
    finally:
        dist.destroy_process_group()


def start_and_record(config: Config, world: World, out: Path) -> None:
    """What `run_training` does on the host before its first step, and what its loop does after a step."""
    run = assemble_run(config, world, out)
    require_space_for_checkpoint(run)
    introduction_lines(run)
    with open_recorder(run, continues=False) as recorder:
        for number in range(1, 1 + FIRST_STEPS):
            recorder.step_values(report_of_nothing(run, number))
            any_rank_asks([], world).read()
    no_gradient_warnings(run)


def report_of_nothing(run: Run, number: int) -> StepReport:
    """The report of a step that computed nothing: its counts went through the collectives of a real step."""
    begun = DeviceTime(run.world.device)
    numbers = torch.ones(3, dtype=torch.float64)  # loss, tokens, norm
    held = run.gradients.held()
    outputs = StepOutputs(numbers, run.model.balance(), held, None, {}, numbers[:1], None)
    return StepReport(number, 0.0, begun, outputs)


def dry_run(size: int, rank: int) -> DryRun:
    imported = peak_memory_mib()
    config = large_config(size)
    begun = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        counted_object_bytes() as held,
        fake_world(config, size, rank) as world,
    ):
        groups = len(dist.distributed_c10d._world.pg_names)  # pyright: ignore[reportPrivateUsage]
        start_and_record(config, world, Path(folder))
    seconds = time.perf_counter() - begun
    peak = peak_memory_mib()
    return DryRun(size, rank, round(seconds, 2), groups, peak, peak - imported, sum(held.values()))


def peak_memory_mib() -> int:
    return getrusage(RUSAGE_SELF).ru_maxrss >> 10


def dry_run_in_new_process(size: int, rank: int) -> DryRun:
    command = [sys.executable, "-m", "tests.support.dry_run", "--world", str(size), "--rank", str(rank), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return DryRun(**json.loads(answer.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=4096)
    parser.add_argument("--rank", type=int, help="one rank, in this process; otherwise the first, middle and last")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.rank is not None:
        found = dry_run(options.world, options.rank)
        print(json.dumps(asdict(found)) if options.json else found)
        return
    for rank in (0, options.world // 2, options.world - 1):
        print(dry_run_in_new_process(options.world, rank))


if __name__ == "__main__":
    main()
