"""Compile the kernels of Newton-Schulz in Gram form for Hopper, which needs no GPU, and print what products use.

python -m tests.support.compile_newton_schulz
"""

from __future__ import annotations

from collections.abc import Iterator

from moefold.kernels.optimizer import newton_schulz_triton as gram
from tests.support.compile_quantise import compile_for_hopper

TYPES = {"x_NE": "*bf16", "sums_NB": "*fp32", "least": "fp32", "add_NRR": "*fp16", "out_NRR": "*fp16"}
TYPES |= {"alpha": "fp32", "beta": "fp32", "diagonal": "fp32"}
SIZES = {"TILE": gram.TILE, "DEPTH": gram.DEPTH}


def blocks(rows: int, columns: int) -> str:
    return f"tensordesc<fp16[1, {rows}, {columns}]>"


def kernels() -> Iterator[tuple[str, str]]:
    squares = {"BLOCK": gram.SQUARES}
    yield "squares", compile_for_hopper(gram.squares_kernel, TYPES, squares, {})
    matrices = {"x_NRC": "*bf16", "out_NRC": "*fp16"}
    yield "division", compile_for_hopper(gram.divide_kernel, TYPES | matrices, {"BLOCK": gram.STRIPE}, {})
    tiles = blocks(gram.TILE, gram.DEPTH)
    both = TYPES | {"a_NRK": tiles, "b_NRK": tiles}
    symmetric = gram.symmetric_product_kernel
    yield "symmetric product and sum", compile_for_hopper(symmetric, both, SIZES | {"ADDS": True}, gram.ROOM)
    alone = SIZES | {"ADDS": False, "add_NRR": None}
    yield "symmetric product", compile_for_hopper(symmetric, both, alone, gram.ROOM)
    left = {"q_NRR": tiles, "x_NRC": blocks(gram.DEPTH, gram.TILE), "out_NRC": "*bf16"}
    yield "product", compile_for_hopper(gram.left_product_kernel, left, SIZES, gram.ROOM)


def yes_if(found: bool) -> str:
    return "yes" if found else "no"


def main() -> None:
    for name, ptx in kernels():
        lines = len(ptx.splitlines())
        wgmma = yes_if("wgmma.mma_async" in ptx)
        tma = yes_if("cp.async.bulk.tensor" in ptx)
        print(f"{name}: {lines} lines of PTX, wgmma {wgmma}, TMA {tma}")


if __name__ == "__main__":
    main()
