"""What a person asks of the planner: names of the command line and of the page become a configuration on a cluster.

    {"model": "deepseek-v3", "gpus": 256, "gpu": "gb200", "precision": "mxfp8", "parallel.pp": 4, "recompute": "mlp"}

Keys with a dot are those of a run's configuration; the others are the short forms below and the keys of `Choices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.keys import keys_of
from moefold.config.read import TRUTH, clip, convert, with_values
from moefold.config.refused import Refused, did_you_mean, printable
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.choices import Choices
from moefold.plan.comm import Cluster
from moefold.plan.hardware import PRECISIONS, Gpu, check_precision, find_gpu
from moefold.presets.recipe import base_of

SHORT = {
    "seq": "data.seq_len",
    "mbs": "train.micro_batch",
    "gbs": "train.global_batch",
    "dispatcher": "parallel.dispatcher",
    "overlap": "pipeline.pair",
}
OTHER_WORDS = {  # as others say it
    "parallel.dispatcher": {"alltoall": "all_to_all", "hybridep": "deepep"},
    "graphs": {"off": "none", "partial": "static", "full": "whole"},
    "precision": {"fp8-blk": "fp8-blockwise", "blockwise": "fp8-blockwise", "fp8-mx": "mxfp8", "fp8-cs": "fp8"},
}
OWN = ("model", "gpu", "gpus", "search", "tokens", "best", "explain")
SEQUENCES = 8  # of a global batch for each GPU, where neither the user nor the recipe says how many
LAYOUT = ("parallel.", "pipeline.")


@dataclass(frozen=True)
class Request:
    """`fixed` are the keys that a search leaves as they are."""

    config: Config
    choices: Choices
    gpu: Gpu
    gpus: int
    fixed: frozenset[str]
    search: bool
    tokens: float
    best: int
    explain: bool


def read_request(raw: Mapping[str, Any]) -> Request:
    """All problems of a request at once."""
    given = {SHORT.get(key, key): value for key, value in raw.items() if value is not None}
    for key, words in OTHER_WORDS.items():
        if isinstance(given.get(key), str):
            given[key] = words.get(given[key].lower(), given[key])
    gpus = whole(given.get("gpus", 8), "gpus", 1_000_000)
    gpu = find_gpu(str(given.get("gpu", "h100")))
    problems: dict[str, str] = {}
    choices = read_choices(given, problems)
    config = base_of(str(given.get("model", "tiny")), problems)
    dotted = {key: value for key, value in given.items() if "." in key}
    config = with_values(config, dotted, problems)
    for key in set(given) - set(dotted) - set(OWN) - {key.path for key in keys_of(Choices())}:
        known = [*OWN, *SHORT, *(each.path for each in keys_of(Choices()))]
        problems[key] = f'no option "{printable(key)}"{did_you_mean(key, known)}; there are: {", ".join(known)}'
    if problems:
        raise Refused(*problems.values())
    if "train.global_batch" not in given and config.train.global_batch < gpus:
        config = replace(config, train=replace(config.train, global_batch=SEQUENCES * gpus))
    check_precision(gpu, choices.precision)
    chip = {} if "capability" in given else {"capability": gpu.capability}
    choices = replace(choices, node=min(gpu.domain, gpus), **chip)
    return Request(
        config,
        choices,
        gpu,
        gpus,
        fixed=frozenset(key for key in given if "." in key or key == "recompute"),
        search=yes(given, "search") or not any(key.startswith(LAYOUT) for key in dotted),
        tokens=amount(given.get("tokens", 1e12), "tokens"),
        best=whole(given.get("best", 10), "best", 100),
        explain=yes(given, "explain"),
    )


def read_choices(given: Mapping[str, Any], problems: dict[str, str]) -> Choices:
    """The keys of `Choices` among those given."""
    values: dict[str, Any] = {}
    if "precision" in given and given["precision"] not in (*PRECISIONS, "fp32"):
        problems["precision"] = (
            f'no precision "{printable(str(given["precision"]))}"{did_you_mean(str(given["precision"]), PRECISIONS)}; '
            f"there are: {', '.join(PRECISIONS)}"
        )
    for key in keys_of(Choices()):
        if key.path in given and key.path not in problems:
            try:
                values[key.path] = convert(key, given[key.path])
            except (ValueError, TypeError, OverflowError):
                problems[key.path] = f"{key.path} = {clip(given[key.path])} is not legal; expected {key.expects}"
    try:
        return Choices(**values)
    except Refused as refused:
        problems["choices"] = "\n".join(refused.problems)
        return Choices()


def yes(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name, False)
    return TRUTH.get(value.lower(), False) if isinstance(value, str) else bool(value)


def whole(raw: Any, name: str, most: int) -> int:
    text = str(raw).replace("_", "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:12]) <= most):
        raise Refused(f"{name} = {clip(raw)} is not legal; expected a whole number from 1 to {most}, such as 8")
    return int(text)


def amount(raw: Any, name: str) -> float:
    try:
        value = float(raw)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < 1e20:
        raise Refused(f"{name} = {clip(raw)} is not legal; expected a number above 0, such as 1e12")
    return value


def with_dispatcher(config: Config, choices: Choices, gpu: Gpu, gpus: int) -> tuple[Config, str]:
    """The configuration with the dispatcher that this cluster's links choose, and why."""
    cluster = Cluster(gpu, gpus)
    name, why = price.choose(config, cluster.domain, int(choices.recipe.wide), cluster.links)
    if name == "local":
        return config, why
    return replace(config, parallel=replace(config.parallel, dispatcher=name)), f"{name}: {why}"  # pyright: ignore[reportArgumentType]
