"""Replay of routing in a run: batches carry the experts of their tokens, from a file that an earlier run recorded
(checkpoint/format/routing_file.py).

Routers take these choices instead of their own, and compute weights and gradients from their scores as ever.
Validation and samples are not replayed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from moefold.checkpoint.format.routing_file import RoutingReader, RoutingShape
from moefold.comm.consensus import result_of_every_rank
from moefold.config.run import Config
from moefold.data.loader import BatchLoader
from moefold.layout.axes import World
from moefold.model.transformer import Transformer


def open_replay(config: Config, model: Transformer, world: World) -> RoutingReader | None:
    """The reader of a run that replays routing, for the layers of this rank. Every rank calls this."""
    path = config.train.replay_routing
    if not path:
        return None
    layers = [load.layer for load in model.loads()]
    experts = config.model.moe.experts
    open_file = partial(RoutingReader, Path(path), layers, routing_shape(config), experts)
    return result_of_every_rank(open_file, world)


def check_replay(config: Config, loader: BatchLoader, world: World) -> None:
    """Refuse choices that cannot be replayed, before the first step: every rank reads those of all its steps."""
    last = config.train.steps * loader.batch

    def read_all() -> None:
        batch = loader.batch
        for consumed in range(loader.consumed, last, batch):
            loader.replayed_choices(consumed, batch)

    if loader.replay is not None:
        result_of_every_rank(read_all, world)


def routing_shape(config: Config) -> RoutingShape:
    """The sizes of a routing file of this run. With expert choice, any number of experts may take a token."""
    moe = config.model.moe
    choices = moe.top_k
    if moe.router.kind == "expert_choice":
        choices = moe.experts
    sequences = config.train.steps * config.train.global_batch
    return RoutingShape(sequences, config.data.seq_len, choices)
