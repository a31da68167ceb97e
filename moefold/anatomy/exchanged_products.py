"""Which dense products of a model run inside exchanges with `parallel.tiles`, by which ops, and which do not, with the
reason. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moefold.anatomy.products import model_products
from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.run import Config, ModelConfig

QUERY_KEY_VALUE = ("attention.query", "attention.key", "attention.value")
GATHERED = {"gqa": QUERY_KEY_VALUE, "mla": ()}  # by the kind of attention
OUT = "attention.out"
MLPS = ("dense.", "moe.shared.")
WHOLE = "moe.shared.gate"  # on every rank, for its own tokens
VOCABULARY = "embedding and head"
LATENTS = "latents of attention, which are narrow and read by several products"
OTHERS = "attention of another package, as it likes"


class ExchangedProducts(NamedTuple):
    """Names inside a layer, and what goes by collectives, in words."""

    gathered: list[str]
    scattered: list[str]
    apart: list[str]


class ProductsOfOp(NamedTuple):
    """Products that an op computes, and what it does beside them, in words."""

    op: str
    beside: str
    names: Sequence[str]


def products_in_exchanges(config: Config) -> tuple[list[ProductsOfOp], list[str]]:
    """The products of each op, those without any left out, and what goes by collectives, in words."""
    if "heads" in config.parallel.tiles:
        to_heads = ProductsOfOp("project_to_heads", "heads sent behind", QUERY_KEY_VALUE)
        from_heads = ProductsOfOp("project_from_heads", "heads gathered before", (OUT,))
        return [to_heads, from_heads], []
    products = exchanged_products(config)
    gathered = ProductsOfOp("multiply_gathered", "rows gathered before", products.gathered)
    scattered = ProductsOfOp("scatter_products", "sums scattered behind", products.scattered)
    return [of_op for of_op in (gathered, scattered) if of_op.names], products.apart


def exchanged_products(config: Config) -> ExchangedProducts:
    """Those over tensor-parallel ranks."""
    model = config.model
    kind = model.attention.kind
    found = {product.place for product in model_products(model, config.parallel)}
    of_mlps = {place for place in found if place.startswith(MLPS) and place != WHOLE}
    sums = {place for place in of_mlps if place.endswith(".down")}
    gathered = of_mlps - sums
    gathered.update(GATHERED.get(kind, ()))
    if kind in ATTENTION_NAMES.builtin:
        sums.add(OUT)
    return ExchangedProducts(sorted(gathered), sorted(sums), reasons_apart(model))


def reasons_apart(model: ModelConfig) -> list[str]:
    kind = model.attention.kind
    reasons: list[str] = []
    if kind == "mla":
        reasons.append(LATENTS)
    if kind not in ATTENTION_NAMES.builtin:
        reasons.append(OTHERS)
    return [*reasons, VOCABULARY]
