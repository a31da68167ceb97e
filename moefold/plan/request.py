"""What a person asks of the planner: names of the command line and of the page become a configuration on a cluster.

    {"model": "deepseek-v3", "gpus": 256, "gpu": "gb200", "precision": "mxfp8", "parallel.pp": 4, "recompute": "mlp"}

Keys with a dot are those of a run's configuration; the others are the short forms below and the keys of `Choices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import iterate_keys
from moefold.config.read import BOOLEAN_WORDS, convert_value, printable_value, with_values
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import PEAK_BY_PRECISION, Gpu, check_precision, find_gpu_by_name
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import recipe_base

SHORT_KEYS = {
    "seq": "data.seq_len",
    "mbs": "train.micro_batch",
    "gbs": "train.global_batch",
    "dispatcher": "parallel.dispatcher",
    "overlap": "pipeline.pair",
}
VALUE_ALIASES = {  # as others say it
    "parallel.dispatcher": {"alltoall": "all_to_all", "hybridep": "deepep"},
    "graphs": {"off": "none", "partial": "static", "full": "whole"},
    "precision": {"fp8-blk": "fp8-blockwise", "blockwise": "fp8-blockwise", "fp8-mx": "mxfp8", "fp8-cs": "fp8"},
}
REQUEST_KEYS = ("model", "gpu", "gpus", "search", "tokens", "best", "explain")
SEQUENCES_PER_GPU = 8  # of a global batch for each GPU, where neither the user nor the recipe says how many
LAYOUT_SECTIONS = ("parallel.", "pipeline.")


@dataclass(frozen=True)
class PlanRequest:
    """`fixed` are the keys that a search leaves as they are."""

    config: Config
    choices: PlanChoices
    gpu: Gpu
    gpus: int
    fixed: frozenset[str]
    search: bool
    tokens: float
    best: int
    explain: bool


def read_request(raw: Mapping[str, Any]) -> PlanRequest:
    """All problems of a request at once."""
    given = {SHORT_KEYS.get(key, key): value for key, value in raw.items() if value is not None}
    for key, words in VALUE_ALIASES.items():
        if isinstance(given.get(key), str):
            given[key] = words.get(given[key].lower(), given[key])
    gpus = read_whole_number(given.get("gpus", 8), "gpus", 1_000_000)
    gpu = find_gpu_by_name(str(given.get("gpu", "h100")))
    problems: dict[str, str] = {}
    choices = read_plan_choices(given, problems)
    config = recipe_base(str(given.get("model", "tiny")), problems)
    dotted = {key: value for key, value in given.items() if "." in key}
    config = with_values(config, dotted, problems)
    for key in set(given) - set(dotted) - set(REQUEST_KEYS) - {key.path for key in iterate_keys(PlanChoices())}:
        known = [*REQUEST_KEYS, *SHORT_KEYS, *(each.path for each in iterate_keys(PlanChoices()))]
        problems[key] = f'no option "{printable_text(key)}"{did_you_mean(key, known)}; there are: {", ".join(known)}'
    if problems:
        raise UserError(*problems.values())
    if "train.global_batch" not in given and config.train.global_batch < gpus:
        config = replace(config, train=replace(config.train, global_batch=SEQUENCES_PER_GPU * gpus))
    check_precision(gpu, choices.precision)
    chip = {} if "capability" in given else {"capability": gpu.capability}
    choices = replace(choices, node=min(gpu.domain, gpus), **chip)
    return PlanRequest(
        config,
        choices,
        gpu,
        gpus,
        fixed=frozenset(key for key in given if "." in key or key == "recompute"),
        search=flag_is_set(given, "search") or not any(key.startswith(LAYOUT_SECTIONS) for key in dotted),
        tokens=read_positive_number(given.get("tokens", 1e12), "tokens"),
        best=read_whole_number(given.get("best", 10), "best", 100),
        explain=flag_is_set(given, "explain"),
    )


def read_plan_choices(given: Mapping[str, Any], problems: dict[str, str]) -> PlanChoices:
    """The keys of `Choices` among those given."""
    values: dict[str, Any] = {}
    if "precision" in given and given["precision"] not in (*PEAK_BY_PRECISION, "fp32"):
        problems["precision"] = (
            f'no precision "{printable_text(str(given["precision"]))}"{did_you_mean(str(given["precision"]), PEAK_BY_PRECISION)}; '
            f"there are: {', '.join(PEAK_BY_PRECISION)}"
        )
    for key in iterate_keys(PlanChoices()):
        if key.path in given and key.path not in problems:
            try:
                values[key.path] = convert_value(key, given[key.path])
            except (ValueError, TypeError, OverflowError):
                problems[key.path] = (
                    f"{key.path} = {printable_value(given[key.path])} is not legal; expected {key.expected_values}"
                )
    try:
        return PlanChoices(**values)
    except UserError as refused:
        problems["choices"] = "\n".join(refused.problems)
        return PlanChoices()


def flag_is_set(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    return BOOLEAN_WORDS.get(value.lower(), False) if isinstance(value, str) else bool(value)


def read_whole_number(raw: Any, name: str, most: int) -> int:
    text = str(raw).replace("_", "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= most):
        raise UserError(
            f"{name} = {printable_value(raw)} is not legal; expected a whole number from 1 to {most}, such as 8"
        )
    return int(text)


def read_positive_number(raw: Any, name: str) -> float:
    try:
        value = float(raw)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < 1e20:
        raise UserError(f"{name} = {printable_value(raw)} is not legal; expected a number above 0, such as 1e12")
    return value


def with_dispatcher(config: Config, choices: PlanChoices, gpu: Gpu, gpus: int) -> tuple[Config, str]:
    """The configuration with the dispatcher that this cluster's links choose, and why."""
    cluster = Cluster(gpu, gpus)
    name, why = price.cheapest_dispatcher(config, cluster.domain, int(choices.recipe.wide), cluster.link_bandwidths)
    if name == "local":
        return config, why
    return replace(config, parallel=replace(config.parallel, dispatcher=name)), f"{name}: {why}"  # pyright: ignore[reportArgumentType]
