"""Everything a run must remember, as logical tensors: weights, balance biases, optimizer state, random state."""

from __future__ import annotations

import torch
from torch import nn

from moefold.layout.axes import World
from moefold.optim.adamw import AdamW


def tensors_of(model: nn.Module, optimizer: AdamW) -> dict[str, torch.Tensor]:
    """Model and optimizer by name. They are the live tensors, so loading into them is enough."""
    weights = {f"model.{name}": tensor.detach() for name, tensor in model.state_dict().items()}
    return weights | {f"optimizer.{name}": tensor for name, tensor in optimizer.state()}


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
