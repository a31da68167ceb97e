"""Parts of a model without a whole run: what assembly would choose, for one rank unless a world is given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moefold.config.renamed_keys import RENAMED_KEYS
from moefold.config.run import Config, DataConfig, ModelConfig, MoeConfig, ParallelConfig, TrainConfig
from moefold.dispatch.build import build_dispatcher
from moefold.kernels.bound import BoundKernels
from moefold.layout.axes import World, single_rank_world
from moefold.model.attention.context_parallel import choose_context_mechanisms
from moefold.model.attention.gqa import GroupedQueryAttention
from moefold.model.attention.mla import LatentAttention
from moefold.model.norm import ResidualStream
from moefold.model.parts import ModelParts
from moefold.model.token_layout import TokenShard
from moefold.model.transformer import Transformer
from moefold.train.assemble import make_heads_in_exchanges, make_tp_projections


def choices(
    model: ModelConfig,
    seq_len: int,
    kernels: BoundKernels,
    world: World | None = None,
    parallel: ParallelConfig | None = None,
) -> ModelParts:
    """`parallel` names the mechanisms; the degrees are the world's."""
    world = world or single_rank_world()
    degrees = {name: world.axis(name).size for name in ("tp", "cp", "ep", "etp")}
    parallel = replace(parallel or ParallelConfig(), **degrees)
    data, train = DataConfig(seq_len=seq_len), TrainConfig(precision="fp32")
    config = Config(model=model, data=data, train=train, parallel=parallel)
    contexts = choose_context_mechanisms(mechanism_of(parallel), kernels, world)
    dispatcher = build_dispatcher(config, kernels, world)
    over_tp = make_tp_projections(config, world, kernels)
    heads = make_heads_in_exchanges(config, world, kernels, over_tp)
    return ModelParts(world, kernels, dispatcher, contexts, over_tp, seq_len, parallel.row_chunks, heads)


def mechanism_of(parallel: ParallelConfig) -> str:
    """The mechanism of context parallelism; a ring where none is set."""
    return "ring" if parallel.context == "auto" else parallel.context


def transformer(
    model: ModelConfig,
    seq_len: int,
    kernels: BoundKernels,
    world: World | None = None,
    parallel: ParallelConfig | None = None,
) -> Transformer:
    return Transformer(model, choices(model, seq_len, kernels, world, parallel))


def attend(module: GroupedQueryAttention | LatentAttention, x_TD: torch.Tensor, where: TokenShard) -> torch.Tensor:
    """What attention gives for the stream, to which nothing is added before."""
    _, h_TD = ResidualStream(x_TD).normed(module.norm)
    return module(h_TD, where)


class NormedAttention(nn.Module):
    """Attention behind its norm, as a block runs it: a module, so that its parameters can be replaced."""

    def __init__(self, attention: GroupedQueryAttention | LatentAttention):
        super().__init__()
        self.attention = attention

    def forward(self, x_TD: torch.Tensor, where: TokenShard) -> torch.Tensor:
        return attend(self.attention, x_TD, where)


def share(sequences: int, length: int, world: World | None = None) -> TokenShard:
    world = world or single_rank_world()
    return TokenShard(sequences, length, world.axis("cp"), world.axis("tp"), torch.device("cpu"))


def with_moe_keys(moe: MoeConfig, **changes: Any) -> MoeConfig:
    """`moe` with keys changed, those of its sections by the names they had before they were grouped: `score`,
    `capacity_factor`, `aux_loss`."""
    for name, value in changes.items():
        path = RENAMED_KEYS.get(f"model.moe.{name}", f"model.moe.{name}").split(".")[2:]
        if len(path) == 2:
            value = replace(getattr(moe, path[0]), **{path[1]: value})
        moe = replace(moe, **{path[0]: value})
    return moe
