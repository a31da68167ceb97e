"""Launches of kernels that Triton has compiled before, without what Triton asks of each argument again. Imported only
where Triton is.

Triton compiles a kernel for the types of its arguments, for integers that are 1 or multiples of 16, and for pointers to
multiples of 16 bytes. Here a launch is known by all values that are no tensors, and by the type and the alignment of
each tensor: known ones call the compiled kernel itself, others go through Triton. The interpreter compiles nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

ALIGNMENT = 16  # bytes of an address, that Triton compiles for
MOST_KNOWN = 1024  # launches; more are forgotten, so that sizes that change in every step take no memory

Grid = tuple[int, ...]

known_launches: dict[Hashable, Any] = {}


def launch_kept(kernel: Any, grid: Grid, tensors: Sequence[Tensor], numbers: Sequence[Any], num_warps: int) -> None:
    """Launch a kernel whose first arguments are tensors, and whose others are numbers and constants."""
    key = (kernel, num_warps, launch_key(tensors, numbers))
    compiled = known_launches.get(key)
    if compiled is not None:
        run = compiled[three_sizes(grid)]
        run(*tensors, *numbers)
        return
    launch = kernel[grid]
    compiled = launch(*tensors, *numbers, num_warps=num_warps)
    if compiled is None:  # by the interpreter
        return
    if len(known_launches) >= MOST_KNOWN:
        known_launches.clear()
    known_launches[key] = compiled


def launch_key(tensors: Sequence[Tensor], numbers: Sequence[Any]) -> Hashable:
    """What a compiled kernel depends on. The first tensor is on the device of the launch."""
    types = tuple([x.dtype for x in tensors])
    alignments = tuple([x.data_ptr() % ALIGNMENT for x in tensors])
    return tensors[0].get_device(), types, alignments, tuple(numbers)


def three_sizes(grid: Grid) -> Grid:
    """The grid as a compiled kernel takes it: Triton completes those of its own launches alone."""
    return (*grid, 1, 1)[:3]
