"""Blocks that stand for a frozen parameter: the parameter has its shape and dtype, and no values of its own.

Whoever fills, saves or loads weights writes and reads the blocks instead (precision/base_blocks.py makes them). Where a
rank holds a share of a parameter (layout/held_share.py), these are the places that the shares of all ranks come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class HeldBlocks(Protocol):
    """Values of a parameter, or of whole rows of it. A window reads and writes the same memory."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def width(self) -> int:
        """Values of a row."""
        ...

    def __getitem__(self, window: tuple[slice, ...]) -> HeldBlocks: ...
    def unbind(self) -> Sequence[HeldBlocks]: ...
    def numel(self) -> int: ...
    def view(self, shape: Sequence[int]) -> HeldBlocks: ...
    def elements(self, window: slice) -> HeldBlocks:
        """Elements of flat values, which have one dim of rows. The window has whole rows."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """What the blocks lie in."""
        ...

    def remade(self, make: Callable[[Tensor], Tensor]) -> HeldBlocks:
        """Blocks that lie in what `make` gives for each of these tensors."""
        ...

    def copy_(self, values: Tensor) -> object:
        """Quantise these values in place of those before; they are broadcast."""
        ...

    def dequantised(self) -> Tensor:
        """In the parameter's dtype: what products read."""
        ...


Held = Tensor | HeldBlocks


def attach_held_blocks(parameter: Tensor, blocks: HeldBlocks) -> None:
    parameter.held_blocks = blocks  # pyright: ignore[reportAttributeAccessIssue]


def held_blocks_of(parameter: Tensor) -> HeldBlocks | None:
    """The blocks that stand for the parameter; None where it has values."""
    return getattr(parameter, "held_blocks", None)


def attach_fetched_blocks(parameter: Tensor, blocks: HeldBlocks) -> None:
    parameter.fetched_blocks = blocks  # pyright: ignore[reportAttributeAccessIssue]


def blocks_to_read(parameter: Tensor) -> HeldBlocks | None:
    """The blocks that products read: where the held ones lie on the host, the places that they are fetched to."""
    return getattr(parameter, "fetched_blocks", None) or held_blocks_of(parameter)


def elements_of(flat: Held, window: slice) -> Held:
    return flat[window] if isinstance(flat, Tensor) else flat.elements(window)


def values_of(held: Held) -> Tensor:
    return held if isinstance(held, Tensor) else held.dequantised()
