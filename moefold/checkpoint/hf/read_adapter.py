"""Adapters of a folder in PEFT's format as the start of a model's adapters, on any layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moefold.checkpoint.format.boxes import Box, box_slices
from moefold.checkpoint.format.safetensors_header import StoredTensor
from moefold.checkpoint.hf.adapted_products import AdaptedProduct, StackSource
from moefold.checkpoint.hf.adapter_folder import bytes_of
from moefold.checkpoint.hf.name_table import MappedPiece
from moefold.checkpoint.hf.piece_values import read_piece_values
from moefold.checkpoint.hf.write_weights import DTYPE_CODES
from moefold.layout.declare import DeclaredParameter, declared_parameters

TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
WIDE = torch.float64  # holds values of every file


@torch.no_grad()
def fill_adapters(model: nn.Module, products: Iterable[AdaptedProduct]) -> None:
    """Give this rank's adapters the values of a folder. Where A and B of the folder are zero or missing, A stays as it
    was drawn, so that it can be trained."""
    declared = {parameter.name: parameter for parameter in declared_parameters(model)}
    for adapted in products:
        name = f"{adapted.product.name}.lora"
        if f"{name}.a" not in declared:  # on another pipeline rank
            continue
        a = declared[f"{name}.a"]
        b = declared[f"{name}.b"]
        values_a, values_b = whole_adapter(adapted, a, b)
        first_output = int(a.declaration.stacked)
        outputs_of_b = values_b.flatten(first_output, -2)
        is_used = values_a.any(-1) | outputs_of_b.any(-2)
        is_used_here = part_of(is_used, a.part[:-1]).to(a.tensor.device)
        values_here = part_of(values_a, a.part).to(a.tensor)
        a.tensor.copy_(torch.where(is_used_here.unsqueeze(-1), values_here, a.tensor))
        b.tensor.copy_(part_of(values_b, b.part))


def part_of(whole: Tensor, part: Iterable[tuple[int, int]]) -> Tensor:
    return whole[box_slices(tuple(part))]


def whole_adapter(adapted: AdaptedProduct, a: DeclaredParameter, b: DeclaredParameter) -> tuple[Tensor, Tensor]:
    """A and B over all ranks."""
    if adapted.stack is not None:
        return stacked_pair(adapted, adapted.stack, b.declaration.shape)
    values_a = torch.zeros(a.declaration.shape, dtype=WIDE)
    values_b = torch.zeros(b.declaration.shape, dtype=WIDE)
    for source in adapted.pieces:
        rank = source.pair.a.shape[0]
        rows = slice(source.first, source.first + rank)
        expert = source.piece.corner[: a.declaration.stacked]
        values_a[(*expert, rows)] = read_tensor(source.pair.a)
        box, outputs = our_outputs(source.piece, rank, read_tensor(source.pair.b))
        slices = box_slices(box[:-1])
        values_b[(*slices, rows)] = outputs * (source.scale / adapted.scale)
    return values_a, values_b


def our_outputs(piece: MappedPiece, rank: int, theirs: Tensor) -> tuple[Box, Tensor]:
    """The piece's outputs of their B, in our order, and their box in ours."""
    of_b = piece.with_inputs(rank)
    found = read_piece_values(of_b, of_b.box_in_ours, lambda _, box: theirs[box_slices(box)])
    assert found is not None
    return found


def stacked_pair(adapted: AdaptedProduct, stack: StackSource, shape_of_b: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A and B from one pair for all experts."""
    experts = shape_of_b[0]
    rank = adapted.rank
    a_eri = read_tensor(stack.pair.a).unflatten(0, (experts, rank))
    b_ore = read_tensor(stack.pair.b).unflatten(1, (rank, experts))
    b_ero = b_ore.permute(2, 1, 0)
    if stack.swapped:
        a_eri, b_ero = b_ero, a_eri
    if len(stack.piece.their_shape) == 3:  # (experts, inputs, outputs) on their side
        _, values_b = our_outputs(stack.piece, rank, b_ero)
        return a_eri, values_b
    return a_eri, b_ero.mT.reshape(shape_of_b)


def read_tensor(stored: StoredTensor) -> Tensor:
    raw = bytearray(bytes_of(stored))
    values = torch.frombuffer(raw, dtype=TORCH_DTYPES[stored.dtype])
    return values.view(stored.shape).to(WIDE)
