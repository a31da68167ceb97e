"""`moefold bench save`: how fast checkpoints reach a disk, beside plain writing of as many bytes, and by how much a
save under way delays a step. Both are ratios of one run, the two sides taken in turn, so that a busy machine slows
both."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import tyro

from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.presets.command_options import read_options
from moefold.presets.recipe import resolve_recipe

if TYPE_CHECKING:
    from moefold.train.assemble import Run


@dataclass(frozen=True)
class SaveOptions:
    """Time saves: bytes a second beside plain writing on the same disk, and the delay of a step by a save under way."""

    recipe: tyro.conf.Positional[str] = "tiny"
    """The model whose steps are timed: a preset, or a YAML file; --section.key VALUE changes it."""
    out: Path | None = None
    """A folder on the disk to measure; by default that of temporary files."""
    mib: int = 1024
    """Size of the checkpoint whose writing is timed."""
    repeat: int = 5
    """How often each is timed; medians are shown."""
    json: bool = False
    """Print JSON instead of text."""


def run_command(argv: Sequence[str]) -> int:
    options, overrides = read_options(SaveOptions, argv, "bench save")
    if options.mib < 1 or options.repeat < 1:
        raise UserError("--mib and --repeat must be at least 1; such as 1024 and 5")
    config = resolve_recipe(options.recipe, overrides)
    with tempfile.TemporaryDirectory(prefix="moefold-save-", dir=options.out) as folder:
        found = {**write_bandwidth(Path(folder), options), **step_delay_by_save(Path(folder), config, options.repeat)}
    print(json.dumps(found, indent=1) if options.json else save_report_text(found))
    return 0


def save_report_text(found: dict[str, float]) -> str:
    return (
        f"plain writing  {found['plain'] / 1e6:7.0f} MB/s, synced\n"
        f"past the cache {found['direct'] / 1e6:7.0f} MB/s, synced\n"
        f"checkpoint     {found['checkpoint'] / 1e6:7.0f} MB/s, hashed and committed: "
        f"{100 * found['checkpoint'] / found['plain']:.0f} % of plain writing\n"
        f"a step         {found['step'] * 1e3:7.1f} ms\n"
        f"with a save    {found['step_with_save'] * 1e3:7.1f} ms, of {found['state_bytes'] / 1e6:.0f} MB: delayed by "
        f"{100 * (found['step_with_save'] / found['step'] - 1):.1f} %"
    )


def write_bandwidth(folder: Path, options: SaveOptions) -> dict[str, float]:
    """Bytes a second of plain writing, of writing as checkpoints are written, and of a checkpoint, in turn."""
    import torch

    from moefold.checkpoint.format.retention import RetentionPolicy
    from moefold.checkpoint.format.storage import write_synced_file
    from moefold.checkpoint.live.host_image import HostImage
    from moefold.checkpoint.live.logical_tensors import as_tensor_part
    from moefold.checkpoint.live.save import gather_write_plan, write_checkpoint
    from moefold.layout.axes import single_rank_world

    world, size, shelf = single_rank_world(), options.mib << 20, folder / "shelf"
    parts = {str(n): as_tensor_part(torch.rand(1 << 18)) for n in range(options.mib)}
    plan = gather_write_plan(parts, world)
    image = HostImage(plan, 0, pinned=False)
    image.copy_parts(parts)
    raw = image.file_bytes.numpy().data
    times: dict[str, list[float]] = {"plain": [], "direct": [], "checkpoint": []}
    for number in range(options.repeat + 1):  # the first is for warming up
        for name, write in (("plain", write_and_fsync), ("direct", write_synced_file)):
            times[name].append(wall_clock_seconds(partial(write, folder / name, raw)))
            (folder / name).unlink()
        save = partial(write_checkpoint, shelf, number, plan, image, {}, RetentionPolicy(1), world)
        times["checkpoint"].append(wall_clock_seconds(save))
        shutil.rmtree(shelf)
    return {name: size / median(each[1:]) for name, each in times.items()}


def write_and_fsync(path: Path, raw: memoryview) -> None:
    """As anybody would."""
    with path.open("wb") as file:
        for at in range(0, len(raw), 16 << 20):
            file.write(raw[at : at + (16 << 20)])
        os.fsync(file.fileno())


def wall_clock_seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def step_delay_by_save(folder: Path, config: Config, repeat: int) -> dict[str, float]:
    """Seconds of a step without a save and of one with a save begun right before it, in turn."""
    from moefold.layout.process_groups import joined_world
    from moefold.train.assemble import assemble_run
    from moefold.train.resume import begin_checkpoint, make_background_saver

    config = replace(config, observe=replace(config.observe, tensorboard=False))
    times: dict[str, list[float]] = {"step": [], "step_with_save": []}
    with joined_world(config.parallel, config.train.device) as world:
        run = assemble_run(config, world, folder / "run")
        with make_background_saver(run, lambda _: None) as saver:
            for _ in range(repeat + 1):
                times["step"].append(wall_clock_seconds(lambda: synchronized_step(run)))
                begun = time.perf_counter()
                begin_checkpoint(run, saver)
                synchronized_step(run)
                times["step_with_save"].append(time.perf_counter() - begun)
                saver.wait_until_written()
        size = saver.plan.bytes if saver.plan else 0
    return {name: median(each[1:]) for name, each in times.items()} | {"state_bytes": float(size)}


def synchronized_step(run: Run) -> None:
    """A step, and all that it asked of the device."""
    import torch

    from moefold.train.step import train_step

    train_step(run, run.loader.next_batch())
    run.parameters.await_all_buckets()
    if run.world.device.type == "cuda":
        torch.cuda.synchronize()
