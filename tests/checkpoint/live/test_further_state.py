"""Further state beside model and optimizer: listed by name, saved and loaded as the rest."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from moefold.checkpoint.format.retention import RetentionPolicy
from moefold.checkpoint.live.load import load_checkpoint, require_checkpoint
from moefold.checkpoint.live.logical_tensors import collect_tensors
from moefold.checkpoint.live.save import save_checkpoint
from moefold.layout.axes import single_rank_world
from tests.checkpoint.live.test_logical_tensors import ignore, make


class DelayedAmax:
    """The state of a recipe that scales by the largest values of earlier steps."""

    def __init__(self, fill: float):
        self.history = torch.full((4, 3), fill)

    def named_state(self) -> Iterable[tuple[str, torch.Tensor]]:
        yield "blocks.0.attention.amax", self.history


def test_a_provider_of_state_is_saved_and_loaded(tmp_path: Path):
    world = single_rank_world()
    model, optimizer = make(world)
    saved, loaded = DelayedAmax(3.0), DelayedAmax(0.0)
    tensors = collect_tensors(model, optimizer, {"recipe": saved})
    assert "recipe.blocks.0.attention.amax" in tensors
    assert list(tensors)[-1].startswith("optimizer."), "optimizer state is loaded last"
    save_checkpoint(tmp_path, 1, tensors, {"step": 1}, RetentionPolicy(1), world)
    found = require_checkpoint(tmp_path, world, ignore)
    load_checkpoint(found, collect_tensors(model, optimizer, {"recipe": loaded}), optional=set(), world=world)
    assert torch.equal(loaded.history, saved.history)
