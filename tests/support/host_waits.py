"""Counts how often the host reads a tensor's value, which on a GPU means waiting for the device.

Ops whose result or its size depends on values are known by torch's tags; `tolist`, which dispatches no op on a CPU, is
counted apart.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MASKED = {"aten::index.Tensor", "aten::index_put_", "aten::index_put"}  # these wait only for masks


class CountedWaits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def note(self) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/moefold/" in frame.filename]
        place = frames[-1] if frames else traceback.extract_stack()[-3]
        self.places.append(f"{place.filename.rsplit('/', 1)[-1]}:{place.lineno} {place.line}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = bool(WAITS & set(func.tags))
        if func.name() in MASKED:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        if waits:
            self.note()
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_waits() -> Iterator[CountedWaits]:
    read_list = torch.Tensor.tolist
    counted = CountedWaits()

    def counted_list(tensor: torch.Tensor) -> Any:
        counted.note()
        return read_list(tensor)

    torch.Tensor.tolist = counted_list  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with counted:
            yield counted
    finally:
        torch.Tensor.tolist = read_list
