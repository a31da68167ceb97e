"""Compile the kernels of generation and of largest logits for Hopper, which needs no GPU: the interpreter accepts more
than the compiler. Print how each reads memory.

python -m tests.support.compile_generation
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from moefold.kernels.attention import cached_attention_triton, largest_logit_triton
from moefold.kernels.experts import few_rows_triton as few_experts
from moefold.kernels.linear import few_rows_triton as few_rows
from moefold.kernels.norm import rope_triton
from moefold.kernels.routing import router_triton
from tests.support.compile_quantise import compile_for_hopper, compiled_kernel

BF16, FP32, INT32, INT64 = "*bf16", "*fp32", "*i32", "*i64"
ROOMS = {"q": BF16, "k": BF16, "v": BF16, "keys": BF16, "values": BF16, "position": INT64, "begin_B": INT64}
ROOMS |= {"sink_H": BF16, "lse": FP32, "scale": "fp32"}
ROWS = {"ROWS": 16}
NO_SINKS = {"sink_H": None}
HEADS = {"MAIN": 128, "REST": 0, "WIDTH": 128, "ALL": 128, "STEP": 64, "SHARED": False}
LATENTS = {"MAIN": 512, "REST": 64, "WIDTH": 512, "ALL": 1024, "STEP": 32, "SHARED": True}
DEFAULT = {"num_warps": 4}
ROUTER_TYPES = {"logits_TE": FP32, "bias_E": FP32, "counts": INT64, "sums": FP32}
ROUTER_TYPES |= {"weights_TK": FP32, "ids_TK": INT64, "scale": "fp32"}
ROUTER_RULE = {"SCORE": "softmax", "NORMALIZE": "chosen", "CHOSEN": 1, "PAIRS": False, "IMPOSED": False}
LAYOUT = re.compile(r"^(#blocked\d*) = #ttg.blocked<(.*), order", re.M)
SUM_OF_ROWS = re.compile(r"tensor<\d+x(\d+x)f32, (#blocked\d*)>\) -> tensor<\d+xf32, #ttg.slice<\{dim = 1")
OF_COLUMNS = re.compile(r"\[\d+, (\d+)\]")


def attention_kernels() -> Iterator[tuple[str, str]]:
    kernel = cached_attention_triton.cached_attention_kernel
    parts = ROOMS | {"out": FP32}
    yield (
        "heads, several programs",
        compile_for_hopper(kernel, parts, HEADS | ROWS | NO_SINKS | {"ALONE": False}, DEFAULT),
    )
    alone = ROOMS | {"out": BF16}
    yield "heads with sinks, one program", compile_for_hopper(kernel, alone, HEADS | ROWS | {"ALONE": True}, DEFAULT)
    yield "latents", compile_for_hopper(kernel, parts, LATENTS | ROWS | NO_SINKS | {"ALONE": False}, DEFAULT)
    merge = cached_attention_triton.merge_parts_kernel
    types = ROOMS | {"parts": FP32, "out": BF16}
    yield "merged parts", compile_for_hopper(merge, types, {"PARTS": 32, "WIDTH": 128}, DEFAULT)


def logit_kernels() -> Iterator[tuple[str, str]]:
    kernel = largest_logit_triton.largest_logit_kernel
    for kind, bytes_each, width in ((BF16, 2, 128), (BF16, 2, 192), (FP32, 4, 16)):
        types = {"q": kind, "k": kind, "first": INT32, "out": FP32}
        main, rest = largest_logit_triton.split_width(width)
        tile = largest_logit_triton.tile_options((main + rest) * bytes_each)._asdict()
        options = {name: tile.pop(name) for name in ("num_warps", "num_stages")}
        constants = {"D": width, "MAIN": main, "REST": rest} | tile
        yield f"largest logits, {kind}, {width}", compile_for_hopper(kernel, types, constants, options)


def product_kernels() -> Iterator[tuple[str, str]]:
    types: dict[str, str] = dict.fromkeys(("x", "w0", "w1", "w2", "bias0", "y0", "y1", "y2"), BF16)
    for rows in (16, 64):
        tile: dict[str, Any] = {"ROWS": rows, "COLUMNS": few_rows.COLUMNS, "DEPTH": few_rows.DEPTH}
        constants = tile | {"bias1": None, "bias2": None}
        yield f"{rows} rows", compile_for_hopper(few_rows.few_rows_kernel, types, constants, few_rows.OPTIONS)
    types = dict.fromkeys(("source", "gate_up", "a", "down", "y"), BF16)
    types |= {"weight_R": FP32, "index_R": INT32, "ends_E": INT32}
    for rows, places in ((16, 64), (32, None)):
        tile = {"EXPERTS": places, "ROWS": rows, "COLUMNS": few_experts.UP_COLUMNS, "DEPTH": few_experts.DEPTH}
        up = compile_for_hopper(few_experts.few_rows_up_kernel, types, tile, few_experts.OPTIONS)
        yield f"experts up, {rows} rows", up
        tile["COLUMNS"] = few_experts.DOWN_COLUMNS
        down = compile_for_hopper(few_experts.few_rows_down_kernel, types, tile, few_experts.OPTIONS)
        yield f"experts down, {rows} rows", down


def other_kernels() -> Iterator[tuple[str, str]]:
    types = {"ids_R": INT64, "weights_R": FP32, "index_R": INT32, "slots_R": INT32, "weight_R": FP32, "ends_E": INT32}
    for rows in (8, router_triton.BLOCK):
        tile = router_triton.place_tile_shape(64, rows)
        options = {"num_warps": tile.pop("num_warps")}
        constants = tile | {"base_BE": None, "total_E": None, "K": 8, "ALONE": True}
        place = compile_for_hopper(router_triton.place_rows_kernel, types, constants, options)
        yield f"a block of {rows} rows", place
    types = {"x": BF16, "w": BF16, "cos_Sd": FP32, "sin_Sd": FP32, "out": BF16, "eps": "fp32"}
    constants = {"NORM": "full", "BACK": False, "HEADS": 16, "WIDTH": 64}
    yield "rotated heads", compile_for_hopper(rope_triton.norm_rope_kernel, types, constants, DEFAULT)


def orders_of_sums(experts: int, length: int) -> set[tuple[str, ...]]:
    """How the router's sums over a token's experts, and over its choices, lie in threads: values of a thread, threads
    of a warp, warps."""
    tile: dict[str, Any] = router_triton.topk_tile_shape(experts, 2, length)
    options = {"num_warps": tile.pop("num_warps")}
    constants = tile | ROUTER_RULE | {"K": 2, "GROUPS": 1, "PLACES": 1}
    sizes = {"E": experts, "T": length, "length": length}
    odd = [name for name, size in sizes.items() if size % 16]
    kernel = router_triton.router_topk_kernel
    code = compiled_kernel(kernel, ROUTER_TYPES, constants, options, odd).asm["ttgir"]
    layouts = {name: OF_COLUMNS.findall(layout) for name, layout in LAYOUT.findall(code)}
    return {(columns, *layouts[name]) for columns, name in SUM_OF_ROWS.findall(code)}


def compare_orders_of_sums() -> None:
    for experts in (8, 40, 60, 64, 72, 256):
        few = set[tuple[str, ...]]().union(*(orders_of_sums(experts, length) for length in (1, 2, 3, 16)))
        many = orders_of_sums(experts, 4096)
        print(f"sums over {experts} experts: {sorted(few)} of few tokens, {sorted(many)} of many")


def main() -> None:
    compare_orders_of_sums()
    for kernels in (attention_kernels, logit_kernels, product_kernels, other_kernels):
        for name, ptx in kernels():
            copies = ptx.count("cp.async.cg.shared.global") + ptx.count("cp.async.ca.shared.global")
            products = ptx.count("mma.sync") + ptx.count("wgmma.mma_async.sync")
            print(f"{name}: {copies} copies to shared memory, {products} products")


if __name__ == "__main__":
    main()
