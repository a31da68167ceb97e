"""Initial weights depend on the parameter's name and the seed, and on nothing else: not on layout, device or order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from moefold.layout.declare import DeclaredParameter, declared_parameters


def initialise_parameters(model: nn.Module, seed: int) -> None:
    """Fill every declared parameter. Each slice is drawn by its own generator, so that threads may share the work."""
    cores = os.cpu_count()
    with torch.no_grad(), ThreadPoolExecutor(cores) as threads:
        slices = parameter_slices(model)
        fills = [partial(fill_parameter_slice, *piece, seed) for piece in slices]
        work = [threads.submit(fill) for fill in fills]
    for filled in work:
        filled.result()


def parameter_slices(model: nn.Module) -> Iterator[tuple[str, DeclaredParameter, Tensor]]:
    """(name, parameter, view to fill): a whole parameter, or each expert's matrix of a stacked one."""
    for parameter in declared_parameters(model):
        if parameter.declaration.stacked:
            first, _ = parameter.part[0]
            views = parameter.tensor.unbind(0)
            for expert, view in enumerate(views, start=first):
                yield f"{parameter.name}/{expert}", parameter, view
        else:
            yield parameter.name, parameter, parameter.tensor


@torch.no_grad()
def fill_parameter_slice(name: str, parameter: DeclaredParameter, view: Tensor, seed: int) -> None:
    declaration = parameter.declaration
    std = declaration.std
    if std is None:
        view.fill_(1.0)
        return
    if std == 0:
        view.zero_()
        return
    # the whole slice is drawn on every rank, which keeps its part
    shape = declaration.shape[declaration.stacked :]
    whole = torch.empty(shape, dtype=torch.float32, device="cpu")
    generator = generator_for(name, seed)
    whole.normal_(0.0, std, generator=generator)
    part = parameter.part[declaration.stacked :]
    held = [slice(start, start + size) for start, size in part]
    view.copy_(whole[tuple(held)])


def generator_for(name: str, seed: int) -> torch.Generator:
    label = f"{seed}/{name}".encode()
    digest = hashlib.sha256(label).digest()
    number = int.from_bytes(digest[:7], "big")
    return torch.Generator("cpu").manual_seed(number)
