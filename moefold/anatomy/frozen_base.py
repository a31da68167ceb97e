"""The frozen base of a QLoRA run: which weights are held in blocks, and their bytes. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from moefold.anatomy.adapters import is_grouped
from moefold.anatomy.products import ProductSpec, model_products
from moefold.config.base_formats import BASE_FORMATS, BaseFormat
from moefold.config.errors import UserError
from moefold.config.run import Config, ParallelConfig


class BaseSize(NamedTuple):
    """Weights in blocks: their number, and the bytes of their blocks."""

    weights: int
    bytes: float


def base_products(config: Config) -> list[ProductSpec]:
    """Products of this rank's shapes whose weights are held in blocks: attention, dense MLPs, shared and routed
    experts, whether or not they have an adapter. Inputs that ranks share out inside a block are refused."""
    format = BASE_FORMATS.get(config.lora.base)
    if format is None:
        return []
    here = list(model_products(config.model, config.parallel))
    whole = model_products(config.model, ParallelConfig())
    problems: list[str] = []
    for product, of_all in zip(here, whole, strict=True):
        if product.is_in_scope and cuts_block(product, of_all, format):
            problems.append(
                f"{product.name} has {of_all.inputs} inputs, {product.inputs} on a rank; lora.base = {format.name} "
                f"needs multiples of {format.undivided} where ranks share them out; set parallel.tp and etp to 1"
            )
    if problems:
        raise UserError(*problems)
    return [product for product in here if product.is_in_scope]


def cuts_block(here: ProductSpec, whole: ProductSpec, format: BaseFormat) -> bool:
    is_cut = here.inputs != whole.inputs
    return is_cut and here.inputs % format.undivided != 0


def base_size(config: Config, wide: float) -> BaseSize:
    """Of one rank, as if it had all layers. `wide`: bytes of a weight in the model's precision."""
    weights = 0
    size = 0.0
    experts_here = config.model.moe.experts // config.parallel.ep
    for product in base_products(config):
        matrices = experts_here if is_grouped(product) else 1
        rows = matrices * product.outputs
        weights += rows * product.inputs
        size += rows * BASE_FORMATS[config.lora.base].row_bytes(product.inputs, wide)
    return BaseSize(weights, size)


def base_size_of_all_ranks(config: Config, wide: float) -> BaseSize:
    return base_size(replace(config, parallel=ParallelConfig()), wide)
