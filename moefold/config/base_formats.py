"""Formats of a frozen base (QLoRA): values in blocks along the inputs of a weight, with one scale a block. Torch-free.

fp8      E4M3 bytes, 128 with a power of two
nf4      4-bit indices of a table of 16 numbers, 64 with their largest magnitude, in the model's precision
nf4_double  the same with 8-bit magnitudes, 32 of them with the largest in fp32
mxfp4    E2M1, 32 with a power of two
"""

from __future__ import annotations

from dataclasses import dataclass

WIDEST_SCALE = 4  # bytes: largest magnitudes are in fp32 at most


@dataclass(frozen=True)
class BaseFormat:
    """`scale_bytes` None: a scale is in the model's precision. `group`: so many scales of a row have an fp32 scale of
    their own; 0: none has."""

    name: str
    block: int
    bits: int
    scale_bytes: int | None = 1
    group: int = 0

    @property
    def undivided(self) -> int:
        """Values of a row that ranks may not share out."""
        return self.block * max(self.group, 1)

    def blocks(self, width: int) -> int:
        """Blocks of a row; the last one may be cut short, and is stored whole."""
        return -(-width // self.block)

    def row_bytes(self, width: int, wide: float) -> float:
        """Bytes of a row of so many values, in a model whose weights have `wide` bytes."""
        scale = min(wide, WIDEST_SCALE) if self.scale_bytes is None else self.scale_bytes
        values = self.block * self.bits / 8
        return self.blocks(width) * (values + scale) + self.groups(width) * WIDEST_SCALE

    def groups(self, width: int) -> int:
        """Scales of scales of a row."""
        return -(-self.blocks(width) // self.group) if self.group else 0


BASE_FORMATS = {
    format.name: format
    for format in (
        BaseFormat("fp8", 128, 8),
        BaseFormat("nf4", 64, 4, scale_bytes=None),
        BaseFormat("nf4_double", 64, 4, group=32),
        BaseFormat("mxfp4", 32, 4),
    )
}
