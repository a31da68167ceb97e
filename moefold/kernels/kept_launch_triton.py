"""Kept launches of kernels: all but their tensors is bound once, and what Triton has compiled is called itself. Imported
only where Triton is.

Triton compiles a kernel for the types of its arguments, for integers that are 1 or multiples of 16, and for pointers to
multiples of 16 bytes. Numbers and constants of a kept launch are bound, so it knows what is compiled by the device, and
by the type and the alignment of each tensor. Others go through Triton. The interpreter compiles nothing.

A call of Triton's own asks all arguments for what it is compiled for, and makes a record of the launch for hooks of
Triton's profilers, which do not see kept launches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.runtime.driver import driver

ALIGNMENT = 16  # bytes of an address, that Triton compiles for
MOST_KEPT = 256  # launches of a kernel: sizes that change in every step take no memory
NO_HOOKS = (None, None, None)  # the record of a launch, and what is called before and behind it

Grid = tuple[int, ...]


class KeptLaunch:
    """A launch of a kernel whose first arguments are tensors, the first of them on the device of the launch."""

    def __init__(self, kernel: Any, grid: Grid, numbers: Sequence[Any], num_warps: int):
        self.kernel = kernel
        self.grid = grid
        self.numbers = numbers
        self.num_warps = num_warps
        self.compiled: dict[Hashable, Any] = {}

    def __call__(self, *tensors: Tensor) -> None:
        addresses = [x.data_ptr() for x in tensors]
        device = tensors[0].get_device()
        types = tuple([x.dtype for x in tensors])
        alignments = tuple([address % ALIGNMENT for address in addresses])
        key = (device, types, alignments)
        compiled = self.compiled.get(key)
        if compiled is None:
            self.compile(key, tensors)
            return
        stream = driver.active.get_current_stream(device)
        handles = (stream, compiled.function, compiled.packed_metadata)
        compiled.run(*three_sizes(self.grid), *handles, *NO_HOOKS, *addresses, *self.numbers)

    def compile(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Launch through Triton, and keep what it has compiled."""
        launch = self.kernel[self.grid]
        compiled = launch(*tensors, *self.numbers, num_warps=self.num_warps)
        if compiled is not None:  # as by the interpreter
            self.compiled[key] = compiled


def three_sizes(grid: Grid) -> Grid:
    """The grid as a compiled kernel takes it: Triton completes those of its own launches alone."""
    return (*grid, 1, 1)[:3]
