"""Places of matrices in a flat tensor that holds them one after another, and of their blocks of 128 x 128 values."""

from __future__ import annotations

from typing import NamedTuple

from moefold.kernels.quantise.fp8 import blocks_for


class MatrixPlace(NamedTuple):
    """Matrices (E, N, D) in a flat tensor, from element `start` on; their blocks are numbered from `first_block` on."""

    start: int
    shape: tuple[int, int, int]
    first_block: int

    @property
    def stop(self) -> int:
        experts, n, d = self.shape
        return self.start + experts * n * d

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """(E, I, J)."""
        experts, n, d = self.shape
        return experts, blocks_for(n), blocks_for(d)

    @property
    def blocks(self) -> int:
        experts, i, j = self.block_shape
        return experts * i * j

    def within(self, begin: int, size: int) -> tuple[int, int]:
        """The elements of these matrices in a share of `size` elements from `begin` on, counted from `start`: first
        and last."""
        first = max(self.start, begin)
        last = min(self.stop, begin + size)
        last = max(first, last)
        return first - self.start, last - self.start


Places = tuple[MatrixPlace, ...]
