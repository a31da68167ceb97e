"""Hugging Face tensors from our own, one at a time: from a running model on any layout, or from anything that can give
a box of one of our tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from moefold.checkpoint.format.boxes import Range, box_overlap, box_slices
from moefold.checkpoint.hf.config_json import config_json_for, family_for_model
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.piece_values import FetchBox, write_piece_values
from moefold.checkpoint.hf.read_weights import LocalTensor, local_tensors
from moefold.comm.collectives import all_gather_objects, all_reduce_no_grad
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig
from moefold.layout.axes import World

ALWAYS_FP32 = ("e_score_correction_bias",)  # fp32 whatever the weights are


def iterate_hf_tensors(
    table: NameTable, fetch: FetchBox, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of everything the table writes, in its order. `dtype` for all but what is fp32 in any case; None:
    as it is."""
    sources = {twin.theirs: twin.of for twin in table.aliases}
    for name, shape in table.written.items():
        pieces = table.pieces_by_theirs.get(sources.get(name, name))
        theirs = join_pieces(pieces, fetch) if pieces else torch.zeros(shape)
        yield name, theirs if dtype is None or name.endswith(ALWAYS_FP32) else theirs.to(dtype)


def join_pieces(pieces: list[MappedPiece], fetch: FetchBox) -> torch.Tensor:
    """One of their tensors, put together."""
    theirs: torch.Tensor | None = None
    for piece in pieces:
        values = fetch(piece.ours, piece.box_in_ours)
        if theirs is None:
            theirs = values.new_empty(piece.their_shape)
        write_piece_values(piece, values, theirs)
    assert theirs is not None
    return theirs


def export_hf_weights(
    model: nn.Module, config: ModelConfig, world: World, family: str | None = None, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights under Hugging Face names, one at a time, on every rank: to hand them to an inference engine.
    Every rank iterates to the end. `config` is the model's; nothing changes the weights meanwhile."""
    chosen = family_for_model(config, family)
    config_json_for(chosen, config)  # refuses what the family has no place for
    table = chosen.name_table(config)
    held = local_tensors(model)
    refuse_lost_biases(held, table, world)
    yield from iterate_hf_tensors(table, GatheredBoxes(held, world).fetch_box, dtype)


def refuse_lost_biases(held: dict[str, LocalTensor], table: NameTable, world: World) -> None:
    """Selection biases that evened out the load are part of the model; a family without them would route otherwise."""
    lost = [name for name, h in held.items() if name not in table.pieces_by_ours and bool(h.tensor.count_nonzero())]
    if names := sorted(set().union(*all_gather_objects(lost, world.everyone))):
        raise UserError(
            f"{names[0]} is not zero, as are {len(names) - 1} more; this family has no place for selection biases; "
            "choose a family that has, such as deepseek_v3, or train with --model.moe.balance.bias_rate 0"
        )


class GatheredBoxes:
    """Boxes of our tensors, gathered from the ranks that hold parts of them.

    Of every part one rank speaks, the first of its replicas; the others add zeros to its bytes, so that the sum has
    every bit as it was."""

    def __init__(self, held: dict[str, LocalTensor], world: World):
        self.held, self.world = held, world
        mine = {name: (h.tensor.dtype, h.part) for name, h in held.items()}
        everyone = all_gather_objects(mine, world.everyone)
        self.dtypes = {name: dtype for of in everyone for name, (dtype, _) in of.items()}
        spoken: dict[tuple[str, tuple[Range, ...]], int] = {}
        for rank, of in enumerate(everyone):
            for name, (_, part) in of.items():
                spoken.setdefault((name, part), rank)
        self.speaks = {name for name, h in held.items() if spoken[name, h.part] == world.rank}

    def fetch_box(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        shape = [size for _, size in box]
        found = torch.zeros(shape, dtype=self.dtypes[name], device=self.world.device)
        if name in self.speaks and (shared := box_overlap(self.held[name].part, box)):
            here = tuple((s - corner, n) for (s, n), (corner, _) in zip(shared, self.held[name].part, strict=True))
            there = tuple((s - corner, n) for (s, n), (corner, _) in zip(shared, box, strict=True))
            found[box_slices(there)].copy_(self.held[name].tensor[box_slices(here)])
        all_reduce_no_grad(found.view(torch.uint8), self.world.everyone)
        return found
