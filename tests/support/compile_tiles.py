"""Compile the products of experts inside exchanges for Hopper, which needs no GPU, and print what they are made of:
products on tensor cores, copies to shared memory, and the signals around them in the order of the code.

python -m tests.support.compile_tiles
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from moefold.anatomy.announced_choices import BLOCK_TOKENS
from moefold.kernels.experts import arriving_rows_triton, arriving_tiles_triton, returning_rows_triton
from moefold.kernels.routing import rows_triton
from tests.support.compile_quantise import FP32, INT32, compile_for_hopper

WORDS = ("addresses", "flags", "words", "fault_2", "tile_times", "piece_times", "ticks")
INTEGERS = ("slots_Ts", "counters", "index_R", "ends_P", "ends_E", "tiles_M4", "ordered_M4", "count", "slots_NK")
TYPES = dict.fromkeys(WORDS, "*i64") | dict.fromkeys(INTEGERS, INT32) | {"shift_s": INT32, "weight_R": FP32}
TYPES |= dict.fromkeys(("first_entry", "patience"), "i64")
TYPES |= dict.fromkeys(("x_TD", "gate_up", "h_R2F", "a_RF", "down", "y_RD"), "*bf16")
RANKS = {"RANKS": 4, "WIDTH": 4, "PIECES": 128, "ALL": 128, "SENDERS": 16, "K": 8, "CHOICES": 8, "CLOCKED": True}
LAUNCHES = (
    {"SENDS": True, "MULTIPLIES": True, "RECORDS": False},
    {"SENDS": True, "MULTIPLIES": True, "RECORDS": True},
    {"SENDS": True, "MULTIPLIES": False, "RECORDS": False},
    {"SENDS": False, "MULTIPLIES": True, "RECORDS": False},
)
SIGNAL = re.compile(r"atom\.global\.(sys|gpu)\.(acquire|release)|(cp\.async\.cg)|(wgmma\.mma_async)|bar\.(sync)")


def kernels_inside_exchanges() -> Iterator[tuple[str, str]]:
    tiles, first, second = arriving_tiles_triton, arriving_rows_triton, returning_rows_triton
    constants: dict[str, Any] = RANKS | {"BAND": tiles.BAND, "ROWS": rows_triton.TILE, "PIECE": BLOCK_TOKENS}
    constants |= {"SENT_ROWS": first.SENT_ROWS, "SENT_COLUMNS": first.SENT_COLUMNS, "COUNTED": second.COUNTED_ROWS}
    constants |= {"AWAITED": second.AWAITED_TOKENS, "SUMMED_ROWS": second.SUMMED_TOKENS}
    constants |= {"SUMMED_COLUMNS": second.SUMMED_COLUMNS}
    for module, kernel in ((first, first.arriving_rows_kernel), (second, second.returning_rows_kernel)):
        of_tile = constants | {"COLUMNS": module.COLUMNS, "DEPTH": module.DEPTH}
        for parts in LAUNCHES:
            ptx = compile_for_hopper(kernel, TYPES, of_tile | parts, module.OPTIONS)
            chosen = " ".join(name for name, is_there in parts.items() if is_there)
            yield f"{kernel.__name__} {chosen}", ptx
    of_order = {
        "RANKS": 4,
        "BY_LAST": False,
        "BLOCK": tiles.TILES_PER_PROGRAM,
        "COMPARED": tiles.COMPARED,
    }
    yield "order_tiles_kernel", compile_for_hopper(tiles.order_tiles_kernel, TYPES, of_order, {"num_warps": 4})


def main() -> None:
    for name, ptx in kernels_inside_exchanges():
        events = [" ".join(filter(None, found)) for found in SIGNAL.findall(ptx)]
        print(f"{name}: {', '.join(event for event, _ in groupby(events))}")


if __name__ == "__main__":
    main()
