"""Hugging Face tensors from our own, one at a time: from a running model on any layout, or from anything that can give
a box of one of our tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from moefold.checkpoint.boxes import Range, overlap, slices
from moefold.checkpoint.hf.config import family_for, options_for
from moefold.checkpoint.hf.move import Fetch, put
from moefold.checkpoint.hf.piece import Piece, Table
from moefold.checkpoint.hf.read import Held, held_tensors
from moefold.comm.collectives import gather_objects, sum_
from moefold.config.refused import Refused
from moefold.config.run import ModelConfig
from moefold.layout.axes import World

KEPT = ("e_score_correction_bias",)  # fp32 whatever the weights are


def hf_tensors(table: Table, fetch: Fetch, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything the table writes, in its order. `dtype` for all but what is fp32 in any case; None:
    as it is."""
    sources = {twin.theirs: twin.of for twin in table.twins}
    for name, shape in table.written.items():
        pieces = table.by_theirs.get(sources.get(name, name))
        theirs = joined(pieces, fetch) if pieces else torch.zeros(shape)
        yield name, theirs if dtype is None or name.endswith(KEPT) else theirs.to(dtype)


def joined(pieces: list[Piece], fetch: Fetch) -> torch.Tensor:
    """One of their tensors, put together."""
    theirs: torch.Tensor | None = None
    for piece in pieces:
        values = fetch(piece.ours, piece.our_box)
        if theirs is None:
            theirs = values.new_empty(piece.their_shape)
        put(piece, values, theirs)
    assert theirs is not None
    return theirs


def export_hf_weights(
    model: nn.Module, config: ModelConfig, world: World, family: str | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights under Hugging Face names, one at a time, on every rank: to hand them to an inference engine.
    Every rank iterates to the end. `config` is the model's; nothing changes the weights meanwhile."""
    chosen = family_for(config, family)
    options_for(chosen, config)  # refuses what the family has no place for
    table = chosen.table(config)
    held = held_tensors(model)
    refuse_lost_biases(held, table, world)
    yield from hf_tensors(table, Gathering(held, world).fetch, dtype)


def refuse_lost_biases(held: dict[str, Held], table: Table, world: World) -> None:
    """Selection biases that evened out the load are part of the model; a family without them would route otherwise."""
    lost = [name for name, h in held.items() if name not in table.by_ours and bool(h.tensor.count_nonzero())]
    if names := sorted(set().union(*gather_objects(lost, world.everyone))):
        raise Refused(
            f"{names[0]} is not zero, as are {len(names) - 1} more; this family has no place for selection biases; "
            "choose a family that has, such as deepseek_v3, or train with --model.moe.bias_rate 0"
        )


class Gathering:
    """Boxes of our tensors, gathered from the ranks that hold parts of them.

    Of every part one rank speaks, the first of its replicas; the others add zeros to its bytes, so that the sum has
    every bit as it was."""

    def __init__(self, held: dict[str, Held], world: World):
        self.held, self.world = held, world
        mine = {name: (h.tensor.dtype, h.part) for name, h in held.items()}
        everyone = gather_objects(mine, world.everyone)
        self.dtypes = {name: dtype for of in everyone for name, (dtype, _) in of.items()}
        spoken: dict[tuple[str, tuple[Range, ...]], int] = {}
        for rank, of in enumerate(everyone):
            for name, (_, part) in of.items():
                spoken.setdefault((name, part), rank)
        self.speaks = {name for name, h in held.items() if spoken[name, h.part] == world.rank}

    def fetch(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        shape = [size for _, size in box]
        found = torch.zeros(shape, dtype=self.dtypes[name], device=self.world.device)
        if name in self.speaks and (shared := overlap(self.held[name].part, box)):
            here = tuple((s - corner, n) for (s, n), (corner, _) in zip(shared, self.held[name].part, strict=True))
            there = tuple((s - corner, n) for (s, n), (corner, _) in zip(shared, box, strict=True))
            found[slices(there)].copy_(self.held[name].tensor[slices(here)])
        sum_(found.view(torch.uint8), self.world.everyone)
        return found
