"""What a module built from Python needs of a run: a settled configuration, its world, and the kernels for both."""

from __future__ import annotations

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


def module_config(
    config: Config, device: str | torch.device | None, dtype: torch.dtype | None, world: World | None
) -> tuple[Config, World]:
    """The configuration on a device in a precision, and the world; by default torch's own device and dtype, and one
    rank."""
    device = torch.device(device) if device is not None else torch.get_default_device()
    world = world or single_rank_world(str(device))
    wanted = dtype or torch.get_default_dtype()
    precision = one_of("precision", PRECISION_NAMES.get(wanted, str(wanted)), ("fp32", "bf16", "fp64"))
    sizes = {name: world.axis(name).size for name in AXES}
    parallel = replace(config.parallel, **sizes)
    train: Any = replace(config.train, precision=precision)
    return resolve_auto_values(replace(config, train=train, parallel=parallel), world), world


def explain_kernels(
    specs: list[StepSpec], config: Config, world: World, without: tuple[str, ...] = ()
) -> dict[str, tuple[str, str]]:
    """For each op of these steps, the implementation that a run would call and the reason."""
    kernels = choose_kernels(config, world)
    ops = dict.fromkeys(op for spec in specs for op in spec.ops if op not in without)
    return {op: pick_implementation(op, kernels.facts, kernels.forced.get(op)) for op in ops}


def describe_kernels(chosen: dict[str, tuple[str, str]]) -> str:
    width = max(map(len, chosen), default=0)
    return "\n".join(f"{op:<{width}}  {name}: {reason}" for op, (name, reason) in chosen.items())
