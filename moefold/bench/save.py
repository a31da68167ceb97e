"""`moefold bench save`: write bandwidth of checkpoints, and the delay of a training step by a save in progress.

Both are ratios measured in one run. The two sides alternate, so that a busy machine slows both.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from threading import Event
from typing import Any

import torch

from moefold.bench.clock import wall_clock_seconds
from moefold.bench.machine import synchronize_device
from moefold.bench.options import SaveOptions
from moefold.bench.report import show_report
from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.format.storage import write_synced_file
from moefold.checkpoint.live.background_saver import BackgroundSaver
from moefold.checkpoint.live.copy_lanes import CopyLanes
from moefold.checkpoint.live.file_passage import FilePassage
from moefold.checkpoint.live.logical_tensors import TensorPart, as_tensor_part
from moefold.checkpoint.live.save import gather_write_plan, open_window, write_checkpoint
from moefold.config.run import Config
from moefold.layout.axes import single_rank_world
from moefold.layout.process_groups import joined_world
from moefold.observe.printer import print_nothing
from moefold.presets.recipe import resolve_recipe
from moefold.train.assemble import Run, assemble_run
from moefold.train.resume import begin_checkpoint, make_background_saver
from moefold.train.step import take_next_step

MIB_OF_FLOATS = 1 << 18  # elements of a 1 MiB tensor in fp32
WRITE_BLOCK = 16 << 20  # bytes of one write call
Times = dict[str, list[float]]  # seconds of every repetition, by name


def run_benchmark(options: SaveOptions) -> int:
    config = resolve_recipe(options.recipe, options.overrides)
    with tempfile.TemporaryDirectory(prefix="moefold-save-", dir=options.out) as folder:
        bandwidth = write_bandwidth(Path(folder), options)
        delay = step_delay_by_save(Path(folder), config, options.repeat)
    report = bandwidth | delay
    return show_report(report, options.json, print_save_report)


def print_save_report(report: dict[str, Any]) -> None:
    plain = report["plain"]
    checkpoint = report["checkpoint"]
    step = report["step"]
    step_with_save = report["step_with_save"]
    share = 100 * checkpoint / plain
    delay = 100 * (step_with_save / step - 1)
    size = f"{report['state_bytes'] / 1e6:.0f} MB"
    print(f"plain writing  {plain / 1e6:7.0f} MB/s, synced")
    print(f"past the cache {report['direct'] / 1e6:7.0f} MB/s, synced")
    print(f"checkpoint     {checkpoint / 1e6:7.0f} MB/s, hashed and committed: {share:.0f} % of plain writing")
    print(f"a step         {step * 1e3:7.1f} ms")
    print(f"with a save    {step_with_save * 1e3:7.1f} ms, of {size}: delayed by {delay:.1f} %")


def write_bandwidth(folder: Path, options: SaveOptions) -> dict[str, float]:
    """Bytes a second of plain writing, of direct writing as checkpoints do it, and of a whole checkpoint."""
    world = single_rank_world()
    parts: dict[str, TensorPart] = {}
    for number in range(options.mib):
        tensor = torch.rand(MIB_OF_FLOATS)
        parts[str(number)] = as_tensor_part(tensor)
    plan = gather_write_plan(parts, world)
    window = open_window(plan, world, None)
    raw = window.memory.numpy().data
    shelf = folder / "shelf"
    scratch = folder / "scratch"
    writers = {"plain": write_and_fsync, "direct": write_synced_file}
    keep_one = RetentionPolicy(1)
    times: Times = defaultdict(list)
    # Plain, direct and checkpoint in turn, so that all three meet the same load of the disk.
    for number in range(options.repeat + 1):
        for name, write_file in writers.items():
            write = partial(write_file, scratch, raw)
            seconds = wall_clock_seconds(write)
            times[name].append(seconds)
            scratch.unlink()
        with FilePassage(window, parts, CopyLanes(world.device), Event()) as passage:
            passage.wait_until_filled()
            save = partial(write_checkpoint, shelf, number, plan, passage, {}, keep_one, world)
            seconds = wall_clock_seconds(save)
        times["checkpoint"].append(seconds)
        shutil.rmtree(shelf)
    size = options.mib << 20
    bandwidths: dict[str, float] = {}
    for name, seconds in medians_of(times).items():
        bandwidths[name] = size / seconds
    return bandwidths


def medians_of(times: Times) -> dict[str, float]:
    """Median seconds by name; the first repetition is a warm-up."""
    medians: dict[str, float] = {}
    for name, (_, *seconds) in times.items():
        medians[name] = median(seconds)
    return medians


def write_and_fsync(path: Path, raw: memoryview) -> None:
    """The plain way to write a file durably: through the system's cache, in blocks, then fsync."""
    with path.open("wb") as file:
        for start in range(0, len(raw), WRITE_BLOCK):
            block = raw[start : start + WRITE_BLOCK]
            file.write(block)
        os.fsync(file.fileno())


def step_delay_by_save(folder: Path, config: Config, repeat: int) -> dict[str, float]:
    """Seconds of a step without a save and of one with a save begun right before it, in turn."""
    observe = replace(config.observe, tensorboard=False)
    config = replace(config, observe=observe)
    times: Times = defaultdict(list)
    device = config.train.device
    with joined_world(config.parallel, device, config.shard) as world:
        run = assemble_run(config, world, folder / "run")
        with make_background_saver(run, print_nothing) as saver:
            take_step = partial(synchronized_step, run)
            save_and_step = partial(step_with_save, run, saver)
            for _ in range(repeat + 1):
                seconds = wall_clock_seconds(take_step)
                times["step"].append(seconds)
                seconds = wall_clock_seconds(save_and_step)
                times["step_with_save"].append(seconds)
                saver.wait_until_written()  # the next plain step runs without a save in progress
        whole = saver.prepared[0].whole if saver.prepared else None
        size = whole.bytes if whole else 0
    report = medians_of(times)
    report["state_bytes"] = float(size)
    return report


def step_with_save(run: Run, saver: BackgroundSaver) -> None:
    begin_checkpoint(run, saver)
    synchronized_step(run)


def synchronized_step(run: Run) -> None:
    """A training step, with all device work that it launched."""
    take_next_step(run)
    run.parameters.await_all_buckets()
    synchronize_device(run.world.device.type)
