"""Which products of a model run inside exchanges of tensor-parallel ranks with `parallel.tiles projections`, and which
do not, with the reason. Torch-free."""

from __future__ import annotations

from typing import NamedTuple

from moefold.anatomy.products import model_products
from moefold.config.open_names import ATTENTION_NAMES
from moefold.config.run import Config, ModelConfig

GATHERED = {  # by the kind of attention
    "gqa": ("attention.query", "attention.key", "attention.value"),
    "mla": (),
}
MLPS = ("dense.", "moe.shared.")
WHOLE = "moe.shared.gate"  # on every rank, for its own tokens
HEAD = "embedding and head"
LATENTS = "latents of attention, which are narrow and read by several products"
OTHERS = "attention of another package, as it likes"


class ExchangedProducts(NamedTuple):
    """Names inside a layer, and what goes by collectives, in words."""

    gathered: list[str]
    scattered: list[str]
    apart: list[str]


def exchanged_products(config: Config) -> ExchangedProducts:
    model = config.model
    kind = model.attention.kind
    found = {product.place for product in model_products(model, config.parallel)}
    of_mlps = {place for place in found if place.startswith(MLPS) and place != WHOLE}
    sums = {place for place in of_mlps if place.endswith(".down")}
    gathered = of_mlps - sums
    gathered.update(GATHERED.get(kind, ()))
    if kind in ATTENTION_NAMES.builtin:
        sums.add("attention.out")
    return ExchangedProducts(sorted(gathered), sorted(sums), reasons_apart(model))


def reasons_apart(model: ModelConfig) -> list[str]:
    kind = model.attention.kind
    reasons: list[str] = []
    if kind == "mla":
        reasons.append(LATENTS)
    if kind not in ATTENTION_NAMES.builtin:
        reasons.append(OTHERS)
    return [*reasons, HEAD]
