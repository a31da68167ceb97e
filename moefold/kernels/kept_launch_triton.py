"""Launches of kernels that Triton has compiled before, without what Triton asks of each argument again. Imported only
where Triton is.

Triton compiles a kernel for the types of its arguments, for integers that are 1 or multiples of 16, and for pointers to
multiples of 16 bytes. Here a launch is known by all values that are no tensors, and by the type and the alignment of
each tensor: known ones call the compiled kernel itself, others go through Triton. The interpreter compiles nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

ALIGNMENT = 16  # bytes of an address, that Triton compiles for
MOST_KNOWN = 1024  # launches; more are forgotten, so that sizes that change in every step take no memory

Grid = tuple[int, ...]

known_launches: dict[Hashable, Any] = {}


def launch_kept(kernel: Any, grid: Grid, *args: Any, num_warps: int) -> None:
    """Launch a kernel whose arguments, constants too, are given in their order."""
    key = (kernel, num_warps, launch_key(args))
    compiled = known_launches.get(key)
    if compiled is not None:
        compiled[grid](*args)
        return
    launch = kernel[grid]
    compiled = launch(*args, num_warps=num_warps)
    if compiled is None:  # by the interpreter
        return
    if len(known_launches) >= MOST_KNOWN:
        known_launches.clear()
    known_launches[key] = compiled


def launch_key(args: tuple[Any, ...]) -> Hashable:
    """What a compiled kernel depends on. A tensor of the host is pinned memory, on no device of its own."""
    parts: list[Hashable] = []
    for value in args:
        if isinstance(value, Tensor):
            parts += (value.dtype, value.data_ptr() % ALIGNMENT, value.get_device())
        else:
            parts.append(value)
    return tuple(parts)
