"""Read a folder of Hugging Face weights into what this rank holds of a model: its slices and no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from moefold.checkpoint.format.boxes import Range, box_slices
from moefold.checkpoint.format.storage import StoragePath
from moefold.checkpoint.hf.dequantise import DequantisedTensor, dequantised_tensors
from moefold.checkpoint.hf.model_folder import ModelFolder, StoredTensor, first_few_lines
from moefold.checkpoint.hf.name_table import NameTable
from moefold.checkpoint.hf.piece_values import FetchBox, read_piece_values
from moefold.comm.collectives import all_gather_objects
from moefold.config.errors import UserError, did_you_mean
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters

FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
COMPARED_BYTES = 1 << 28  # bytes of a twin that are compared at a time


@dataclass(frozen=True)
class LocalTensor:
    """What this rank holds of one of our tensors: the values, and where they lie in the whole."""

    tensor: torch.Tensor
    part: tuple[Range, ...]
    stacked: bool = False  # dim 0 counts experts


def local_tensors(model: nn.Module) -> dict[str, LocalTensor]:
    """Parameters and selection biases by name. Asking for the state waits for weights that are still on their way."""
    declared = {p.name: p for p in declared_parameters(model)}
    held: dict[str, LocalTensor] = {}
    for name, tensor in model.state_dict().items():
        if name in declared:
            part = tuple(declared[name].part)
            held[name] = LocalTensor(tensor.detach(), part, declared[name].declaration.stacked)
        elif name.endswith("load.bias_E"):
            held[name] = LocalTensor(tensor.detach(), tuple((0, size) for size in tensor.shape))
    return held


class FolderWeights:
    """The tensors of a folder, whole or by slices; files are opened once."""

    def __init__(self, folder: ModelFolder):
        self.folder = folder
        self.opened: dict[StoragePath, Any] = {}
        self.tensors, self.problems = dequantised_tensors(folder.tensors, self.read_raw_box)

    def read_raw_box(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        stored: StoredTensor = self.folder.tensors[name]
        try:
            if stored.file not in self.opened:
                self.opened[stored.file] = safe_open(stored.file, framework="pt")
            return self.opened[stored.file].get_slice(name)[box_slices(box)]
        except (SafetensorError, OSError) as error:
            raise UserError(f"{stored.file} cannot be read: {error}; fetch the file again") from None

    def fetch_box(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        return self.tensors[name].fetch_box(box)


def check_names_and_shapes(weights: FolderWeights, table: NameTable) -> None:
    """Refuse tensors that are missing, left over, or of another shape or kind than the model's: all at once."""
    there, expected = weights.tensors, table.pieces_by_theirs
    may_be = {twin.theirs: expected[twin.of][0].their_shape for twin in table.aliases}
    may_be |= {blank.theirs: blank.shape for blank in table.placeholders}
    left_over = [name for name in there if name not in expected and name not in may_be]
    missing = [name for name in expected if name not in there]
    near = left_over[:2000] if len(missing) <= 2000 else []  # of many, no guess is worth the time it takes
    found = [f'"{n}" is not in the files{did_you_mean(n, near)}' for n in missing]
    found += [f'"{n}" is in the files, but the model has no such tensor' for n in left_over]
    for name, pieces in expected.items():
        found += tensor_problems(name, there.get(name), pieces[0].their_shape)
    for name, shape in may_be.items():
        found += tensor_problems(name, there.get(name), shape)
    if problems := [*weights.problems, *found]:
        raise UserError(f"{weights.folder.path} does not fit its config.json:", *first_few_lines(problems))


def tensor_problems(name: str, whole: DequantisedTensor | None, shape: tuple[int, ...]) -> list[str]:
    if whole is None or (whole.shape == shape and whole.dtype in FLOAT_DTYPES):
        return []
    kinds = ", ".join(FLOAT_DTYPES)
    return [f'"{name}" is {whole.dtype} {list(whole.shape)}; expected one of {kinds}, {list(shape)}']


@torch.no_grad()
def load_folder_weights(weights: FolderWeights, table: NameTable, model: nn.Module, world: World) -> None:
    """Fill what this rank holds of the model. Every rank calls this; if one cannot go on, all refuse."""
    problem: UserError | None = None
    try:
        check_names_and_shapes(weights, table)
        check_aliases(weights, table)
        fill_local_model(weights, table, model)
    except UserError as refused:
        problem = refused
    problems: Iterable[UserError | None] = all_gather_objects(problem, world.everyone)
    if first := next((each for each in problems if each), None):
        raise first


@torch.no_grad()
def fill_local_model(weights: FolderWeights, table: NameTable, model: nn.Module) -> None:
    """What this rank holds, from files that were checked."""
    for name, held in local_tensors(model).items():
        fill_local_tensor(name, held, weights, table)


def fill_local_tensor(name: str, held: LocalTensor, weights: FolderWeights, table: NameTable) -> None:
    """One tensor, of a stack one expert at a time. A selection bias that the family has not is zero."""
    pieces = table.pieces_by_ours.get(name, [])
    if not pieces and name.endswith("load.bias_E"):
        held.tensor.zero_()
        return
    if not pieces:
        raise UserError(f'"{name}" has no place in the name table of this family; the model differs from config.json')
    first, count = held.part[0]
    experts = range(count) if held.stacked else [None]
    filled = 0
    for expert in experts:
        box = held.part if expert is None else ((first + expert, 1), *held.part[1:])
        for piece in pieces:
            if got := read_piece_values(piece, box, weights.fetch_box):
                shared, values = got
                here = tuple(
                    (start - corner, size) for (start, size), (corner, _) in zip(shared, held.part, strict=True)
                )
                held.tensor[box_slices(here)].copy_(values)
                filled += values.numel()
    if filled != held.tensor.numel():
        raise UserError(f'"{name}" has {held.tensor.numel()} values here, of which the files give {filled}')


def check_aliases(weights: FolderWeights, table: NameTable) -> None:
    """Tensors that are there under a second name must be the same ones."""
    differing: list[str] = []
    for twin in table.aliases:
        if twin.theirs in weights.tensors:
            rows, *rest = weights.tensors[twin.theirs].shape
            step = max(1, COMPARED_BYTES // (4 * max(1, rest[0] if rest else 1)))
            boxes = [((at, min(step, rows - at)), *((0, size) for size in rest)) for at in range(0, rows, step)]
            if not all(torch.equal(weights.fetch_box(twin.theirs, b), weights.fetch_box(twin.of, b)) for b in boxes):
                differing.append(f'"{twin.theirs}" differs from "{twin.of}"; this model has one tensor for both')
    if differing:
        raise UserError(f"{weights.folder.path} holds tensors twice that are not equal:", *differing)


def our_box_fetcher(weights: FolderWeights, table: NameTable) -> FetchBox:
    """Boxes of our tensors, put together from a folder's."""

    def fetch_our_box(name: str, box: tuple[Range, ...]) -> torch.Tensor:
        found: torch.Tensor | None = None
        for piece in table.pieces_by_ours[name]:
            if got := read_piece_values(piece, box, weights.fetch_box):
                shared, values = got
                found = values.new_empty([size for _, size in box]) if found is None else found
                here = tuple((start - corner, size) for (start, size), (corner, _) in zip(shared, box, strict=True))
                found[box_slices(here)].copy_(values)
        assert found is not None
        return found

    return fetch_our_box
