"""Compile the dense products inside exchanges for Hopper, which needs no GPU, and print what they are made of: products
on tensor cores, copies to shared memory, and the signals around them in the order of the code.

python -m tests.support.compile_projections
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import Any, NamedTuple

from moefold.kernels.linear import (
    from_heads_triton,
    gathered_product_triton,
    scattered_product_triton,
    to_heads_triton,
)
from moefold.kernels.linear.shard_tiles_triton import TILES, TileSizes
from tests.support.compile_quantise import INT32, compiled_kernel

WORDS = ("addresses", "flags", "words", "fault_2", "tile_times", "piece_times", "ticks")
TYPES = dict.fromkeys(WORDS, "*i64") | dict.fromkeys(("counters", "begins"), INT32) | {"patience": "i64"}
WEIGHTS = ("w0", "w1", "w2")
BOXES = ("x_box", "room_box", "x_box0", "x_box1", "x_box2", "room_box0", "room_box1", "room_box2")
LAYER_ROWS = ("x0", "x1", "x2")
TYPES |= dict.fromkeys(("x", "x_TD", "y0", "y1", "y2", "y_TN", "partial_CN", "made", *WEIGHTS, *LAYER_ROWS), "*bf16")
CONSTANTS = {"RANKS": 4, "WIDTH": 4, "CLOCKED": True, "RECORDS": False, "EVEN": True}
CONSTANTS |= {"SENT_ROWS": gathered_product_triton.SENT_ROWS, "SENT_COLUMNS": gathered_product_triton.SENT_COLUMNS}
NOT_SPECIALISED = ("END0", "END1", "END2", "tile_rows", "sent_tile_rows", "flags_of_sender", "most", "me", "senders")
NOT_SPECIALISED += ("most_tile_rows", "copied_rows")
GATHER_PARTS = (("SENDS", "MULTIPLIES"), ("SENDS",), ("MULTIPLIES",))
SCATTER_PARTS = (("MULTIPLIES", "SENDS", "SUMS"), ("MULTIPLIES", "SENDS"), ("MULTIPLIES",), ("SENDS", "SUMS"))
TO_HEADS_PARTS = (("MULTIPLIES", "SENDS", "KEEPS"), ("MULTIPLIES",))
FROM_HEADS_PARTS = (("SENDS", "MULTIPLIES"), ("MULTIPLIES",))


class ExchangedKernel(NamedTuple):
    """A kernel, the parts of its launches, those that a launch may have, and which arguments become descriptors of
    rows."""

    kernel: Any
    launches: Sequence[tuple[str, ...]]
    parts: tuple[str, ...]
    boxes: tuple[str, ...]


KERNELS = (
    ExchangedKernel(gathered_product_triton.gathered_product_kernel, GATHER_PARTS, ("SENDS", "MULTIPLIES"), BOXES),
    ExchangedKernel(
        scattered_product_triton.scattered_product_kernel, SCATTER_PARTS, ("MULTIPLIES", "SENDS", "SUMS"), LAYER_ROWS
    ),
    ExchangedKernel(to_heads_triton.to_heads_kernel, TO_HEADS_PARTS, ("MULTIPLIES", "SENDS", "KEEPS"), ("x",)),
    ExchangedKernel(from_heads_triton.from_heads_kernel, FROM_HEADS_PARTS, ("SENDS", "MULTIPLIES"), BOXES),
)
EVENT = re.compile(
    r"atom\.global\.(sys|gpu)\.(acquire|release)|(cp\.async\.cg)|(cp\.async\.bulk\.tensor)|(wgmma\.mma_async)"
    r"|(fence\.proxy\.async)\.global|bar\.(sync)"
)
# of the structured code: blocks of PTX stand in any order
STRUCTURED_EVENT = re.compile(r"rmw add, (acquire), sys|ttg\.(barrier)|tt\.(load) .*tensor<\d+x\d+x!tt\.ptr")


def boxed(*shape: int) -> str:
    return f"tensordesc<bf16{list(shape)}>"


def described_types(sizes: TileSizes, boxes: tuple[str, ...], turned: bool) -> dict[str, str]:
    weight = boxed(sizes.depth, sizes.columns) if turned else boxed(sizes.columns, sizes.depth)
    return dict.fromkeys(WEIGHTS, weight) | dict.fromkeys(boxes, boxed(sizes.rows, sizes.depth))


def kernels_inside_exchanges() -> Iterator[tuple[str, Any]]:
    sizes = TILES[2]
    tile: dict[str, Any] = {"ROWS": sizes.rows, "COLUMNS": sizes.columns, "DEPTH": sizes.depth, "BAND": sizes.band}
    for (kernel, launches, names, boxes), described, turned in product(KERNELS, (False, True), (False, True)):
        types = TYPES | (described_types(sizes, boxes, turned) if described else {})
        forms: dict[str, Any] = {"DESCRIBED": described, "TURNED": turned}
        forms |= {} if described else dict.fromkeys(BOXES)
        layers = {"LAYERS": 3 if turned else 1}  # as in backward of queries, keys and values
        odd = (*NOT_SPECIALISED, *(WEIGHTS + boxes if described else ()))
        for parts in launches if not turned else launches[:1]:
            chosen = {name: name in parts for name in names}
            compiled = compiled_kernel(kernel, types, CONSTANTS | tile | layers | forms | chosen, sizes.options, odd)
            about = " ".join([name for name, is_there in (forms | chosen).items() if is_there])
            yield f"{kernel.__name__} {about}", compiled


def events_of(code: str, event: re.Pattern[str]) -> str:
    """Events of the code in its order; those that repeat once."""
    events = [" ".join(filter(None, found)) for found in event.findall(code)]
    return ", ".join(each for each, _ in groupby(events))


def main() -> None:
    for name, compiled in kernels_inside_exchanges():
        print(f"{name}: {events_of(compiled.asm['ptx'], EVENT)}")
        if "KEEPS" in name:
            print(f"copies of {name}: {events_of(compiled.asm['ttgir'], STRUCTURED_EVENT)}")


if __name__ == "__main__":
    main()
