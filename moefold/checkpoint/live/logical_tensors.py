"""Everything a run must remember, as logical tensors: weights, balance biases, optimizer state, random state.

A tensor of which a rank holds some boxes is described by its whole shape and their places, both read off the
declaration. So a checkpoint knows nothing of the layout that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from moefold.checkpoint.format.boxes import Box, element_count, flat_range_boxes, shifted_box, whole_box
from moefold.checkpoint.format.ledger import TensorSpec
from moefold.layout.axes import World
from moefold.layout.declare import DeclaredParameter, declared_parameters


@dataclass(frozen=True)
class HeldBox:
    """One box of a logical tensor that this rank holds: how its values are read, and how new ones are put there."""

    box: Box
    read: Callable[[], torch.Tensor]
    write: Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class TensorPart:
    """What a rank holds of a logical tensor. `stacked`: its dim 0 counts experts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: list[HeldBox]
    stacked: bool = False

    @property
    def what(self) -> TensorSpec:
        return TensorSpec(str(self.dtype).removeprefix("torch."), self.shape, self.stacked)


LogicalTensors = Mapping[str, torch.Tensor | TensorPart]  # a tensor that is held whole needs no description


class FlatState(Protocol):
    """Flat values of the optimizer that lie otherwise than a checkpoint has them."""

    dtype: torch.dtype

    def __len__(self) -> int: ...
    def get(self, first: int, last: int) -> torch.Tensor: ...
    def put(self, first: int, last: int, values: torch.Tensor) -> None: ...


class CheckpointedOptimizer(Protocol):
    """An optimizer, as a checkpoint sees it."""

    def state(self) -> Iterator[tuple[DeclaredParameter, str, int, torch.Tensor | FlatState]]:
        """(parameter, kind, first, values): the values are those of this rank's part, flattened, from there on."""
        ...


class StateProvider(Protocol):
    """Anything else that has state to save, such as the scales of a precision recipe."""

    def named_state(self) -> Iterable[tuple[str, torch.Tensor | TensorPart]]:
        """Live tensors by name: loading into them is enough."""
        ...


def collect_tensors(
    model: nn.Module, optimizer: CheckpointedOptimizer, further: Mapping[str, StateProvider] | None = None
) -> dict[str, torch.Tensor | TensorPart]:
    """Model, optimizer and further providers of state, by name. The tensors are live, so loading into them is enough.
    Optimizer state is loaded last, since the model's weights may be a rounded copy of its main weights."""
    places = {p.name: p for p in declared_parameters(model)}
    found: dict[str, torch.Tensor | TensorPart] = {}
    for name, tensor in model.state_dict().items():
        found[f"model.{name}"] = part_of_parameter(tensor.detach(), places[name]) if name in places else tensor
    for prefix, provider in (further or {}).items():
        for name, tensor in provider.named_state():
            found[f"{prefix}.{name}"] = tensor
    for parameter, kind, first, values in optimizer.state():
        made, boxes = parameter.declaration, boxes_in_whole(first, first + len(values), parameter)
        held = [hold_flat_box(box, begin - first, values) for begin, box in boxes]
        found[f"optimizer.{parameter.name}.{kind}"] = TensorPart(made.shape, values.dtype, held, made.stacked)
    return found


def boxes_in_whole(first: int, last: int, parameter: DeclaredParameter) -> Iterator[tuple[int, Box]]:
    """The elements first..last of this rank's flattened part of a parameter, as boxes of the whole parameter."""
    corner = [start for start, _ in parameter.part]
    for begin, box in flat_range_boxes(first, last, parameter.tensor.shape):
        yield begin, shifted_box(box, corner)


def hold_box(box: Box, values: torch.Tensor) -> HeldBox:
    return HeldBox(box, lambda: values, values.copy_)


def hold_flat_box(box: Box, first: int, values: torch.Tensor | FlatState) -> HeldBox:
    """The box whose elements lie one after the other in flat values, from `first` on."""
    last, sizes = first + element_count(box), [size for _, size in box]
    if isinstance(values, torch.Tensor):
        return hold_box(box, values[first:last].view(sizes))
    put = partial(values.put, first, last)
    return HeldBox(box, lambda: values.get(first, last).view(sizes), lambda new: put(new.flatten()))


def part_of_parameter(tensor: torch.Tensor, parameter: DeclaredParameter) -> TensorPart:
    made = parameter.declaration
    return TensorPart(made.shape, tensor.dtype, [hold_box(tuple(parameter.part), tensor)], made.stacked)


def as_tensor_part(tensor: torch.Tensor | TensorPart) -> TensorPart:
    if isinstance(tensor, TensorPart):
        return tensor
    return TensorPart(tuple(tensor.shape), tensor.dtype, [hold_box(whole_box(tensor.shape), tensor)])


def rng_state_tensors(world: World) -> dict[str, torch.Tensor]:
    """This rank's generators, as copies; `restore_random` puts them back."""
    state = {f"random.{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"random.{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def restore_rng_state(state: dict[str, torch.Tensor], world: World) -> None:
    torch.set_rng_state(state[f"random.{world.rank}.cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state[f"random.{world.rank}.cuda"], world.device)
