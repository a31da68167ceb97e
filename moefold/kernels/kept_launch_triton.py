"""Kept launches of kernels: all that stays the same is bound once, and what Triton has compiled is called itself.
Imported only where Triton is.

Triton compiles a kernel for the types of its arguments, for integers that are 1 or multiples of 16, and for pointers to
multiples of 16 bytes. What is bound does not change, so a launch knows what is compiled by the device, and by the types
and the alignments of the tensors that it is told. Others go through Triton. The interpreter compiles nothing.

Triton's own call inspects every argument to find the compiled form, and makes a record of the launch for the hooks of
Triton's profilers, which do not see kept launches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor
from triton.runtime.driver import driver

ALIGNMENT = 16  # bytes of an address, that Triton compiles for
NO_HOOKS = (None, None, None)  # the record of a launch, and what is called before and behind it

# without Python's frames: a forward asks some thirty tensors
ADDRESS_OF = Tensor.data_ptr
TYPE_OF = attrgetter("dtype")
LOW_BITS_OF = (ALIGNMENT - 1).__and__

Grid = tuple[int, ...]


class BoundArguments(NamedTuple):
    """Behind the tensors that a launch is told: tensors that stay where they are, and numbers and constants."""

    tensors: Sequence[Tensor]
    numbers: Sequence[Any]


class KeptLaunch:
    """A launch of a kernel, which is told its first arguments: tensors, the first of them on the device of the
    launch."""

    def __init__(self, kernel: Any, grid: Grid, bound: BoundArguments, num_warps: int):
        self.kernel = kernel
        self.grid = grid
        self.bound = bound
        self.num_warps = num_warps
        bound_addresses = [x.data_ptr() for x in bound.tensors]
        self.sizes = three_sizes(grid)
        self.last_arguments = (*bound_addresses, *bound.numbers)
        self.compiled: dict[Hashable, Any] = {}

    def __call__(self, *tensors: Tensor) -> None:
        device = tensors[0].get_device()
        addresses = list(map(ADDRESS_OF, tensors))
        key = (device, *map(TYPE_OF, tensors), *map(LOW_BITS_OF, addresses))
        compiled = self.compiled.get(key)
        if compiled is None:
            self.compile(key, tensors)
            return
        stream = driver.active.get_current_stream(device)
        handles = (stream, compiled.function, compiled.packed_metadata)
        compiled.run(*self.sizes, *handles, *NO_HOOKS, *addresses, *self.last_arguments)

    def compile(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Launch through Triton, and keep what it has compiled."""
        launch = self.kernel[self.grid]
        compiled = launch(*tensors, *self.bound.tensors, *self.bound.numbers, num_warps=self.num_warps)
        if compiled is not None:  # as by the interpreter
            self.compiled[key] = compiled


def three_sizes(grid: Grid) -> tuple[int, int, int]:
    """The grid as a compiled kernel takes it: Triton completes those of its own launches alone."""
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z
