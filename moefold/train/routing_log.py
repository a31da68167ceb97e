"""Recording of routing: the experts of every token of a run, to a file (checkpoint/format/routing_file.py) that a later
run can replay on any layout. Validation and samples are not recorded.

T tokens of this rank; B sequences of S tokens, K choices.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.anatomy.step_specs import is_moe_layer
from moefold.checkpoint.format.routing_file import MOST_EXPERTS, RoutingWriter, create_routing_file
from moefold.checkpoint.live.save import run_on_rank_zero
from moefold.comm.host_copies import ToHost
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig
from moefold.model.token_layout import TokenShard
from moefold.train.assemble import Run
from moefold.train.routing_replay import routing_shape


class RecordedChoices(NamedTuple):
    """Choices of one layer for one microbatch, in one step; `first` is the number of the first sequence."""

    step: int
    layer: int
    first: int
    ids_BSK: ToHost


class RoutingLog:
    """Collects the choices of every training step, and writes those of finished steps. Of the ranks that hold parts of
    the same sequences, the first writes."""

    def __init__(self, run: Run, writer: RoutingWriter):
        self.run = run
        self.writer = writer
        self.pending: list[RecordedChoices] = []
        for load in run.model.loads():
            load.record = partial(self.add, load.layer)

    def add(self, layer: int, ids_TK: Tensor, shard: TokenShard) -> None:
        if not torch.is_grad_enabled():  # validation, a sample, or a pass that only counts
            return
        sharing = self.run.world.cp_tp
        ids_BSK = shard.gather_all_tokens(ids_TK.int(), sharing)  # gloo sends no int16
        if sharing.index == 0:
            on_host = ToHost(ids_BSK.short())
            step = self.run.step + 1
            assert isinstance(shard.first, int), "steps of a graph record no routing"
            choices = RecordedChoices(step, layer, shard.first, on_host)
            self.pending.append(choices)

    def write_through(self, step: int) -> None:
        """Write the choices of all steps up to this one, which is finished."""
        finished = [choices for choices in self.pending if choices.step <= step]
        self.pending = self.pending[len(finished) :]
        for choices in finished:
            ids_BSK = choices.ids_BSK.read().numpy()
            self.writer.write_rows(choices.layer, choices.first, ids_BSK)

    def close(self) -> None:
        for load in self.run.model.loads():
            load.record = None
        self.writer.close()


def open_routing_log(run: Run) -> RoutingLog | None:
    """The log of a run that records its routing. Every rank calls this."""
    config = run.config
    if not config.train.record_routing:
        return None
    path = Path(config.train.record_routing)
    experts = config.model.moe.experts
    if experts > MOST_EXPERTS:
        raise UserError(
            f"train.record_routing: ids of model.moe.experts = {experts} experts do not fit 16 bits; expected at most "
            f"{MOST_EXPERTS}; train without recording"
        )
    layers = moe_layers(config.model)
    create = partial(create_routing_file, path, layers, routing_shape(config))
    run_on_rank_zero(create, run.world, path)
    return RoutingLog(run, RoutingWriter(path))


def moe_layers(model: ModelConfig) -> list[int]:
    """The numbers of the MoE layers, those of multi-token prediction behind the others."""
    layers = range(model.layers + model.mtp)
    return [layer for layer in layers if is_moe_layer(model, layer)]
