"""What the planner's page offers: models, GPUs and choices, each with the words that explain it."""

from __future__ import annotations

from typing import Any

from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.config.keys import ConfigKey, iterate_keys
from moefold.plan.answer import TIME_WALLS
from moefold.plan.machine.gpu import find_gpu_by_name, known_gpu_names
from moefold.plan.options import RECOMPUTE_REGIONS, PlanChoices
from moefold.plan.request import SHORT_KEYS
from moefold.presets.zoo import PRESETS

EXPLAINED_AXES = ("tp", "cp", "pp", "ep", "etp")  # keys of parallel
PICKED_OPTIONS = ("sharding", "graphs")  # keys of Choices with a few values


def planner_page_data() -> dict[str, Any]:
    keys = {key.path: key for key in (*iterate_keys(PRESETS["tiny"]()), *iterate_keys(PlanChoices()))}
    names = {
        **{name: name for name in PICKED_OPTIONS},
        **{f"parallel.{name}": f"parallel.{name}" for name in EXPLAINED_AXES},
    }
    names |= {"pipeline.vpp": "pipeline.vpp", "pipeline.schedule": "pipeline.schedule", **SHORT_KEYS}
    return {
        "models": [describe_preset(name) for name in PRESETS if not name.endswith("-tiny")],
        "gpus": [describe_gpu(name) for name in known_gpu_names()],
        "regions": RECOMPUTE_REGIONS,
        "walls": TIME_WALLS,
        "keys": {name: explain_key(keys[path]) for name, path in names.items()},
    }


def explain_key(key: ConfigKey) -> dict[str, Any]:
    return {"doc": key.doc, "choices": list(key.choices)}


def describe_preset(name: str) -> dict[str, Any]:
    config = PRESETS[name]().model
    return {"name": name, "parameters": total_parameters(config), "active": active_parameters(config)}


def describe_gpu(name: str) -> dict[str, Any]:
    known = find_gpu_by_name(name)
    return {
        "name": name,
        "about": f"{known.memory:.0f} GiB, {known.domain} by NVLink, ${known.dollars:g}/h",
        "precisions": known.precisions,
        "origin": known.origin,
    }
