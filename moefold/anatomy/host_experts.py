"""Routed experts whose frozen weights lie on the host (`memory.offload expert_weights`): which layers, how many bytes.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moefold.anatomy.adapters import is_grouped
from moefold.anatomy.products import ProductSpec, model_products, product_weights
from moefold.anatomy.step_specs import is_moe_layer
from moefold.config.base_formats import BASE_FORMATS
from moefold.config.errors import UserError
from moefold.config.memory_regions import EXPERT_WEIGHTS, expert_weight_layers, ranges_in_words
from moefold.config.optimizer_groups import first_match, parse_groups
from moefold.config.run import Config, ModelConfig


class HostExperts(NamedTuple):
    """The experts of a layer: the names of their products, and the bytes of their weights on one rank."""

    layer: int
    products: tuple[str, ...]
    bytes: float


def experts_on_host(config: Config, wide: float = 2.0) -> list[HostExperts]:
    """Of a rank that has all layers, in their order. `wide`: bytes of a weight in the model's precision. Layers without
    experts are left out; named alone they are refused, and so are experts that are trained."""
    model = config.model
    named = expert_weight_layers(config.memory.offload, model.layers + model.mtp)
    if not named:
        return []
    layers = sorted(layer for layer in named if is_moe_layer(model, layer))
    if not layers:
        asked = f"memory.offload: no layer of {ranges_in_words(named)} has routed experts"
        raise UserError(f"{asked}; name other layers, or leave out {EXPERT_WEIGHTS}")
    refuse_trained_experts(config, layers)
    return [experts_of_layer(config, layer, wide) for layer in layers]


def experts_of_layer(config: Config, layer: int, wide: float) -> HostExperts:
    names: list[str] = []
    size = 0.0
    for product in grouped_products(config, layer):
        names.append(product.name)
        matrices = config.model.moe.experts // config.parallel.ep
        size += matrices * product.outputs * row_bytes(config, product.inputs, wide)
    return HostExperts(layer, tuple(names), size)


def grouped_products(config: Config, layer: int) -> Iterator[ProductSpec]:
    prefix = prefix_of_layer(config.model, layer)
    for product in model_products(config.model, config.parallel):
        if product.prefix == prefix and is_grouped(product):
            yield product


def prefix_of_layer(model: ModelConfig, layer: int) -> str:
    """Of the names of a layer's parameters; layers of multi-token prediction are numbered behind the others."""
    depth = layer - model.layers
    return f"blocks.{layer}." if depth < 0 else f"ahead.{depth}.block."


def row_bytes(config: Config, inputs: int, wide: float) -> float:
    format = BASE_FORMATS.get(config.lora.base)
    return inputs * wide if format is None else format.row_bytes(inputs, wide)


def refuse_trained_experts(config: Config, layers: list[int]) -> None:
    """Adapters leave all weights frozen; otherwise `optim.groups` must freeze both matrices of every expert."""
    if config.lora.rank:
        return
    groups = parse_groups(config.optim.groups)
    prefixes = [prefix_of_layer(config.model, layer) for layer in layers]
    for prefix, weight in product_weights(config.model):
        name = prefix + weight.name
        if prefix not in prefixes or ".experts." not in name:
            continue
        group = first_match(groups, name)
        if group is None or not group.frozen:
            raise UserError(
                f"memory.offload = {EXPERT_WEIGHTS}, but {name} is trained, and only frozen weights lie on the host; "
                f'set lora.rank, or freeze it with optim.groups "*.moe.experts.*: frozen"'
            )
