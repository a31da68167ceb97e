"""Initial weights depend on the parameter's name and the seed, and on nothing else: not on layout, device or order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from moefold.config.run import ModelConfig
from moefold.layout.declare import DeclaredParameter, declared_parameters
from moefold.layout.held_blocks import Held, held_blocks_of
from moefold.layout.held_share import held_share_of
from moefold.layout.host_copies import host_copies_of

ParameterSlice = tuple[str, DeclaredParameter, Held]  # name, parameter, view to fill


def output_std(model: ModelConfig) -> float:
    """Of weights whose product is added to the stream: the smaller, the more of them there are."""
    residual_adds = 2 * model.layers
    return model.init_std / residual_adds**0.5


def allocate_parameters(model: nn.Module) -> None:
    """Give parameters that were declared without memory theirs, or that of the blocks that stand for them. What lies on
    the host has memory on the device in steps alone."""
    for parameter in declared_parameters(model):
        tensor = parameter.tensor
        if host_copies_of(tensor):
            continue
        blocks = held_blocks_of(tensor)
        held = (tensor,) if blocks is None else blocks.tensors()
        for each in held:
            memory = each.untyped_storage()
            memory.resize_(each.nbytes)


def initialise_parameters(model: nn.Module, seed: int) -> None:
    """Fill every declared parameter."""
    parameters = declared_parameters(model)
    fill_parameters(parameters, seed)


def fill_parameters(parameters: Iterable[DeclaredParameter], seed: int) -> None:
    """Fill these parameters. Each slice is drawn by its own generator, so that threads may share the work."""
    cores = os.cpu_count()
    with torch.no_grad(), ThreadPoolExecutor(cores) as threads:
        fill = partial(fill_parameter_slice, seed=seed)
        slices = parameter_slices(parameters)
        work = [threads.submit(fill, *piece) for piece in slices]
    for filled in work:
        filled.result()


def parameter_slices(parameters: Iterable[DeclaredParameter]) -> Iterator[ParameterSlice]:
    """A whole parameter, or each expert's matrix of a stacked one."""
    for parameter in parameters:
        name = parameter.name
        held = memory_to_fill(parameter.tensor)
        if not parameter.declaration.stacked:
            yield name, parameter, held
            continue
        first, _ = parameter.part[0]
        views = held.unbind()
        for expert, view in enumerate(views, start=first):
            yield f"{name}/{expert}", parameter, view


def memory_to_fill(parameter: Tensor) -> Held:
    """The parameter's own, or that of what stands for it: blocks, or a share that is all of it."""
    blocks = held_blocks_of(parameter)
    if blocks is not None:
        return blocks
    share = held_share_of(parameter)
    return parameter if share is None else share.values.view(parameter.shape)


@torch.no_grad()
def fill_parameter_slice(name: str, parameter: DeclaredParameter, view: Held, seed: int) -> None:
    values = initial_values(name, parameter, seed)
    view.copy_(values)


def initial_values(name: str, parameter: DeclaredParameter, seed: int) -> Tensor:
    """This rank's part of a slice, or the number that all its values are."""
    declaration = parameter.declaration
    std = declaration.std
    if std is None:
        return torch.ones((), device="cpu")
    if std == 0:
        return torch.zeros((), device="cpu")
    # the whole slice is drawn on every rank, which keeps its part
    stacked = declaration.stacked
    shape = declaration.shape[stacked:]
    dtype = torch.float32
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    generator = generator_for(name, seed)
    whole.normal_(0.0, std, generator=generator)
    part = parameter.part[stacked:]
    held = [slice(start, start + size) for start, size in part]
    return whole[tuple(held)]


def generator_for(name: str, seed: int) -> torch.Generator:
    label = f"{seed}/{name}".encode()
    digest = hashlib.sha256(label).digest()
    number = int.from_bytes(digest[:7], "big")
    generator = torch.Generator("cpu")
    return generator.manual_seed(number)
