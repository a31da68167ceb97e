"""What a module built from Python needs of a run: a settled configuration, its world, and the kernels for both."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from moefold.anatomy.step_specs import StepSpec
from moefold.config.errors import one_of
from moefold.config.run import Config
from moefold.kernels.catalog import pick_implementation
from moefold.layout.axes import World, single_rank_world
from moefold.layout.dtypes import DTYPES
from moefold.train.assemble import choose_kernels, resolve_auto_values

PRECISION_NAMES = {dtype: name for name, dtype in DTYPES.items()}
AXES = ("tp", "cp", "pp", "ep", "etp")
Device = str | torch.device | None


def module_config(
    config: Config, device: Device, dtype: torch.dtype | None, world: World | None
) -> tuple[Config, World]:
    """The configuration on a device in a precision, and the world; by default torch's own device and dtype, and one
    rank."""
    here = torch.get_default_device()
    if device is not None:
        here = torch.device(device)
    world = world or single_rank_world(str(here))
    wanted = dtype or torch.get_default_dtype()
    name = PRECISION_NAMES.get(wanted, str(wanted))
    precision = one_of("precision", name, ("fp32", "bf16", "fp16", "fp64"))
    sizes: dict[str, Any] = {}
    for axis in AXES:
        sizes[axis] = world.axis(axis).size
    parallel = replace(config.parallel, **sizes)
    train: Any = replace(config.train, precision=precision)
    placed = replace(config, train=train, parallel=parallel)
    return resolve_auto_values(placed, world), world


def describe_kernels(specs: list[StepSpec], config: Config, world: World, without: Collection[str] = ()) -> str:
    """One line for each op of these steps: the implementation that a run would call, and the reason."""
    kernels = choose_kernels(config, world)
    chosen: dict[str, tuple[str, str]] = {}
    for spec in specs:
        for op in spec.ops:
            if op not in without:
                forced = kernels.forced.get(op)
                chosen[op] = pick_implementation(op, kernels.facts, forced)
    width = max(map(len, chosen), default=0)
    lines: list[str] = []
    for op, (name, reason) in chosen.items():
        lines.append(f"{op:<{width}}  {name}: {reason}")
    return "\n".join(lines)
