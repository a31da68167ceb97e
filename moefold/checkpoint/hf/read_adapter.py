"""Adapters of a folder in PEFT's format as the start of a model's adapters, on any layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from moefold.checkpoint.format.boxes import Box, Range, box_slices
from moefold.checkpoint.format.safetensors_header import StoredTensor
from moefold.checkpoint.hf.adapted_products import AdaptedProduct, StackSource
from moefold.checkpoint.hf.adapter_folder import bytes_of
from moefold.checkpoint.hf.name_table import MappedPiece
from moefold.checkpoint.hf.piece_values import read_piece_values
from moefold.checkpoint.hf.write_weights import DTYPE_CODES
from moefold.layout.declare import DeclaredParameter, declared_parameters

TORCH_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
WIDE = torch.float64  # holds values of every file
WholeAdapter = tuple[Tensor, Tensor]  # A and B


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
        drawn = a.tensor
        rows_here = a.part[:-1]
        is_used_here = part_of(is_used, rows_here).to(drawn.device)
        values_here = part_of(values_a, a.part).to(drawn)
        filled = torch.where(is_used_here.unsqueeze(-1), values_here, drawn)
        a.tensor.copy_(filled)
        b_here = part_of(values_b, b.part)
        b.tensor.copy_(b_here)


def part_of(whole: Tensor, part: Iterable[Range]) -> Tensor:
    box = tuple(part)
    slices = box_slices(box)
    return whole[slices]


def whole_adapter(adapted: AdaptedProduct, a: DeclaredParameter, b: DeclaredParameter) -> WholeAdapter:
    """A and B over all ranks."""
    shape_of_b = b.declaration.shape
    if adapted.stack is not None:
        return stacked_pair(adapted, adapted.stack, shape_of_b)
    values_a = torch.zeros(a.declaration.shape, dtype=WIDE)
    values_b = torch.zeros(shape_of_b, dtype=WIDE)
    for source in adapted.pieces:
        piece = source.piece
        their_a = read_tensor(source.pair.a)
        their_b = read_tensor(source.pair.b)
        rank = len(their_a)
        end = source.first + rank
        rows = slice(source.first, end)
        expert = piece.corner[: a.declaration.stacked]
        values_a[(*expert, rows)] = their_a
        box, outputs = our_outputs(piece, rank, their_b)
        slices = box_slices(box[:-1])
        factor = source.scale / adapted.scale
        values_b[(*slices, rows)] = outputs * factor
    return values_a, values_b


def our_outputs(piece: MappedPiece, rank: int, theirs: Tensor) -> tuple[Box, Tensor]:
    """The piece's outputs of their B, in our order, and their box in ours."""

    def read(_: str, box: Box) -> Tensor:
        slices = box_slices(box)
        return theirs[slices]

    of_b = piece.with_inputs(rank)
    found = read_piece_values(of_b, of_b.box_in_ours, read)
    assert found is not None
    return found


def stacked_pair(adapted: AdaptedProduct, stack: StackSource, shape_of_b: tuple[int, ...]) -> WholeAdapter:
    """A and B from one pair for all experts."""
    experts = shape_of_b[0]
    rank = adapted.rank
    their_a = read_tensor(stack.pair.a)
    their_b = read_tensor(stack.pair.b)
    a_eri = their_a.unflatten(0, (experts, rank))
    b_ore = their_b.unflatten(1, (rank, experts))
    b_ero = b_ore.permute(2, 1, 0)
    if stack.swapped:
        a_eri, b_ero = b_ero, a_eri
    if len(stack.piece.their_shape) == 3:  # (experts, inputs, outputs) on their side
        _, values_b = our_outputs(stack.piece, rank, b_ero)
        return a_eri, values_b
    return a_eri, b_ero.mT.reshape(shape_of_b)


def read_tensor(stored: StoredTensor) -> Tensor:
    raw = bytearray(bytes_of(stored))
    dtype = TORCH_DTYPES[stored.dtype]
    values = torch.frombuffer(raw, dtype=dtype)
    shaped = values.view(stored.shape)
    return shaped.to(WIDE)
