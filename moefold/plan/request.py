"""Requests to the planner: options of the command line and of the page, read into a configuration on a cluster.

    {"model": "deepseek-v3", "gpus": 256, "gpu": "gb200", "precision": "mxfp8", "parallel.pp": 4, "recompute": "mlp"}

Keys with a dot are keys of a run's configuration. The other keys are the short forms below and those of `PlanChoices`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moefold.config.errors import UserError, did_you_mean, printable_text
from moefold.config.keys import iterate_keys
from moefold.config.memory_regions import entries_of_regions
from moefold.config.read import BOOLEAN_WORDS, convert_value, printable_value, with_values
from moefold.config.run import Config
from moefold.dispatch import price
from moefold.plan.layer.layer_recipes import quantises_products
from moefold.plan.layer.moefold_layers import HOPPER_CAPABILITY
from moefold.plan.machine.cluster import Cluster
from moefold.plan.machine.gpu import PEAK_BY_PRECISION, Gpu, check_precision, find_gpu_by_name
from moefold.plan.memory.run_setting import check_product_recipes
from moefold.plan.options import PlanChoices
from moefold.presets.recipe import recipe_base

SHORT_KEYS = {
    "seq": "data.seq_len",
    "mbs": "train.micro_batch",
    "gbs": "train.global_batch",
    "dispatcher": "parallel.dispatcher",
    "overlap": "pipeline.pair",
}
VALUE_ALIASES = {  # names in other trainers
    "parallel.dispatcher": {"alltoall": "all_to_all", "hybridep": "deepep"},
    "graphs": {"off": "none", "partial": "static", "full": "whole"},
    "precision": {
        "fp8-blk": "fp8-blockwise",
        "blockwise": "fp8-blockwise",
        "fp8-mx": "mxfp8",
        "fp8-cs": "fp8",
    },
}
REQUEST_KEYS = ("model", "gpu", "gpus", "search", "tokens", "best", "explain")
CHOICE_KEYS = tuple(key.path for key in iterate_keys(PlanChoices()))
SEQUENCES_PER_GPU = 8  # of the global batch, where neither the user nor the recipe sets it
LAYOUT_SECTIONS = ("parallel.", "pipeline.")
MOST_GPUS = 1_000_000
MOST_LAYOUTS = 100  # that a search returns
WHOLE_NUMBER_DIGITS = 12

RawRequest = Mapping[str, Any]


@dataclass(frozen=True)
class PlanRequest:
    """A request, read and checked. `fixed`: keys that a search does not change."""

    config: Config
    choices: PlanChoices
    gpu: Gpu
    gpus: int
    fixed: frozenset[str]
    search: bool
    tokens: float
    best: int
    explain: bool


def read_request(raw: RawRequest) -> PlanRequest:
    """The request that a mapping describes; all its problems are refused at once."""
    given = with_full_names(raw)
    gpus = read_whole_number(given.get("gpus", 8), "gpus", MOST_GPUS)
    gpu = find_gpu_by_name(str(given.get("gpu", "h100")))
    problems: dict[str, str] = {}
    choices = read_plan_choices(given, problems)
    name = str(given.get("model", "tiny"))
    config = recipe_base(name, problems)
    config_keys = [key for key in given if "." in key]
    config_values = {key: given[key] for key in config_keys}
    config = with_values(config, config_values, problems)
    report_unknown_options(given, problems)
    if problems:
        raise UserError(*problems.values())

    # Values that neither the user nor the recipe sets follow from the cluster.
    if "train.global_batch" not in given and config.train.global_batch < gpus:
        train = replace(config.train, global_batch=SEQUENCES_PER_GPU * gpus)
        config = replace(config, train=train)
    check_precision(gpu, choices.precision)
    check_product_recipes(config, choices)
    check_lengths(config, choices)
    check_recipe_kernels(config, gpu)
    if "capability" not in given:
        choices = replace(choices, capability=gpu.capability)
    node = min(gpu.domain, gpus)
    choices = replace(choices, node=node)
    choices = with_configured_regions(config, choices, "recompute")
    choices = with_configured_regions(config, choices, "offload")
    if "graphs" not in given:
        choices = replace(choices, graphs=config.memory.graphs)
    fixed = set(config_values)
    if "recompute" in given or "memory.recompute" in given:
        fixed.add("recompute")
    gives_layout = any(key.startswith(LAYOUT_SECTIONS) for key in config_values)
    return PlanRequest(
        config=config,
        choices=choices,
        gpu=gpu,
        gpus=gpus,
        fixed=frozenset(fixed),
        search=flag_is_set(given, "search") or not gives_layout,
        tokens=read_positive_number(given.get("tokens", 1e12), "tokens"),
        best=read_whole_number(given.get("best", 10), "best", MOST_LAYOUTS),
        explain=flag_is_set(given, "explain"),
    )


def with_configured_regions(config: Config, choices: PlanChoices, what: str) -> PlanChoices:
    """The choices with the regions that `memory.recompute` or `memory.offload` names, if it names any."""
    configured: tuple[str, ...] = entries_of_regions(getattr(config.memory, what))
    chosen: tuple[str, ...] = getattr(choices, what)
    if not configured or chosen == configured:
        return choices
    if chosen:
        both = f"--{what} {','.join(chosen)} and --memory.{what} {','.join(configured)}"
        raise UserError(f"{both} name different regions; leave one of them out")
    return replace(choices, **{what: configured})


def check_lengths(config: Config, choices: PlanChoices) -> None:
    """Refuse lengths of documents where tokens attend to whole sequences, of any number of documents."""
    if choices.lengths and config.data.attend != "document":
        lengths = ",".join(choices.lengths)
        raise UserError(
            f"lengths = {lengths} with data.attend = {config.data.attend}: tokens attend to whole sequences, whatever "
            "documents they are of; add --data.attend document, or leave out the lengths"
        )


def check_recipe_kernels(config: Config, gpu: Gpu) -> None:
    """Refuse FP8 recipes on GPUs without kernels for them: the references are no basis of a plan."""
    if not quantises_products(config.precision) or gpu.capability == HOPPER_CAPABILITY:
        return
    recipe = f"precision.recipe = {config.precision.recipe}"
    advice = f"set --precision.recipe plain with --precision {gpu.precisions[-1]}, or a Hopper GPU such as --gpu h200"
    raise UserError(f"{recipe} has kernels for Hopper only, and {gpu.name} is another; {advice}")


def with_full_names(raw: RawRequest) -> dict[str, Any]:
    """The request with short keys and other trainers' values replaced, and without empty entries."""
    given: dict[str, Any] = {}
    for key, value in raw.items():
        if value is not None:
            given[SHORT_KEYS.get(key, key)] = value
    for key, aliases in VALUE_ALIASES.items():
        value = given.get(key)
        if isinstance(value, str):
            lower = value.lower()
            given[key] = aliases.get(lower, value)
    return given


def report_unknown_options(given: RawRequest, problems: dict[str, str]) -> None:
    known = [*REQUEST_KEYS, *SHORT_KEYS, *CHOICE_KEYS]
    plain_keys = {key for key in given if "." not in key}
    unknown = plain_keys - {*REQUEST_KEYS, *CHOICE_KEYS}
    for key in unknown:
        shown = printable_text(key)
        problems[key] = f'no option "{shown}"{did_you_mean(key, known)}; there are: {", ".join(known)}'


def read_plan_choices(given: RawRequest, problems: dict[str, str]) -> PlanChoices:
    """The keys of `PlanChoices` among those given."""
    values: dict[str, Any] = {}
    report_unknown_precision(given, problems)
    for key in iterate_keys(PlanChoices()):
        if key.path not in given or key.path in problems:
            continue
        value = given[key.path]
        try:
            values[key.path] = convert_value(key, value)
        except (ValueError, TypeError, OverflowError):
            shown = printable_value(value)
            problems[key.path] = f"{key.path} = {shown} is not legal; expected {key.expected_values}"
    try:
        return PlanChoices(**values)
    except UserError as refused:
        problems["choices"] = "\n".join(refused.problems)
        return PlanChoices()


def report_unknown_precision(given: RawRequest, problems: dict[str, str]) -> None:
    precision = given.get("precision", "bf16")
    if precision in (*PEAK_BY_PRECISION, "fp32"):
        return
    name = str(precision)
    known = ", ".join(PEAK_BY_PRECISION)
    guess = did_you_mean(name, PEAK_BY_PRECISION)
    problems["precision"] = f'no precision "{printable_text(name)}"{guess}; there are: {known}'


def flag_is_set(given: RawRequest, name: str) -> bool:
    value = given.get(name, False)
    if isinstance(value, str):
        return BOOLEAN_WORDS.get(value.lower(), False)
    return bool(value)


def read_whole_number(raw: Any, name: str, most: int) -> int:
    text = str(raw).replace("_", "")
    is_number = text.isascii() and text.isdigit()
    digits = text.lstrip("0")
    is_short = 1 <= len(digits) <= WHOLE_NUMBER_DIGITS
    if not is_number or not is_short or int(digits) > most:
        expected = f"expected a whole number from 1 to {most}, such as 8"
        raise UserError(f"{name} = {printable_value(raw)} is not legal; {expected}")
    return int(digits)


def read_positive_number(raw: Any, name: str) -> float:
    try:
        value = float(raw)
    except (TypeError, ValueError):
        value = -1.0
    if not 0 < value < 1e20:
        raise UserError(f"{name} = {printable_value(raw)} is not legal; expected a number above 0, such as 1e12")
    return value


def with_dispatcher(config: Config, choices: PlanChoices, gpu: Gpu, gpus: int) -> tuple[Config, str]:
    """The configuration with the dispatcher of least predicted time on this cluster, and the reason."""
    cluster = Cluster(gpu, gpus)
    element = int(choices.recipe.wide)
    links = cluster.link_bandwidths
    domain = cluster.domain
    name, reason = price.cheapest_dispatcher(config, domain, element, links)
    if name == "local":
        return config, reason
    parallel = replace(config.parallel, dispatcher=name)  # pyright: ignore[reportArgumentType]
    return replace(config, parallel=parallel), f"{name}: {reason}"
