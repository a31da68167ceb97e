"""The mechanism of context parallelism of a run (`parallel.context`): the one that is set, or for `auto` that of least
predicted time on this machine. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.run import Config, PrecisionConfig
from moefold.kernels.facts import expected_facts, shares_sequences
from moefold.plan.machine.known_links import first_gpu_name, known_gpu
from moefold.plan.options import PlanChoices
from moefold.plan.time.cheapest_context import COMPARED_LAYERS, MECHANISMS, seconds_by_context, with_context

ANY_LAYOUT = "ring"  # runs on every layout


class ContextChoice(NamedTuple):
    """The configuration with the mechanism of its run in place of `auto`, and the reason; empty where no ranks share a
    sequence."""

    config: Config
    why: str


def choose_context(config: Config, ranks: int, device: str, node: int) -> ContextChoice:
    """`device`: cpu or cuda; `node`: ranks of a node."""
    if not shares_sequences(config):
        return ContextChoice(config, "")
    if config.parallel.context != "auto":
        return ContextChoice(config, "asked for")
    if config.model.attention.kind not in ATTENTION_NAMES.builtin:
        chosen = with_context(config, ANY_LAYOUT)
        return ContextChoice(chosen, "runs on every layout; attention of another package has no prices")
    return choose_by_time(config, ranks, device, node)


def with_expected_context(config: Config, ranks: int, node: int) -> Config:
    """The configuration with the mechanism that a run would have on this machine, read without torch."""
    facts = expected_facts(config)
    return choose_context(config, ranks, facts.device, node).config


def choose_by_time(config: Config, ranks: int, device: str, node: int) -> ContextChoice:
    gpu = known_gpu(device, first_gpu_name())
    choices = PlanChoices(node=node, device=device, capability=gpu.capability)  # pyright: ignore[reportArgumentType]
    plain = replace(config, precision=PrecisionConfig())  # the same products with every mechanism
    seconds = seconds_by_context(plain, choices, gpu, ranks)
    order = sorted(seconds, key=seconds.__getitem__)
    figures = [f"{name} {seconds[name] * 1e3:.2f}" for name in order]
    layers = min(config.model.layers, COMPARED_LAYERS)
    of_layers = "1 layer" if layers == 1 else f"{layers} layers"
    why = f"least predicted time, ms of attention in {of_layers}: {', '.join(figures)}; prices of {gpu.name}"
    unable = [name for name in MECHANISMS if name not in seconds]
    if unable:
        why += f"; heads are too few to swap for {', '.join(unable)}"
    chosen = with_context(config, order[0])
    return ContextChoice(chosen, why)
