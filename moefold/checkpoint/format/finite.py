"""Search of a checkpoint for values that are no numbers: NaN and infinities in its tensors. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moefold.checkpoint.format.boxes import flat_range_boxes
from moefold.checkpoint.format.ledger import TensorSpec, hash_pieces
from moefold.checkpoint.format.reader import BoxReader
from moefold.checkpoint.format.verify import OpenedCheckpoint

# Bits of the exponent, by dtype: a value whose exponent has all of them set is NaN or infinite.
EXPONENT_BITS = {
    "float64": 0x7FF << 52,
    "float32": 0xFF << 23,
    "bfloat16": 0xFF << 7,
    "float16": 0x1F << 10,
}


def tensors_without_numbers(opened: OpenedCheckpoint) -> Iterator[str]:
    """The names of tensors that hold NaN or an infinity. Types of 8 bits are not looked at: their scales are."""
    reader = opened.box_reader()
    for name in sorted(opened.index):
        spec = opened.specs[name]
        if spec.dtype not in EXPONENT_BITS:
            continue
        if holds_no_number(reader, name, spec):
            yield name


def holds_no_number(reader: BoxReader, name: str, spec: TensorSpec) -> bool:
    exponent = EXPONENT_BITS[spec.dtype]
    for piece in hash_pieces(spec):
        boxes = flat_range_boxes(piece.first, piece.last, spec.shape)
        for _, box in boxes:
            raw = reader.fetch_box(name, box)
            values = np.ascontiguousarray(raw)
            bits = values.view(f"<u{spec.itemsize}")
            mask = bits.dtype.type(exponent)
            exponents = bits & mask
            if (exponents == mask).any():
                return True
    return False
