"""Compile the updates of AdamW and Muon for Hopper, which needs no GPU: the interpreter accepts more than the compiler
does. Print what the update with 8-bit moments and bf16 weights consists of.

python -m tests.support.compile_adamw
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from moefold.kernels.optimizer import (
    adamw_blocks_triton,
    muon_update_triton,
    optimizer_triton,
)
from moefold.kernels.optimizer.state_blocks import STATE_BLOCK
from moefold.kernels.quantise.quantise_weight_triton import ROOM
from tests.support.compile_quantise import SCALE_CONSTANTS, WEIGHT_TYPES, compile_for_hopper

WARPS = {"num_warps": 4}
TYPES = {"main": "*bf16", "gradient": "*bf16", "mean": "*i8", "square": "*u8", "weights": "*i16"}
TYPES |= {"scale": "*fp64", "scalars": "*fp64", "mean_scales": "*fp32", "square_scales": "*fp32", "n": "i64"}
TYPES |= {"beta1": "fp32", "beta2": "fp32", "eps": "fp32"}
PLAIN = {"main": "*fp32", "mean": "*fp32", "square": "*fp32"}
SPLIT = {"main": "*i16", "mean": "*bf16", "square": "*bf16"}
MUON_TYPES = TYPES | {"direction": "*bf16", "momentum": "*bf16", "orthogonal": "*bf16"}
MUON_TYPES |= {"beta": "fp32", "matrix_scale": "fp32", "first": "i64"}
BLOCKS = {"BLOCKS": optimizer_triton.BLOCKS_PER_PROGRAM, "BLOCK": STATE_BLOCK}


def modes(split: bool = False, copy: bool = False, stochastic: bool = False) -> dict[str, Any]:
    without_blocks = {"main_scales": None, "gradient_scales": None}
    return {"SPLIT": split, "COPY": copy, "STOCHASTIC": stochastic, "STOCHASTIC_MAIN": True} | without_blocks


def update_kernels() -> Iterator[tuple[str, str]]:
    flat = optimizer_triton.adamw_kernel
    block = {"BLOCK": optimizer_triton.BLOCK}
    yield "fp32", compile_for_hopper(flat, TYPES | PLAIN, modes(copy=True) | block, WARPS)
    yield "bf16 moments, split", compile_for_hopper(flat, TYPES | SPLIT, modes(True, True, True) | block, WARPS)
    tiles = optimizer_triton.adamw_in_blocks_kernel
    mixed = TYPES | {"main": "*fp32", "mean": "*fp32"}
    constants = modes(copy=True) | BLOCKS | {"mean_scales": None}
    yield "fp32 and int8 moments", compile_for_hopper(tiles, mixed, constants, WARPS)
    fp8 = TYPES | {"mean": "*fp8e4nv", "square": "*fp8e4nv"}
    yield "fp8 moments, no main weights", compile_for_hopper(tiles, fp8, modes() | BLOCKS, WARPS)
    for name, dtype in {"int8": "*i8", "fp8": "*fp8e4nv", "fp16": "*fp16"}.items():
        scales = {"main_scales": "*fp32", "gradient_scales": "*fp32"}
        types = TYPES | scales | {"main": dtype, "gradient": dtype}
        constants = {key: value for key, value in modes(copy=True).items() if key not in scales}
        yield f"{name} main weights and gradients", compile_for_hopper(tiles, types, constants | BLOCKS, WARPS)
        types |= {"codes": dtype, "scales": "*fp32", "x": "*bf16"}
        sums = optimizer_triton.add_in_blocks_kernel
        yield f"{name} sums", compile_for_hopper(sums, types, BLOCKS | {"ADDS": True}, WARPS)
    decode = optimizer_triton.decode_moment_kernel
    types = TYPES | {"values": "*fp32", "codes": "*u8", "scales": "*fp32"}
    yield "decoded moment", compile_for_hopper(decode, types, BLOCKS | {"SECOND": True}, WARPS)
    copies = adamw_blocks_triton.adamw_blocks_kernel
    types = WEIGHT_TYPES | TYPES | PLAIN | {"updated": "*bf16"}
    constants = SCALE_CONSTANTS | modes(copy=True) | {"ROUND": False, "ROWS": adamw_blocks_triton.ROWS}
    yield "fp32, FP8 copies", compile_for_hopper(copies, types, constants, ROOM)
    momentum = muon_update_triton.muon_momentum_kernel
    constants = {"NESTEROV": True, "STOCHASTIC": True} | block
    yield "Muon's momentum", compile_for_hopper(momentum, MUON_TYPES, constants, WARPS)
    weights = muon_update_triton.muon_weights_kernel
    constants = {"SPLIT": False, "COPY": False, "STOCHASTIC": True} | block
    yield "Muon's weights, no main weights", compile_for_hopper(weights, MUON_TYPES, constants, WARPS)


def main() -> None:
    for name, ptx in update_kernels():
        print(f"{name}: {len(ptx.splitlines())} lines of PTX")
    kernel = optimizer_triton.adamw_in_blocks_kernel
    ptx = compile_for_hopper(kernel, TYPES, modes() | BLOCKS, WARPS)
    elements = BLOCKS["BLOCKS"] * STATE_BLOCK // (32 * WARPS["num_warps"])
    loads = len(re.findall(r"ld\.global\.v4\.b32", ptx))
    stores = len(re.findall(r"st\.global\.v4\.b32", ptx))
    instructions = re.findall(r"^\t(?!//|\.)(?:@%p\d+ )?[a-z]", ptx, re.M)
    print(f"{elements} elements a thread: {loads} loads and {stores} stores of 16 bytes")
    print(f"{len(instructions) / elements:.1f} instructions of PTX an element")


if __name__ == "__main__":
    main()
