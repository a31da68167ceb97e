"""Everything a run must remember, as logical tensors: weights, balance biases, optimizer state, random state.

A tensor of which a rank holds a part is described to torch DCP by its whole shape and the part's place, both read off
the declaration. So a checkpoint knows nothing of the layout that wrote it.
"""

from __future__ import annotations

import torch
from torch import nn

from moefold.checkpoint.storage import Box, Part, boxes_of
from moefold.layout.axes import World
from moefold.layout.declare import Parameter, declared_parameters
from moefold.optim.adamw import AdamW


def tensors_of(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Model and optimizer by name. They are the live tensors, so loading into them is enough."""
    places = {p.name: p for p in declared_parameters(model)}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        held[f"model.{name}"] = part_of(tensor.detach(), places[name]) if name in places else tensor
    for parameter, kind, first, values in optimizer.state():
        boxes = boxes_in_whole(values, first, parameter)
        held[f"optimizer.{parameter.name}.{kind}"] = Part(parameter.declaration.shape, boxes, values)
    return held


def boxes_in_whole(values: torch.Tensor, first: int, parameter: Parameter) -> list[Box]:
    """Values of this rank's flattened part of a parameter, from element `first` on, as boxes of the whole parameter."""
    corner = [start for start, _ in parameter.part]
    return [
        (tuple(c + s for c, s in zip(corner, starts, strict=True)), box)
        for starts, box in boxes_of(values, first, parameter.tensor.shape)
    ]


def part_of(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """The tensor itself if this rank holds all of it, else its description as a part."""
    whole, corner = parameter.declaration.shape, tuple(start for start, _ in parameter.part)
    return tensor if tuple(tensor.shape) == whole else Part(whole, [(corner, tensor)], tensor)


def random_state(world: World) -> dict[str, torch.Tensor]:
    """This rank's generators, as copies; `restore_random` puts them back."""
    state = {f"random.{world.rank}.cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state[f"random.{world.rank}.cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def restore_random(state: dict[str, torch.Tensor], world: World) -> None:
    torch.set_rng_state(state[f"random.{world.rank}.cpu"])
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(state[f"random.{world.rank}.cuda"], world.device)
