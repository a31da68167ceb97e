"""Bytes of weights by class, of which a base in blocks (`lora.base`) has fewer than one in the model's precision."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import chain
from math import prod

from moefold.anatomy.products import is_in_scope
from moefold.config.base_formats import BASE_FORMATS, BaseFormat
from moefold.config.run import ModelConfig
from moefold.plan.layer.layer_costs import ParameterClass, named_weights, parameter_class
from moefold.plan.memory.rank_stages import RankStages
from moefold.plan.memory.replicas import shard_count
from moefold.plan.memory.run_setting import RunSetting

Degrees = tuple[tuple[str, int], ...]  # of the axes that cut weights
ClassBytes = Mapping[ParameterClass, float]


def weight_bytes(s: RunSetting, piece: str, layer: int) -> ClassBytes:
    """Bytes of the weights of a piece, by class."""
    saved = saved_by_blocks(s, piece, layer)
    wide = s.recipe.wide
    sizes: dict[ParameterClass, float] = {}
    count = s.count_piece(piece, layer)
    for kind, elements in count.parameters.items():
        plain = elements * wide
        sizes[kind] = plain - saved.get(kind, 0.0)
    return sizes


def saved_on_rank(s: RunSetting, rank: RankStages) -> float:
    """Bytes that a rank saves where its weights are held in blocks: of all of them, or of its share."""
    is_sharded = s.choices.sharding == "fsdp"
    total = 0.0
    for piece, layer in pieces_of_rank(rank):
        by_class = saved_by_blocks(s, piece, layer)
        for kind, saved in by_class.items():
            shards = shard_count(s, kind) if is_sharded else 1
            total += saved / shards
    return total


def pieces_of_rank(rank: RankStages) -> list[tuple[str, int]]:
    pieces = chain.from_iterable(rank.pieces)
    return list(pieces)


def saved_by_blocks(s: RunSetting, piece: str, layer: int) -> ClassBytes:
    base = s.config.lora.base
    format = BASE_FORMATS.get(base)
    if format is None:
        return {}
    sizes = s.portion.degrees.items()
    degrees = tuple(sizes)
    wide = s.recipe.wide
    return sum_saved(s.model, format, degrees, wide, piece, layer)


@lru_cache(maxsize=4096)  # a search asks for it with every layout
def sum_saved(
    model: ModelConfig,
    format: BaseFormat,
    degrees: Degrees,
    wide: float,
    piece: str,
    layer: int,
) -> ClassBytes:
    sizes = dict(degrees)
    total: dict[ParameterClass, float] = {}
    for _, weight in named_weights(model, piece, layer):
        if not is_in_scope(weight):
            continue
        *dims, inputs = weight.part(sizes)
        rows = prod(dims)
        width = int(inputs)
        plain = width * wide
        held = format.row_bytes(width, wide)
        kind = parameter_class(weight, sizes)
        known = total.get(kind, 0.0)
        total[kind] = known + rows * (plain - held)
    return total
