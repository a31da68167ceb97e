"""Expert weights on the host (`memory.offload expert_weights`): their bytes there, and on the device at a time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from moefold.anatomy.host_experts import experts_on_host
from moefold.anatomy.weight_units import size_of_buffers
from moefold.config.memory_regions import entries_of_expert_weights
from moefold.config.run import Config, LoraConfig, MemoryConfig, ModelConfig, OptimConfig, ParallelConfig
from moefold.plan.memory.rank_stages import RankStages
from moefold.plan.memory.run_setting import RunSetting


class HostWeights(NamedTuple):
    """Bytes of a rank's expert weights on the host, and of those that have device memory at a time; with full sharding
    of its share of them, which units are gathered from."""

    on_host: float
    on_device: float

    @property
    def saved(self) -> float:
        return self.on_host - self.on_device


def host_weights(s: RunSetting, rank: RankStages) -> HostWeights:
    by_layer = bytes_by_layer(s)
    if not by_layer:
        return HostWeights(0.0, 0.0)
    pieces = [piece for stage in rank.pieces for piece in stage]
    units = [by_layer.get(layer, 0.0) for piece, layer in pieces if piece in "tm"]
    on_device = size_of_buffers(units, s.pipeline)
    return HostWeights(sum(units), on_device)


def bytes_by_layer(s: RunSetting) -> Mapping[int, float]:
    """Bytes of a rank's experts in each layer whose experts lie on the host."""
    entries = entries_of_expert_weights(s.config.memory.offload)
    if not entries:
        return {}
    p = s.parallel
    cut = ParallelConfig(ep=p.ep, etp=p.etp)
    lora = s.config.lora
    groups = s.optim.groups
    wide = s.recipe.wide
    whole = expert_bytes(s.model, lora, groups, cut, entries, wide)
    if s.choices.sharding != "fsdp":
        return whole
    shares = s.shards_of("expert")
    own: dict[int, float] = {}
    for layer, size in whole.items():
        own[layer] = size / shares
    return own


@lru_cache(maxsize=256)  # a search asks for it with every layout
def expert_bytes(
    model: ModelConfig,
    lora: LoraConfig,
    groups: tuple[str, ...],
    parallel: ParallelConfig,
    entries: tuple[str, ...],
    wide: float,
) -> Mapping[int, float]:
    config = Config(
        model=model,
        lora=lora,
        optim=OptimConfig(groups=groups),
        parallel=parallel,
        memory=MemoryConfig(offload=entries),
    )
    return {layer.layer: layer.bytes for layer in experts_on_host(config, wide)}
