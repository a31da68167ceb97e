"""Instructions that a thread of the NVFP4 kernels executes for a value on Hopper, counted in compiled code, which needs
no GPU: without the slow path of divisions.

python -m tests.support.count_instructions
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from moefold.config.precision_recipes import NV_BLOCK
from moefold.kernels.quantise import hadamard_triton, nv_blocks_triton
from moefold.kernels.quantise.block_tiles_triton import TILE_VALUES
from tests.support.compile_quantise import FP8, MICRO_TYPES, ROWS_IN_BLOCKS, compiled_kernel

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\d\s+)?(?!NOP)[A-Z]", re.M)
SLOW_PATH = re.compile(r"BRA `\((\.L_x_\d+)\) ;[^:]*?CALL[^:]*?\n\1:")
REGISTERS = re.compile(r"REG:(\d+)")

LINES = {"TILE_M": 32, "TILE_N": 128, "stride_n": 1, "HEIGHT": 1, "BLOCK": NV_BLOCK, "encode_m": 1}
BLOCKS = {"TILE_M": 256, "TILE_N": NV_BLOCK, "HEIGHT": 1, "BLOCK": NV_BLOCK}
NEAREST = {"RANDOM": None, "rows": None, "columns": None}
ROUNDED = {"EXACT": True, "scales": None}


def nvfp4_kernels() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], int]]:
    """Name, kernel, types, constants and warps of the launches of a layer in training."""
    nv = nv_blocks_triton
    types = MICRO_TYPES | {"scales": FP8}
    to_bf16 = types | {"packed": "*bf16"}
    lines, blocks = LINES, BLOCKS | {"stride_n": 1}
    yield "rows, to nearest", nv.quantise_nv_kernel, to_bf16, lines | NEAREST | ROUNDED, 4
    yield "rows, at random", nv.quantise_nv_kernel, to_bf16, lines | ROUNDED | {"RANDOM": "lines"}, 4
    yield "columns, to nearest", nv.quantise_nv_kernel, types, blocks | NEAREST | {"EXACT": False}, 4
    yield "columns, at random", nv.quantise_nv_kernel, types, blocks | {"RANDOM": "matrices", "EXACT": False}, 4
    yield "columns, back", nv.dequantise_nv_kernel, types, BLOCKS | {"stride_m": 1}, nv.WARPS_BACK
    transform = hadamard_triton
    yield "Hadamard", transform.hadamard_kernel, MICRO_TYPES, ROWS_IN_BLOCKS | BLOCKS, transform.WARPS


def output_of(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def count_of_kernel(cubin: bytes) -> tuple[int, int]:
    """Instructions of a thread, and its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = output_of("nvdisasm", "-c", file.name)
        resources = output_of("cuobjdump", "--dump-resource-usage", file.name)
    straight, _, _ = text.partition(".weak")
    executed = SLOW_PATH.sub("BRA ;\n", straight)
    registers = REGISTERS.search(resources)
    assert registers, resources
    return len(INSTRUCTION.findall(executed)), int(registers[1])


def main() -> None:
    for name, kernel, types, constants, warps in nvfp4_kernels():
        compiled = compiled_kernel(kernel, types, constants, {"num_warps": warps})
        instructions, registers = count_of_kernel(compiled.asm["cubin"])
        values = TILE_VALUES // (32 * warps)
        print(f"{name}: {instructions / values:.1f} a value, {registers} registers")


if __name__ == "__main__":
    main()
