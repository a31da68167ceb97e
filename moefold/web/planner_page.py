"""Data of the planner's page: models, GPUs and choices, each with its explanation."""

from __future__ import annotations

from typing import Any

from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.config.keys import ConfigKey, iterate_keys
from moefold.config.memory_regions import PRESETS as RECOMPUTE_PRESETS
from moefold.plan.answer import TIME_WALLS
from moefold.plan.machine.gpu import find_gpu_by_name, known_gpu_names
from moefold.plan.options import RECOMPUTE_REGIONS, PlanChoices
from moefold.plan.request import SHORT_KEYS
from moefold.presets.zoo import PRESETS

EXPLAINED_KEYS = (
    "parallel.tp",
    "parallel.cp",
    "parallel.pp",
    "parallel.ep",
    "parallel.etp",
    "pipeline.vpp",
    "pipeline.schedule",
)
PICKED_OPTIONS = ("sharding", "graphs")  # keys of PlanChoices with a few values


def planner_page_data() -> dict[str, Any]:
    example = PRESETS["tiny"]()
    all_keys = [*iterate_keys(example), *iterate_keys(PlanChoices())]
    by_path = {key.path: key for key in all_keys}
    named = (*PICKED_OPTIONS, *EXPLAINED_KEYS)
    paths = {name: name for name in named}
    paths.update(SHORT_KEYS)
    explained: dict[str, Any] = {}
    for name, path in paths.items():
        explained[name] = explain_key(by_path[path])
    models = [name for name in PRESETS if not name.endswith("-tiny")]
    return {
        "models": [describe_preset(name) for name in models],
        "gpus": [describe_gpu(name) for name in known_gpu_names()],
        "regions": RECOMPUTE_REGIONS,
        "presets": {name: ", ".join(regions) for name, regions in RECOMPUTE_PRESETS.items()},
        "walls": TIME_WALLS,
        "keys": explained,
    }


def explain_key(key: ConfigKey) -> dict[str, Any]:
    return {"doc": key.doc, "choices": list(key.choices)}


def describe_preset(name: str) -> dict[str, Any]:
    model = PRESETS[name]().model
    return {
        "name": name,
        "parameters": total_parameters(model),
        "active": active_parameters(model),
    }


def describe_gpu(name: str) -> dict[str, Any]:
    gpu = find_gpu_by_name(name)
    return {
        "name": name,
        "about": f"{gpu.memory:.0f} GiB, {gpu.domain} by NVLink, ${gpu.dollars:g}/h",
        "precisions": gpu.precisions,
        "origin": gpu.origin,
    }
