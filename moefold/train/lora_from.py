"""Adapters of a folder in PEFT's format as the start of a run's adapters."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from moefold.anatomy.adapters import adapters_of_all_ranks
from moefold.checkpoint.hf.adapted_products import AdaptedProduct, adapted_products
from moefold.checkpoint.hf.adapter_folder import open_adapter_folder
from moefold.checkpoint.hf.model_folder import first_few_lines
from moefold.checkpoint.hf.read_adapter import fill_adapters
from moefold.comm.consensus import result_of_every_rank
from moefold.config.errors import UserError
from moefold.config.run import Config
from moefold.layout.axes import World
from moefold.model.transformer import Transformer
from moefold.observe.printer import Printer
from moefold.train.from_hf import WeightFiller

CLOSE = 1e-6  # of scales, which pass through texts of lora.targets


def starting_adapters(path: Path, config: Config, world: World, say: Printer) -> WeightFiller:
    """A function that fills a rank's part of the configured adapters with those of a folder."""

    def read_and_fill(model: Transformer) -> int:
        folder = open_adapter_folder(path)
        products = adapted_products(folder, config.model)
        refuse_other_adapters(path, config, products)
        fill_adapters(model, products)
        return len(products)

    def fill_from_folder(model: Transformer) -> None:
        count = result_of_every_rank(lambda: read_and_fill(model), world)
        say(f"starting from the adapters of {path}: {count} products")

    return fill_from_folder


def refuse_other_adapters(path: Path, config: Config, products: Iterable[AdaptedProduct]) -> None:
    """Refuse ranks, scales and targets that are not the folder's."""
    expected = {adapted.product.name: (adapted.rank, adapted.scale) for adapted in products}
    configured = {spec.product.name: (spec.rank, spec.scale) for spec in adapters_of_all_ranks(config)}
    problems: list[str] = []
    for name in sorted(expected.keys() | configured.keys()):
        rank, scale = expected.get(name, (0, 0.0))
        own_rank, own_scale = configured.get(name, (0, 0.0))
        if rank != own_rank or abs(scale - own_scale) > CLOSE * scale:
            theirs = f"rank {rank} and scale {scale:.6g}"
            problems.append(f"{name} has rank {own_rank} and scale {own_scale:.6g} by lora.*, {theirs} in the folder")
    if problems:
        advice = "leave lora.rank, lora.alpha, lora.rs and lora.targets out: they are the folder's"
        raise UserError(
            f"the adapters of {path} are others than those of the run; {advice}", *first_few_lines(problems)
        )
