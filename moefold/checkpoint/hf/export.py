"""Export of Hugging Face tensors, one at a time: from a live model on any layout, or from anything that can fetch a box
of one of our tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import nn

from moefold.checkpoint.format.boxes import Box, box_overlap, box_sizes, box_slices, relative_box
from moefold.checkpoint.hf.config_json import config_json_for, family_for_model
from moefold.checkpoint.hf.family import ModelFamily
from moefold.checkpoint.hf.name_table import MappedPiece, NameTable
from moefold.checkpoint.hf.piece_values import FetchBox, write_piece_values
from moefold.checkpoint.hf.quantise import BESIDE_FP8, FP8_DTYPE, quantised_names, quantised_pair
from moefold.checkpoint.hf.read_weights import LocalTensor, local_tensors
from moefold.comm.collectives import all_reduce_no_grad
from moefold.comm.host_objects import broadcast_object, gather_objects, scatter_objects, union_of_sets
from moefold.config.errors import UserError
from moefold.config.run import ModelConfig
from moefold.layout.axes import World
from moefold.layout.held_blocks import values_of

ALWAYS_FP32 = ("e_score_correction_bias",)  # fp32 whatever the dtype of the weights

NamedTensors = Iterator[tuple[str, torch.Tensor]]
WrittenDtypes = Mapping[str, torch.dtype]  # by their names


def iterate_hf_tensors(table: NameTable, fetch: FetchBox, dtypes: WrittenDtypes | None = None) -> NamedTensors:
    """(name, tensor) of everything that the table writes, in its order; None: in the dtypes of the fetched values. The
    scales of a tensor in FP8 follow it."""
    for name, shape in table.written.items():
        pieces = table.source_pieces(name)
        if pieces:
            tensor = join_pieces(pieces, fetch)
        else:
            tensor = torch.zeros(shape)
        dtype = dtypes[name] if dtypes else tensor.dtype
        if dtype == FP8_DTYPE:
            yield from quantised_pair(name, tensor)
        else:
            yield name, tensor.to(dtype)


def written_dtypes(
    family: ModelFamily, table: NameTable, model: ModelConfig, dtype: torch.dtype
) -> dict[str, torch.dtype]:  # fmt: skip
    """The dtype of every tensor of an export in `dtype`. With float8_e4m3fn, weights are in 128 x 128 blocks."""
    if dtype == FP8_DTYPE:
        in_fp8 = quantised_names(family, table, model)
        dtypes = dict.fromkeys(table.written, BESIDE_FP8)
        dtypes |= dict.fromkeys(in_fp8, FP8_DTYPE)
    else:
        dtypes = dict.fromkeys(table.written, dtype)
    for name in dtypes:
        if name.endswith(ALWAYS_FP32):
            dtypes[name] = torch.float32
    return dtypes


def join_pieces(pieces: list[MappedPiece], fetch: FetchBox) -> torch.Tensor:
    """One of their tensors, joined from all of its pieces."""
    joined: torch.Tensor | None = None
    for piece in pieces:
        values = fetch(piece.ours, piece.box_in_ours)
        if joined is None:
            joined = values.new_empty(piece.their_shape)
        write_piece_values(piece, values, joined)
    assert joined is not None
    return joined


def export_hf_weights(
    model: nn.Module, config: ModelConfig, world: World, family: str | None = None, dtype: torch.dtype | None = None
) -> NamedTensors:
    """The weights of a live model under Hugging Face names, one at a time, on every rank: for an inference engine.
    Every rank iterates to the end, and the weights must not change meanwhile. `config` is the model's; `dtype` None is
    that of each weight, float8_e4m3fn stands for 128 x 128 blocks."""
    chosen = family_for_model(config, family)
    config_json_for(chosen, config)  # refuses what the family has no option for
    table = chosen.name_table(config)
    dtypes = None
    if dtype:
        dtypes = written_dtypes(chosen, table, config, dtype)
    held = local_tensors(model)
    refuse_adapters(held)
    refuse_lost_biases(held, table, world)
    boxes = GatheredBoxes(held, world)
    yield from iterate_hf_tensors(table, boxes.fetch_box, dtypes)


def refuse_adapters(held: Iterable[str]) -> None:
    """Refuse a model with adapters: its weights alone are not what it computes with."""
    adapters = [name for name in held if name.endswith(".lora.a")]
    if adapters:
        raise UserError(
            f"{adapters[0]} and others are adapters, which a live export does not merge; "
            "write a checkpoint, and convert it with `moefold convert` --to hf or --to peft"
        )


def refuse_lost_biases(held: dict[str, list[LocalTensor]], table: NameTable, world: World) -> None:
    """Refuse to drop non-zero selection biases: a family without them would route otherwise."""
    lost: set[str] = set()
    for name, parts in held.items():
        written = name in table.pieces_by_ours
        if not written and any(bool(values_of(part.tensor).count_nonzero()) for part in parts):
            lost.add(name)
    names = sorted(union_of_sets(lost, world.pp))  # all ranks of a stage hold the same biases
    if names:
        raise UserError(
            f"{names[0]} is not zero, as are {len(names) - 1} more; this family has no place for selection biases; "
            "choose a family that has, such as deepseek_v3, or train with --model.moe.balance.bias_rate 0"
        )


PartOfRank = tuple[str, Box]  # the name of a tensor, and a part of it that a rank holds
HeldParts = dict[PartOfRank, torch.dtype]


def choose_contributors(parts_by_rank: list[HeldParts]) -> tuple[dict[str, torch.dtype], list[set[PartOfRank]]]:
    """The dtype of every tensor, and for each rank the parts that it contributes: the first rank that holds a part
    contributes it."""
    dtypes: dict[str, torch.dtype] = {}
    chosen: set[PartOfRank] = set()
    contributed: list[set[PartOfRank]] = []
    for parts in parts_by_rank:
        dtypes |= {name: dtype for (name, _), dtype in parts.items()}
        mine = parts.keys() - chosen
        chosen |= mine
        contributed.append(mine)
    return dtypes, contributed


class GatheredBoxes:
    """Boxes of our tensors, gathered from the ranks that hold parts of them.

    Each part is contributed by one rank, the first of its replicas. The other ranks add zeros to its bytes, so that the
    all-reduce keeps every bit."""

    def __init__(self, held: dict[str, list[LocalTensor]], world: World):
        self.held = held
        self.world = world
        mine: HeldParts = {}
        for name, parts in held.items():
            for part in parts:
                mine[name, part.part] = part.tensor.dtype
        parts_by_rank = gather_objects(mine, world.everyone)
        dtypes: dict[str, torch.dtype] = {}
        contributed: list[set[PartOfRank]] | None = None
        if parts_by_rank is not None:
            dtypes, contributed = choose_contributors(parts_by_rank)
        self.dtypes = broadcast_object(dtypes, world.everyone)
        self.contributed = scatter_objects(contributed, world.everyone)

    def fetch_box(self, name: str, box: Box) -> torch.Tensor:
        dtype = self.dtypes[name]
        device = self.world.device
        shape = box_sizes(box)
        values = torch.zeros(shape, dtype=dtype, device=device)
        for part in self.held.get(name, []):
            if (name, part.part) in self.contributed:
                self.copy_overlap(part, box, values)
        as_bytes = values.view(torch.uint8)
        all_reduce_no_grad(as_bytes, self.world.everyone)
        return values

    def copy_overlap(self, local: LocalTensor, box: Box, values: torch.Tensor) -> None:
        shared = box_overlap(local.part, box)
        if shared is None:
            return
        source_box = relative_box(shared, local.part)
        target_box = relative_box(shared, box)
        source = local.tensor[box_slices(source_box)]
        values[box_slices(target_box)].copy_(values_of(source))
