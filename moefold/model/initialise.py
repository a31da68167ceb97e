"""Initial weights depend on the parameter's name and the seed, and on nothing else: not on layout, device or order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from moefold.layout.declare import DeclaredParameter, declared_parameters


def initialise_parameters(model: nn.Module, seed: int) -> None:
    """Fill every declared parameter. Each slice is drawn by its own generator, so that threads may share the work."""
    with torch.no_grad(), ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda work: fill_parameter_slice(work[0], work[1], work[2], seed), parameter_slices(model)))


def parameter_slices(model: nn.Module) -> Iterator[tuple[str, DeclaredParameter, torch.Tensor]]:
    """(name, parameter, view to fill): a whole parameter, or each expert's matrix of a stacked one."""
    for parameter in declared_parameters(model):
        if parameter.declaration.stacked:
            first, _ = parameter.part[0]
            for i, view in enumerate(parameter.tensor.unbind(0)):
                yield f"{parameter.name}/{first + i}", parameter, view
        else:
            yield parameter.name, parameter, parameter.tensor


@torch.no_grad()
def fill_parameter_slice(name: str, parameter: DeclaredParameter, view: torch.Tensor, seed: int) -> None:
    std, stacked = parameter.declaration.std, parameter.declaration.stacked
    if not std:
        view.fill_(1.0 if std is None else 0.0)
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    shape = parameter.declaration.shape[stacked:]
    drawn = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
    view.copy_(drawn[tuple(slice(start, start + size) for start, size in parameter.part[stacked:])])
