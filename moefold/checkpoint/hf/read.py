"""Read a folder of Hugging Face weights into what this rank holds of a model: its slices and no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from moefold.checkpoint.boxes import Range, slices
from moefold.checkpoint.hf.folder import Folder, Stored, shortened
from moefold.checkpoint.hf.move import Fetch, take
from moefold.checkpoint.hf.piece import Table
from moefold.checkpoint.hf.quantised import Whole, undone
from moefold.checkpoint.place import Place
from moefold.comm.collectives import gather_objects
from moefold.config.refused import Refused, did_you_mean
from moefold.layout.axes import World
from moefold.layout.declare import declared_parameters

FLOATS = ("F64", "F32", "F16", "BF16")
AT_ONCE = 1 << 28  # bytes of a twin that are compared at a time


@dataclass(frozen=True)
class Held:
    """What this rank holds of one of our tensors: the values, and where they lie in the whole."""

    tensor: torch.Tensor
    part: tuple[Range, ...]
    stacked: bool = False  # dim 0 counts experts


def held_tensors(model: nn.Module) -> dict[str, Held]:
    """Parameters and selection biases by name. Asking for the state waits for weights that are still on their way."""
    declared = {p.name: p for p in declared_parameters(model)}
    held: dict[str, Held] = {}
    for name, tensor in model.state_dict().items():
        if name in declared:
            part = tuple(declared[name].part)
            held[name] = Held(tensor.detach(), part, declared[name].declaration.stacked)
        elif name.endswith("load.bias_E"):
            held[name] = Held(tensor.detach(), tuple((0, size) for size in tensor.shape))
    return held


class Weights:
    """The tensors of a folder, whole or by slices; files are opened once."""

    def __init__(self, folder: Folder):
        self.folder = folder
        self.opened: dict[Place, Any] = {}
        self.tensors, self.problems = undone(folder.tensors, self.raw)

    def raw(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        stored: Stored = self.folder.tensors[name]
        try:
            if stored.file not in self.opened:
                self.opened[stored.file] = safe_open(stored.file, framework="pt")
            return self.opened[stored.file].get_slice(name)[slices(box)]
        except (SafetensorError, OSError) as error:
            raise Refused(f"{stored.file} cannot be read: {error}; fetch the file again") from None

    def fetch(self, name: str, box: tuple[Range, ...]) -> torch.Tensor:
        return self.tensors[name].fetch(box)


def check(weights: Weights, table: Table) -> None:
    """Refuse tensors that are missing, left over, or of another shape or kind than the model's: all at once."""
    there, expected = weights.tensors, table.by_theirs
    may_be = {twin.theirs: expected[twin.of][0].their_shape for twin in table.twins}
    may_be |= {blank.theirs: blank.shape for blank in table.blanks}
    left_over = [name for name in there if name not in expected and name not in may_be]
    missing = [name for name in expected if name not in there]
    near = left_over[:2000] if len(missing) <= 2000 else []  # of many, no guess is worth the time it takes
    found = [f'"{n}" is not in the files{did_you_mean(n, near)}' for n in missing]
    found += [f'"{n}" is in the files, but the model has no such tensor' for n in left_over]
    for name, pieces in expected.items():
        found += wrong_kind(name, there.get(name), pieces[0].their_shape)
    for name, shape in may_be.items():
        found += wrong_kind(name, there.get(name), shape)
    if problems := [*weights.problems, *found]:
        raise Refused(f"{weights.folder.path} does not fit its config.json:", *shortened(problems))


def wrong_kind(name: str, whole: Whole | None, shape: tuple[int, ...]) -> list[str]:
    if whole is None or (whole.shape == shape and whole.dtype in FLOATS):
        return []
    kinds = ", ".join(FLOATS)
    return [f'"{name}" is {whole.dtype} {list(whole.shape)}; expected one of {kinds}, {list(shape)}']


@torch.no_grad()
def load(weights: Weights, table: Table, model: nn.Module, world: World) -> None:
    """Fill what this rank holds of the model. Every rank calls this; if one cannot go on, all refuse."""
    problem: Refused | None = None
    try:
        check(weights, table)
        check_twins(weights, table)
        fill_model(weights, table, model)
    except Refused as refused:
        problem = refused
    problems: Iterable[Refused | None] = gather_objects(problem, world.everyone)
    if first := next((each for each in problems if each), None):
        raise first


@torch.no_grad()
def fill_model(weights: Weights, table: Table, model: nn.Module) -> None:
    """What this rank holds, from files that were checked."""
    for name, held in held_tensors(model).items():
        fill(name, held, weights, table)


def fill(name: str, held: Held, weights: Weights, table: Table) -> None:
    """One tensor, of a stack one expert at a time. A selection bias that the family has not is zero."""
    pieces = table.by_ours.get(name, [])
    if not pieces and name.endswith("load.bias_E"):
        held.tensor.zero_()
        return
    if not pieces:
        raise Refused(f'"{name}" has no place in the name table of this family; the model differs from config.json')
    first, count = held.part[0]
    experts = range(count) if held.stacked else [None]
    filled = 0
    for expert in experts:
        box = held.part if expert is None else ((first + expert, 1), *held.part[1:])
        for piece in pieces:
            if got := take(piece, box, weights.fetch):
                shared, values = got
                here = tuple(
                    (start - corner, size) for (start, size), (corner, _) in zip(shared, held.part, strict=True)
                )
                held.tensor[slices(here)].copy_(values)
                filled += values.numel()
    if filled != held.tensor.numel():
        raise Refused(f'"{name}" has {held.tensor.numel()} values here, of which the files give {filled}')


def check_twins(weights: Weights, table: Table) -> None:
    """Tensors that are there under a second name must be the same ones."""
    differing: list[str] = []
    for twin in table.twins:
        if twin.theirs in weights.tensors:
            rows, *rest = weights.tensors[twin.theirs].shape
            step = max(1, AT_ONCE // (4 * max(1, rest[0] if rest else 1)))
            boxes = [((at, min(step, rows - at)), *((0, size) for size in rest)) for at in range(0, rows, step)]
            if not all(torch.equal(weights.fetch(twin.theirs, b), weights.fetch(twin.of, b)) for b in boxes):
                differing.append(f'"{twin.theirs}" differs from "{twin.of}"; this model has one tensor for both')
    if differing:
        raise Refused(f"{weights.folder.path} holds tensors twice that are not equal:", *differing)


def our_boxes(weights: Weights, table: Table) -> Fetch:
    """Boxes of our tensors, put together from a folder's."""

    def fetch(name: str, box: tuple[Range, ...]) -> torch.Tensor:
        found: torch.Tensor | None = None
        for piece in table.by_ours[name]:
            if got := take(piece, box, weights.fetch):
                shared, values = got
                found = values.new_empty([size for _, size in box]) if found is None else found
                here = tuple((start - corner, size) for (start, size), (corner, _) in zip(shared, box, strict=True))
                found[slices(here)].copy_(values)
        assert found is not None
        return found

    return fetch
