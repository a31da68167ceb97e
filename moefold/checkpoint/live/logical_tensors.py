"""Logical tensors: everything a run must remember (weights, balance biases, optimizer state, random state), by name.

A tensor of which a rank holds some boxes is described by its whole shape and by the boxes, both from the parameter's
declaration. So a checkpoint does not depend on the layout that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch
from torch import Tensor, nn

from moefold.checkpoint.format.boxes import (
    Box,
    IndexedBox,
    box_corner,
    box_sizes,
    box_slices,
    element_count,
    flat_range_boxes,
    relative_box,
    shifted_box,
    whole_box,
)
from moefold.checkpoint.format.ledger import TensorSpec
from moefold.layout.axes import World
from moefold.layout.declare import DeclaredParameter, PartOfTensor, declared_parameters
from moefold.layout.held_blocks import Held, HeldBlocks, elements_of, held_blocks_of
from moefold.layout.held_share import held_share_of
from moefold.shard.storage import LogicalValues


@dataclass(frozen=True)
class HeldBox:
    """A box of a logical tensor that this rank holds. `read_range` gives some of its values, flat: elements first..last
    of the flattened box. `write` sets all."""

    box: Box
    read_range: Callable[[int, int], Tensor]
    write: Callable[[Tensor], object]

    def read(self) -> Tensor:
        """All values."""
        count = element_count(self.box)
        flat = self.read_range(0, count)
        return flat.view(box_sizes(self.box))


@dataclass(frozen=True)
class TensorPart:
    """The part of a logical tensor that a rank holds. `stacked`: dim 0 counts experts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: list[HeldBox]
    stacked: bool = False

    @property
    def spec(self) -> TensorSpec:
        dtype = torch_dtype_text(self.dtype)
        return TensorSpec(dtype, self.shape, self.stacked)


LogicalTensor = Tensor | TensorPart  # a tensor that every rank holds whole needs no description
LogicalTensors = Mapping[str, LogicalTensor]
FlatValues = Tensor | LogicalValues


class CheckpointedOptimizer(Protocol):
    """The interface of an optimizer whose state is saved."""

    def state(self) -> Iterator[tuple[DeclaredParameter, str, int, FlatValues]]:
        """(parameter, kind, first, values): the values from element `first` on of this rank's flattened part."""
        ...

    def unheld_weights(self) -> Iterator[tuple[DeclaredParameter, int, FlatValues]]:
        """(parameter, first, values) of weights that the model has no values of."""
        ...


class StateProvider(Protocol):
    """Anything else that has state to save, such as the scales of a precision recipe."""

    def named_state(self) -> Iterable[tuple[str, LogicalTensor | PartOfTensor]]:
        """Live tensors by name: loading into them is enough."""
        ...


def torch_dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def collect_tensors(
    model: nn.Module, optimizer: CheckpointedOptimizer, further: Mapping[str, StateProvider] | None = None
) -> dict[str, LogicalTensor]:
    """The live tensors of model, optimizer and further providers of state, by name: loading into them is enough. The
    optimizer's are loaded last, since the model's weights may be a rounded copy of its main weights."""
    tensors = collect_model_tensors(model)
    for parameter, first, values in optimizer.unheld_weights():
        tensors[f"model.{parameter.name}"] = part_of_state(parameter, first, values)
    for prefix, provider in (further or {}).items():
        for name, tensor in provider.named_state():
            if isinstance(tensor, PartOfTensor):
                tensor = logical_part(tensor)
            tensors[f"{prefix}.{name}"] = tensor
    for parameter, kind, first, values in optimizer.state():
        part = part_of_state(parameter, first, values)
        tensors[f"optimizer.{parameter.name}.{kind}"] = part
    return tensors


def collect_model_tensors(model: nn.Module) -> dict[str, LogicalTensor]:
    """The live weights and buffers of a model, by name."""
    declared = {parameter.name: parameter for parameter in declared_parameters(model)}
    tensors: dict[str, LogicalTensor] = {}
    for name, tensor in model.state_dict().items():
        if name in declared:
            tensor = part_of_parameter(tensor.detach(), declared[name])
        tensors[f"model.{name}"] = tensor
    return tensors


def logical_part(given: PartOfTensor) -> TensorPart:
    held = hold_box(tuple(given.part), given.tensor)
    dtype = given.tensor.dtype
    return TensorPart(given.shape, dtype, [held])


def part_of_state(parameter: DeclaredParameter, first: int, values: FlatValues) -> TensorPart:
    """Optimizer state of a parameter: flat values from element `first` of the rank's flattened part on."""
    held: list[HeldBox] = []
    last = first + len(values)
    for begin, box in boxes_in_whole(first, last, parameter):
        held.append(hold_flat_box(box, begin - first, values))
    declaration = parameter.declaration
    shape = declaration.shape
    return TensorPart(shape, values.dtype, held, declaration.stacked)


def boxes_in_whole(first: int, last: int, parameter: DeclaredParameter) -> Iterator[IndexedBox]:
    """Elements first..last of this rank's flattened part of a parameter, as boxes of the whole parameter."""
    corner = box_corner(parameter.part)
    shape = parameter.tensor.shape
    for begin, box in flat_range_boxes(first, last, shape):
        yield begin, shifted_box(box, corner)


def hold_box(box: Box, values: Tensor) -> HeldBox:
    def read_range(first: int, last: int) -> Tensor:
        return values.reshape(-1)[first:last]

    return HeldBox(box, read_range, values.copy_)


def hold_flat_box(box: Box, first: int, values: FlatValues) -> HeldBox:
    """A box whose elements are contiguous in flat values, from `first` on."""
    last = first + element_count(box)
    if isinstance(values, Tensor):
        part = values[first:last].view(box_sizes(box))
        return hold_box(box, part)

    def read_range(begin: int, end: int) -> Tensor:
        return values.get(first + begin, first + end)

    def write_values(new: Tensor) -> None:
        values.put(first, last, new.flatten())

    return HeldBox(box, read_range, write_values)


def part_of_parameter(tensor: Tensor, parameter: DeclaredParameter) -> TensorPart:
    """A parameter of which this rank holds its part whole or a share of the part, in blocks or not."""
    declaration = parameter.declaration
    held: list[HeldBox] = []
    for box, values in held_boxes(tensor, parameter):
        if isinstance(values, Tensor):
            held.append(hold_box(box, values))
            continue
        parts = boxes_of_experts(box) if declaration.stacked else [box]
        for part in parts:
            window = relative_box(part, box)
            blocks = values[box_slices(window)]
            held.append(hold_blocks(part, blocks))
    shape = declaration.shape
    return TensorPart(shape, tensor.dtype, held, declaration.stacked)


def held_boxes(tensor: Tensor, parameter: DeclaredParameter) -> Iterator[tuple[Box, Held]]:
    """The boxes of a whole parameter that this rank holds, with their values. `tensor`: those of the parameter, where
    nothing else stands for it."""
    share = held_share_of(parameter.tensor)
    if share is None:
        box = tuple(parameter.part)
        blocks = held_blocks_of(parameter.tensor)
        yield box, blocks or tensor
        return
    first, values = share
    last = first + values.numel()
    for begin, box in boxes_in_whole(first, last, parameter):
        start = begin - first
        end = start + element_count(box)
        window = slice(start, end)
        elements = elements_of(values, window)
        sizes = box_sizes(box)
        yield box, elements.view(sizes)


def boxes_of_experts(box: Box) -> Iterator[Box]:
    """Boxes of one expert, so that one is dequantised at a time."""
    experts, *rest = box
    first, count = experts
    last = first + count
    for expert in range(first, last):
        yield ((expert, 1), *rest)


def hold_blocks(box: Box, blocks: HeldBlocks) -> HeldBox:
    """What blocks stand for. Whole rows are dequantised."""
    width = blocks.width

    def read_range(first: int, last: int) -> Tensor:
        first_row = first // width
        end_row = ceil(last / width)
        begin = first_row * width
        flat = blocks.view((-1, width))
        rows = flat.elements(slice(begin, end_row * width))
        values = rows.dequantised().flatten()
        return values[first - begin : last - begin]

    return HeldBox(box, read_range, blocks.copy_)


def as_tensor_part(tensor: LogicalTensor) -> TensorPart:
    if isinstance(tensor, TensorPart):
        return tensor
    box = whole_box(tensor.shape)
    held = hold_box(box, tensor)
    shape = tuple(tensor.shape)
    return TensorPart(shape, tensor.dtype, [held])


def rng_state_tensors(world: World) -> dict[str, Tensor]:
    """Copies of this rank's random generator states; `restore_rng_state` sets them."""
    state = {f"random.{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        cuda_state = torch.cuda.get_rng_state(world.device)
        state[f"random.{world.rank}.cuda"] = cuda_state
    return state


def restore_rng_state(state: dict[str, Tensor], world: World) -> None:
    torch.set_rng_state(state[f"random.{world.rank}.cpu"])
    if world.device.type == "cuda":
        cuda_state = state[f"random.{world.rank}.cuda"]
        torch.cuda.set_rng_state(cuda_state, world.device)
