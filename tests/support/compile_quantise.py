"""Compile the kernels of quantisation, of adapters, of stashed rows and of rows between ranks for Hopper, which needs
no GPU, and print how each casts and stores.

A cast makes two bytes in one 16-bit register. Where that register is both stored whole, as half of four bytes, and
split into its bytes, ptxas 12.8 makes code that splits a register before the cast has written it: the transposed bytes
are wrong. Such casts are counted.

python -m tests.support.compile_quantise
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import product
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from moefold.anatomy.announced_choices import BLOCK_TOKENS
from moefold.config.base_formats import BASE_FORMATS
from moefold.config.precision_recipes import MX_BLOCK, NV_BLOCK
from moefold.kernels.experts import low_rank_triton, row_stash_triton
from moefold.kernels.quantise import (
    base_codecs_triton,
    delayed_tiles_triton,
    gather_tiles_triton,
    hadamard_triton,
    line_maxima_triton,
    mx_blocks_triton,
    nv_blocks_triton,
    payload_triton,
    quantise_tiles_launch,
    quantise_tiles_triton,
    quantise_weight_hopper,
    quantise_weight_launch,
    quantise_weight_triton,
    scale_lines_triton,
)
from moefold.kernels.quantise.fp8 import BLOCK, E4M3, E5M2
from moefold.kernels.routing import peer_plan_triton, peer_rows_triton, peer_signals_triton, rows_triton

HOPPER = GPUTarget("cuda", 90, 32)
FP8, FP32, INT32 = "*fp8e4nv", "*fp32", "*i32"
SCALE_CONSTANTS = {"LARGEST": E4M3.largest, "POWER_OF_TWO": False, "BLOCK": BLOCK}


def compile_for_hopper(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> str:
    """The PTX of a kernel."""
    return compiled_kernel(kernel, types, constants, options).asm["ptx"]


def compiled_kernel(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    odd: Collection[str] = (),
) -> Any:
    """A kernel whose other arguments are 32-bit integers; all but those that are `odd` are multiples of 16."""
    names = list(kernel.arg_names)
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [name for name, kind in signature.items() if kind != "constexpr" and name not in odd]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    make_source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = make_source(kernel, signature, values, attributes)
    return compile_kernel(source, target=HOPPER, options=options)


TILE_TYPES = {"tiles_M4": INT32, "values_PD": FP8, "row_scales": FP32, "values_MDB": FP8, "column_scales_MD": FP32}
TILE_TYPES |= {"index_R": INT32, "parts_BP": FP32, "columns_MD": FP32}
ABSENT_ROWS = {"values_PD": None, "row_scales": None}
ABSENT_COLUMNS = {"values_MDB": None, "column_scales_MD": None}
WAYS = [  # scales of rows, scales of columns, arguments that are absent
    ("block", "block", {}),
    ("given", "given", {"index_R": None}),
    ("block", None, ABSENT_COLUMNS),
    (None, "block", ABSENT_ROWS),
]


def tile_kernels() -> Iterator[tuple[str, str]]:
    module = quantise_tiles_triton
    for source, (rows, columns, absent) in product(("*bf16", FP32), WAYS):
        constants = SCALE_CONSTANTS | {"ROWS": rows, "COLUMNS": columns} | absent
        types = TILE_TYPES | {"source_ND": source}
        ptx = compile_for_hopper(module.quantise_tiles_kernel, types, constants, module.ROOM)
        yield f"quantise tiles, {source}, rows {rows}, columns {columns}", ptx
    types = TILE_TYPES | {"source_ND": "*bf16"}
    yield "tile maxima", compile_for_hopper(module.tile_maxima_kernel, types, SCALE_CONSTANTS, module.ROOM)


DELAYED_TYPES = TILE_TYPES | {"rows_E": FP32, "columns_EC": FP32, "scales_P": FP32, "scales_MD": FP32}
DELAYED_TYPES |= {"maxima_MD": FP32, "saturated": "*i64", "source_ND": "*bf16"}
DELAYED_WAYS = [  # arguments that are absent
    ("both copies, gathered", {}),
    ("rows alone", {"values_MDB": None, "scales_MD": None, "index_R": None}),
    ("columns alone", {"values_PD": None, "scales_P": None, "index_R": None}),
]


def delayed_kernels() -> Iterator[tuple[str, str]]:
    constants = {"LARGEST": E4M3.largest, "SATURATES": E4M3.saturates, "BLOCK": BLOCK}
    for name, kernel in (
        ("Triton", delayed_tiles_triton.TRITON_KERNEL),
        ("Gluon", quantise_tiles_launch.GLUON_DELAYED_KERNEL),
    ):
        options = {key: value for key, value in kernel.options.items() if key != "BLOCK"}
        for (about, absent), channels in product(DELAYED_WAYS, (1, 2048)):
            some = constants | absent | {"D": 2048, "C": channels}
            ptx = compile_for_hopper(kernel.quantise, DELAYED_TYPES, some, options)
            yield f"quantise delayed, {name}, {about}, scales of {channels}", ptx
    module = delayed_tiles_triton
    types = dict.fromkeys(("maxima_MD", "first_tile_E", "used", "experts_E", "channels_ED"), INT32)
    constants = {"TILES": module.TILES, "COLUMNS": module.COLUMNS}
    yield "note maxima", compile_for_hopper(module.note_maxima_kernel, types, constants, {"num_warps": 4})


WEIGHT_TYPES = {"values_END": FP8, "values_EDN": FP8, "scales_EIJ": FP32, "scales_EJI": FP32}
WEIGHT_TYPES |= dict.fromkeys(("scales_EN", "scales_ED", "outputs_JEN", "inputs_IED"), FP32)
WEIGHT_MODULES = [  # name, kernels, options of their launches
    ("Triton", quantise_weight_triton, quantise_weight_triton.ROOM),
    ("Gluon", quantise_weight_hopper, quantise_weight_launch.ROOM),
]


def weight_kernels() -> Iterator[tuple[str, str]]:
    for source, (name, module, room) in product(("*bf16", FP32), WEIGHT_MODULES):
        types = WEIGHT_TYPES | {"w_END": source}
        for about, kernel in (
            ("weight blocks", module.quantise_blocks_kernel),
            ("weight maxima", module.weight_maxima_kernel),
            ("weight with scales", module.quantise_with_scales_kernel),
        ):
            yield f"{about}, {name}, {source}", compile_for_hopper(kernel, types, SCALE_CONSTANTS, room)


def row_kernels() -> Iterator[tuple[str, str]]:
    module = gather_tiles_triton
    constants = {"BLOCK": BLOCK, "ROWS": module.ROWS, "COLS": module.COLS, "SCALES": module.SCALES}
    types = {"bytes_ND": "*u8", "bytes_PD": "*u8", "tiles_M4": INT32, "index_R": INT32}
    types |= {"scales_NB": FP32, "scales_BP": FP32}
    yield "gather tiles", compile_for_hopper(module.gather_tiles_kernel, types, constants, {"num_warps": 8})
    names = ("ends_E", "tiles_M4", "count", "pads_E", "first_tile_E")
    constants = {"TILE": 128, "PAD": 128, "WIDTH": 64, "BLOCK": rows_triton.TILES_PER_PROGRAM}
    types = dict.fromkeys(names, INT32)
    yield "row tiles", compile_for_hopper(rows_triton.row_tiles_kernel, types, constants, {"num_warps": 4})


MICRO_TYPES = {"source": "*bf16", "out": "*bf16", "encodes": FP32, "rows": "*i64", "columns": "*i64", "packed": INT32}
MICRO_TYPES |= {"decodes": FP32, "places": "*i64", "maxima": INT32}
TILE = {"TILE_M": 32, "TILE_N": 128, "stride_n": 1}
ROWS_IN_BLOCKS = {"HEIGHT": 1, "stride_a": 0, "stride_m": 1}


def micro_kernels() -> Iterator[tuple[str, str]]:
    mx, nv = mx_blocks_triton, nv_blocks_triton
    options = {"num_warps": 4}
    fewer_warps = {"num_warps": hadamard_triton.WARPS}
    for height in (1, MX_BLOCK):
        types = MICRO_TYPES | {"values": FP8, "scales": "*u8"}
        constants = TILE | {"HEIGHT": height, "BLOCK": MX_BLOCK, "UP": True}
        constants |= {"places": None}
        yield f"micro MXFP8, {height} lines", compile_for_hopper(mx.quantise_mx_kernel, types, constants, options)
    gathered = ROWS_IN_BLOCKS | {"TILE_M": 128, "TILE_N": MX_BLOCK, "BLOCK": MX_BLOCK, "UP": True}
    yield "micro MXFP8, columns", compile_for_hopper(mx.quantise_mx_kernel, types, gathered, options)
    yield "micro MXFP8, back", compile_for_hopper(mx.dequantise_mx_kernel, types, constants, options)
    types = MICRO_TYPES | {"scales": FP8}
    for height, random in ((1, "lines"), (1, "matrices"), (NV_BLOCK, None)):
        constants = TILE | {"HEIGHT": height, "BLOCK": NV_BLOCK, "RANDOM": random, "EXACT": False}
        constants |= {} if random else {"rows": None, "columns": None}
        about = f"micro NVFP4, {height} lines, random {random}"
        yield about, compile_for_hopper(nv.quantise_nv_kernel, types, constants, options)
    rounded = TILE | {"HEIGHT": 1, "BLOCK": NV_BLOCK, "RANDOM": "lines", "EXACT": True, "scales": None}
    to_bf16 = types | {"packed": "*bf16"}
    yield "micro NVFP4, rounded", compile_for_hopper(nv.quantise_nv_kernel, to_bf16, rounded, options)
    yield "micro NVFP4, back", compile_for_hopper(nv.dequantise_nv_kernel, types, constants, fewer_warps)
    gathered = ROWS_IN_BLOCKS | {"TILE_M": 256, "TILE_N": NV_BLOCK, "BLOCK": NV_BLOCK}
    yield "micro Hadamard", compile_for_hopper(hadamard_triton.hadamard_kernel, MICRO_TYPES, gathered, fewer_warps)
    of_one = gathered | {"M": 1}  # which a launch makes a constant of
    yield (
        "micro Hadamard, one line",
        compile_for_hopper(hadamard_triton.hadamard_kernel, MICRO_TYPES, of_one, fewer_warps),
    )
    types = {"x_LN": "*bf16", "maxima_L": FP32}
    yield "micro maxima", compile_for_hopper(line_maxima_triton.line_maxima_kernel, types, {"SPAN": 4096}, options)
    types = {"x_LN": "*bf16", "factor_L": FP32, "out_LN": "*bf16"}
    yield (
        "micro scaled lines",
        compile_for_hopper(scale_lines_triton.scale_lines_kernel, types, {"SPAN": 2048}, options),
    )


def payload_kernels() -> Iterator[tuple[str, str]]:
    """Payloads of rows and of channels, in both formats."""
    module = payload_triton
    options = {"num_warps": 4}
    for format, source in ((E4M3, FP32), (E5M2, "*bf16")):
        types: dict[str, str] = dict.fromkeys(("x_ND", "x_nND", "total_ND"), source)
        types.update(dict.fromkeys(("payload_NB", "payload_nNB", "payload_B", "payload_nB"), "*u8"))
        constants = {"LARGEST": format.largest, "POWER_OF_TWO": True, "NUMBERS": module.NUMBERS[format.name]}
        constants |= {"BLOCKS": 16, "SPAN": BLOCK, "stride_d": 1, "TILE": BLOCK, "CHANNELS": module.CHANNELS}
        for about, kernel, further in (
            ("rows to payload", module.rows_to_payload_kernel, {}),
            ("sum of payloads", module.sum_payload_rows_kernel, module.SUM_OPTIONS),
            ("channels to payload", module.channels_to_payload_kernel, {}),
            ("payloads to channels", module.payloads_to_channels_kernel, {}),
        ):
            yield f"{about}, {format.name}", compile_for_hopper(kernel, types, constants, options | further)
    one_row = constants | {"N": 1}  # which a launch makes a constant of
    yield "channels to payload, one row", compile_for_hopper(module.channels_to_payload_kernel, types, one_row, options)
    yield (
        "payloads to channels, one row",
        compile_for_hopper(module.payloads_to_channels_kernel, types, one_row, options),
    )


STORED = {"fp8": (FP8, "*u8"), "nf4": ("*u8", "*bf16"), "nf4_double": ("*u8", "*u8"), "mxfp4": ("*u8", "*u8")}


def base_kernels() -> Iterator[tuple[str, str]]:
    module = base_codecs_triton
    for format, (values, scales) in STORED.items():
        types = {"values": values, "scales": scales, "tops": FP32, "numbers": FP32, "out": "*bf16"}
        form = BASE_FORMATS[format]
        tile = {"TILE_ROWS": module.TILE_ROWS, "TILE_BYTES": module.TILE_BYTES}
        constants = tile | {"FORMAT": format, "BLOCK": form.block * form.bits // 8, "GROUP": form.group}
        constants |= {} if form.group else {"tops": None}
        yield f"base {format}", compile_for_hopper(module.dequantise_rows_kernel, types, constants, {"num_warps": 4})


def adapter_kernels() -> Iterator[tuple[str, str]]:
    """Products with A and with B, and the gradients of both."""
    module = low_rank_triton
    names = ("source", "matrices", "narrow_RL", "out_RL", "out")
    types = dict.fromkeys(names, "*bf16") | {"factor": "fp32"}
    types |= dict.fromkeys(("tiles_M4", "count", "ends_E", "starts_E"), INT32) | {"index_R": "*i64"}
    options = {"num_warps": 4, "num_stages": 4}
    tile = {"TILE": rows_triton.TILE, "DEPTH": module.DEPTH, "WIDTH": 16, "COLUMNS": module.COLUMNS}
    for by_row in (True, False):
        rows = tile | {"BY_ROW": by_row} | ({} if by_row else {"index_R": None})
        yield f"narrow rows, {by_row}", compile_for_hopper(module.narrow_rows_kernel, types, rows, options)
        sums = rows | {"ADD": by_row, "starts_E": None}
        yield f"outer products, {by_row}", compile_for_hopper(module.sum_outer_products_kernel, types, sums, options)


def stash_kernels() -> Iterator[tuple[str, str]]:
    """Elements of four bytes, and of one."""
    module = row_stash_triton
    names = ("state_4", "taken_2", "pages_M", "ring_P")
    types = {"last_end": INT32} | dict.fromkeys(names, "*i64")
    yield "take pages", compile_for_hopper(module.take_pages_kernel, types, {"ROWS": 64}, {"num_warps": 1})
    for element, cell in ((INT32, 64), ("*u8", 256)):
        types |= {"x_RW": element, "pool_PC": element}
        constants = {"ROWS": 64, "CELL": cell, "RETURNS": True}
        for about, kernel in (("push rows", module.push_rows_kernel), ("pop rows", module.pop_rows_kernel)):
            yield f"{about}, {element}", compile_for_hopper(kernel, types, constants, {"num_warps": 4})


def peer_kernels() -> Iterator[tuple[str, str]]:
    """Kernels of four ranks with 32 experts each; those that write to rooms give signals."""
    signals, rows, plans = peer_signals_triton, peer_rows_triton, peer_plan_triton
    words = ("addresses", "words", "fault_2", "ids_TK", "position_E", "positions", "weights", "counts", "lost")
    integers = ("slots_Ts", "room_s", "finished", "positions_AK", "counts_PC", "index_R", "slots_NK", "ends_e")
    types = dict.fromkeys(words, "*i64") | dict.fromkeys(integers, INT32) | {"overflowed": "*i1"}
    types |= dict.fromkeys(("weights_TK", "weights_AK", "weight_R"), FP32)
    types |= dict.fromkeys(("x_R", "room_NK"), FP32) | dict.fromkeys(("last_end", "tiles_M4", "count"), INT32)
    types |= {"patience": "i64"} | dict.fromkeys(("x_TD", "out_TD", "y_RD", "room_ND"), "*bf16")
    types |= dict.fromkeys(("source_ND", "out_RD", "out_PD"), "*bf16")
    widths = {"RANKS": 4, "WIDTH": 4, "SENDERS": 4, "GROUPS": 4, "K": 8, "CHOICES": 8, "PLACES": 128, "HELD": 32}
    flags = {"CLOCKED": True, "SIGNALS": True, "CHOSEN": True, "WATCHES": True}
    tiles = {
        "ROWS": 4,
        "COLS": 1024,
        "TOKENS": BLOCK_TOKENS,
        "STEP": plans.counted_blocks(128, 32),
        "FILLED": plans.FILLED,
        "SCANNED": rows_triton.SCANNED_ROWS,
        "NUMBERS": rows.NUMBERS,
        "TILE": rows_triton.TILE,
    }
    constants = widths | flags | tiles | {"ETP": 1, "MULTIPLE": 1, "EACH": 0, "WIDE": tl.float32}
    for about, kernel, warps in (
        ("exchange signals", signals.exchange_signals_kernel, 1),
        ("announce choices", plans.announce_choices_kernel, 8),
        ("arrange arrivals", plans.arrange_arrivals_kernel, 8),
        ("push peer rows", rows.push_peer_rows_kernel, rows.WARPS),
        ("sum rows into", rows.sum_rows_into_kernel, 4),
        ("write choices into", rows.write_choices_into_kernel, rows.WARPS),
        ("spread rows", rows_triton.spread_rows_kernel, 4),
        ("gather padded rows", rows_triton.gather_padded_kernel, 8),
        ("sum peer rows", rows.sum_peer_rows_kernel, rows.WARPS),
    ):
        yield about, compile_for_hopper(kernel, types, constants, {"num_warps": warps})


CAST = re.compile(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)")
STORED_WHOLE = re.compile(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}")
SPLIT = re.compile(r"shr\.[su]16\s+%rs\d+, (%rs\d+), 8")


def casts_stored_and_split(ptx: str) -> int:
    stored = {register for pair in STORED_WHOLE.findall(ptx) for register in pair}
    split = set(SPLIT.findall(ptx))
    return len(set(CAST.findall(ptx)) & stored & split)


def main() -> None:
    for kernels in (
        tile_kernels(),
        delayed_kernels(),
        weight_kernels(),
        row_kernels(),
        micro_kernels(),
        payload_kernels(),
        base_kernels(),
        adapter_kernels(),
        stash_kernels(),
        peer_kernels(),
    ):
        for name, ptx in kernels:
            casts = len(CAST.findall(ptx))
            torn = casts_stored_and_split(ptx)
            wide_stores = len(re.findall(r"st\.global\.v4\.b32", ptx))
            rough = len(re.findall(r"div\.full|div\.approx|rcp\.approx|\.ftz|fma\.rn\.f32", ptx))
            about = f"{casts} casts, {torn} stored and split, {wide_stores} stores of 16 bytes"
            print(f"{name}: {about}, {rough} operations without IEEE rounding")


if __name__ == "__main__":
    main()
