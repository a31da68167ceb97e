"""What the planner's page offers: models, GPUs and choices, each with the words that explain it."""

from __future__ import annotations

from typing import Any

from moefold.anatomy.counts import active_parameters, total_parameters
from moefold.config.keys import Key, keys_of
from moefold.plan.answer import WALLS
from moefold.plan.choices import REGIONS, Choices
from moefold.plan.hardware import find_gpu, known_gpus
from moefold.plan.request import SHORT
from moefold.presets.zoo import PRESETS

EXPLAINED = ("tp", "cp", "pp", "ep", "etp")  # keys of parallel
PICKED = ("sharding", "graphs")  # keys of Choices with a few values


def offer() -> dict[str, Any]:
    keys = {key.path: key for key in (*keys_of(PRESETS["tiny"]()), *keys_of(Choices()))}
    names = {**{name: name for name in PICKED}, **{f"parallel.{name}": f"parallel.{name}" for name in EXPLAINED}}
    names |= {"pipeline.vpp": "pipeline.vpp", "pipeline.schedule": "pipeline.schedule", **SHORT}
    return {
        "models": [model(name) for name in PRESETS if not name.endswith("-tiny")],
        "gpus": [gpu(name) for name in known_gpus()],
        "regions": REGIONS,
        "walls": WALLS,
        "keys": {name: explained(keys[path]) for name, path in names.items()},
    }


def explained(key: Key) -> dict[str, Any]:
    return {"doc": key.doc, "choices": list(key.choices)}


def model(name: str) -> dict[str, Any]:
    config = PRESETS[name]().model
    return {"name": name, "parameters": total_parameters(config), "active": active_parameters(config)}


def gpu(name: str) -> dict[str, Any]:
    known = find_gpu(name)
    return {
        "name": name,
        "about": f"{known.memory:.0f} GiB, {known.domain} by NVLink, ${known.dollars:g}/h",
        "precisions": known.precisions,
        "origin": known.origin,
    }
