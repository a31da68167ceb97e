"""Import of Hugging Face weights: each rank reads the slices of the files that it holds, and no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from moefold.checkpoint.format.boxes import Box, box_sizes, box_slices, relative_box, whole_box
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.hf.dequantise import DequantisedTensor, dequantised_tensors
from moefold.checkpoint.hf.model_folder import ModelFolder, first_few_lines
from moefold.checkpoint.hf.name_table import NameTable, TensorAlias
from moefold.checkpoint.hf.piece_values import FetchBox, read_piece_values
from moefold.checkpoint.live.logical_tensors import held_boxes
from moefold.comm.consensus import result_of_every_rank
from moefold.config.errors import UserError, did_you_mean
from moefold.layout.axes import World
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.held_blocks import Held

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
COMPARED_BYTES = 1 << 28  # bytes of an alias that are compared at a time
MOST_GUESSES = 2000  # missing names for which similar ones are looked for; more take too long


@dataclass(frozen=True)
class LocalTensor:
    """A part of one of our tensors that this rank holds: its values, and its box in the whole tensor."""

    tensor: Held
    part: Box
    stacked: bool = False  # dim 0 counts experts


def local_tensors(model: nn.Module) -> dict[str, list[LocalTensor]]:
    """The held parts of parameters and selection biases by name. `state_dict` waits for weights that are still being
    gathered."""
    declared = {parameter.name: parameter for parameter in declared_parameters(model)}
    held: dict[str, list[LocalTensor]] = {}
    for name, tensor in model.state_dict().items():
        if name in declared:
            held[name] = local_parts(tensor.detach(), declared[name])
        elif is_selection_bias(name):
            part = whole_box(tensor.shape)
            held[name] = [LocalTensor(tensor.detach(), part)]
    return held


def local_parts(values: Tensor, parameter: DeclaredParameter) -> list[LocalTensor]:
    """A parameter's part on this rank; of a fully sharded one the boxes of this rank's share."""
    stacked = parameter.declaration.stacked
    return [LocalTensor(held, box, stacked) for box, held in held_boxes(values, parameter)]


def is_selection_bias(name: str) -> bool:
    return name.endswith("load.bias_E")


class FolderWeights:
    """The tensors of a folder, dequantised, by boxes. Each file is opened once."""

    def __init__(self, folder: ModelFolder):
        self.folder = folder
        self.opened: dict[StoragePath, Any] = {}
        dequantised = dequantised_tensors(folder.tensors, self.read_raw_box)
        self.tensors, self.problems = dequantised

    def read_raw_box(self, name: str, box: Box) -> torch.Tensor:
        file = self.folder.tensors[name].file
        try:
            if file not in self.opened:
                self.opened[file] = safe_open(file, framework="pt")
            stored = self.opened[file].get_slice(name)
            return stored[box_slices(box)]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read: {error}; fetch the file again") from None

    def fetch_box(self, name: str, box: Box) -> torch.Tensor:
        return self.tensors[name].fetch_box(box)


def check_names_and_shapes(weights: FolderWeights, table: NameTable) -> None:
    """Refuse tensors that are missing, left over, or of another shape or dtype than the model's: all at once."""
    tensors = weights.tensors
    expected = table.pieces_by_theirs
    required: dict[str, tuple[int, ...]] = {}
    for name, pieces in expected.items():
        required[name] = pieces[0].their_shape
    optional: dict[str, tuple[int, ...]] = {}
    for alias in table.aliases:
        optional[alias.theirs] = required[alias.of]
    for placeholder in table.placeholders:
        optional[placeholder.theirs] = placeholder.shape
    shapes = required | optional
    # What is in the files and what should be.
    left_over = [name for name in tensors if name not in shapes]
    missing = [name for name in required if name not in tensors]
    similar: list[str] = []
    if len(missing) <= MOST_GUESSES:
        similar = left_over[:MOST_GUESSES]
    problems = [*weights.problems]
    problems += [f'"{name}" is not in the files{did_you_mean(name, similar)}' for name in missing]
    problems += [f'"{name}" is in the files, but the model has no such tensor' for name in left_over]
    # Shapes and dtypes of those that are there.
    for name, shape in shapes.items():
        problems += tensor_problems(name, tensors.get(name), shape)
    if problems:
        raise UserError(f"{weights.folder.path} does not fit its config.json:", *first_few_lines(problems))


def tensor_problems(name: str, tensor: DequantisedTensor | None, shape: tuple[int, ...]) -> list[str]:
    if tensor is None:
        return []
    if tensor.shape == shape and tensor.dtype in FLOAT_DTYPES:
        return []
    kinds = ", ".join(FLOAT_DTYPES)
    return [f'"{name}" is {tensor.dtype} {list(tensor.shape)}; expected one of {kinds}, {list(shape)}']


@torch.no_grad()
def load_folder_weights(weights: FolderWeights, table: NameTable, model: nn.Module, world: World) -> None:
    """Fill the local part of the model. Every rank calls this; the problem of one rank is raised on all."""

    def check_and_fill() -> None:
        check_names_and_shapes(weights, table)
        check_aliases(weights, table)
        fill_local_model(weights, table, model)

    result_of_every_rank(check_and_fill, world)


@torch.no_grad()
def fill_local_model(weights: FolderWeights, table: NameTable, model: nn.Module) -> None:
    """Fill the local part of the model from files that were checked."""
    for name, parts in local_tensors(model).items():
        for held in parts:
            fill_local_tensor(name, held, weights, table)


def fill_local_tensor(name: str, held: LocalTensor, weights: FolderWeights, table: NameTable) -> None:
    """Fill one tensor, a stacked one expert by expert. A selection bias that the family lacks is zero."""
    pieces = table.pieces_by_ours.get(name, [])
    if not pieces and is_selection_bias(name):
        held.tensor.copy_(torch.zeros(()))
        return
    if not pieces:
        raise UserError(f'"{name}" has no place in the name table of this family; the model differs from config.json')
    filled = 0
    for box in expert_boxes(held):
        for piece in pieces:
            part = read_piece_values(piece, box, weights.fetch_box)
            if part is None:
                continue
            shared, values = part
            target_box = relative_box(shared, held.part)
            held.tensor[box_slices(target_box)].copy_(values)
            filled += values.numel()
    expected = held.tensor.numel()
    if filled != expected:
        raise UserError(f'"{name}" has {expected} values here, of which the files give {filled}')


def expert_boxes(held: LocalTensor) -> list[Box]:
    """The boxes in which a tensor is read: one per expert of a stack, so that few values are in memory twice."""
    if not held.stacked:
        return [held.part]
    (first, count), *rest = held.part
    boxes: list[Box] = []
    for expert in range(first, first + count):
        boxes.append(((expert, 1), *rest))
    return boxes


def check_aliases(weights: FolderWeights, table: NameTable) -> None:
    """Refuse tensors whose values under a second name are not the same."""
    differing: list[str] = []
    for alias in table.aliases:
        is_there = alias.theirs in weights.tensors
        if is_there and not alias_is_equal(weights, alias):
            differing.append(f'"{alias.theirs}" differs from "{alias.of}"; this model has one tensor for both')
    if differing:
        raise UserError(f"{weights.folder.path} holds tensors twice that are not equal:", *differing)


def alias_is_equal(weights: FolderWeights, alias: TensorAlias) -> bool:
    """Compare two tensors, some rows at a time."""
    rows, *row_shape = weights.tensors[alias.theirs].shape
    row_elements = max(1, row_shape[0] if row_shape else 1)
    step = max(1, COMPARED_BYTES // (4 * row_elements))
    for first in range(0, rows, step):
        count = min(step, rows - first)
        box = ((first, count), *whole_box(row_shape))
        copy = weights.fetch_box(alias.theirs, box)
        original = weights.fetch_box(alias.of, box)
        if not torch.equal(copy, original):
            return False
    return True


def our_box_fetcher(weights: FolderWeights, table: NameTable) -> FetchBox:
    """A function that gives boxes of our tensors, joined from a folder's tensors."""

    def fetch_our_box(name: str, box: Box) -> torch.Tensor:
        joined: torch.Tensor | None = None
        for piece in table.pieces_by_ours[name]:
            part = read_piece_values(piece, box, weights.fetch_box)
            if part is None:
                continue
            shared, values = part
            if joined is None:
                joined = values.new_empty(box_sizes(box))
            target_box = relative_box(shared, box)
            joined[box_slices(target_box)].copy_(values)
        assert joined is not None
        return joined

    return fetch_our_box
