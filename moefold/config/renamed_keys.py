"""Keys of earlier versions and their present names. Old names in YAML files, checkpoints and on the command line are
accepted; each is reported once per process, with its new name."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

Value = TypeVar("Value")

RENAMED_KEYS = {
    "model.attention.rope.sharpen": "model.attention.rope.mscale",
    "model.attention.rope.sharpen_all": "model.attention.rope.mscale_all",
    "model.moe.router": "model.moe.router.kind",
    "model.moe.looks_ahead": "model.moe.router.looks_ahead",
    "model.moe.score": "model.moe.router.score",
    "model.moe.normalize": "model.moe.router.normalize",
    "model.moe.scale": "model.moe.router.scale",
    "model.moe.groups": "model.moe.router.groups",
    "model.moe.groups_chosen": "model.moe.router.groups_chosen",
    "model.moe.group_score": "model.moe.router.group_score",
    "model.moe.jitter": "model.moe.router.jitter",
    "model.moe.force_balance": "model.moe.router.force_balance",
    "model.moe.capacity_factor": "model.moe.capacity.factor",
    "model.moe.drop": "model.moe.capacity.drop",
    "model.moe.drop_over": "model.moe.capacity.over",
    "model.moe.device_capacity": "model.moe.capacity.per_device",
    "model.moe.pad_to_capacity": "model.moe.capacity.pad",
    "model.moe.pad_rows": "model.moe.capacity.pad_rows",
    "model.moe.bias_rate": "model.moe.balance.bias_rate",
    "model.moe.bias_step": "model.moe.balance.bias_step",
    "model.moe.bias_pace": "model.moe.balance.bias_pace",
    "model.moe.aux_loss": "model.moe.balance.aux_loss",
    "model.moe.aux_over": "model.moe.balance.aux_over",
    "model.moe.device_loss": "model.moe.balance.device_loss",
    "model.moe.devices": "model.moe.balance.devices",
    "model.moe.z_loss": "model.moe.balance.z_loss",
    "optim.gradient_travel": "optim.gradient_reduce",
}


def with_new_names(values: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, str]]:
    """The values under their present names, and the given old names with their new ones. Of a key that is given under
    both names, the new name's value is kept; `keys_given_twice` finds such keys."""
    renamed = {path: RENAMED_KEYS[path] for path in values if path in RENAMED_KEYS}
    under_new_names: dict[str, Value] = {}
    for path, value in values.items():
        name = renamed.get(path, path)
        if name == path or name not in values:
            under_new_names[name] = value
    return under_new_names, renamed


def keys_given_twice(values: Mapping[str, object]) -> dict[str, str]:
    """A refusal for each old name whose new name is given too, by the old name."""
    problems: dict[str, str] = {}
    for old, new in RENAMED_KEYS.items():
        if old in values and new in values:
            problems[old] = f"{old} and {new} are both given, but {old} is the old name of {new}; leave {old} out"
    return problems


def report_renamed_keys(renamed: Mapping[str, str]) -> None:
    """One line on standard error for each old name, from rank 0 only."""
    if os.environ.get("RANK", "0") != "0":
        return
    for old, new in renamed.items():
        report_renamed_key(old, new)


@cache  # a file and the command line may both use the old name: one line is enough
def report_renamed_key(old: str, new: str) -> None:
    print(f"note: {old} is now called {new}", file=sys.stderr)
