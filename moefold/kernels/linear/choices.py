"""Implementations of linear layers. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import TILED_ROWS, Choice, Choices, hopper_bf16_runs, runs_on_cuda
from moefold.kernels.facts import Facts


def accumulating_products_run(facts: Facts) -> bool:
    """Some CPUs multiply 16-bit numbers in fp32 and round the result: there is nothing to accumulate in."""
    return runs_on_cuda(facts) or facts.dtype in ("fp32", "fp64")


FP8_GEMM = Choice(
    "gluon", hopper_bf16_runs, "bf16 on Hopper with Triton", "persistent FP8 GEMM; scales applied in registers"
)

TILES_IN_EXCHANGE = Choice(
    "triton",
    hopper_bf16_runs,
    "bf16 on Hopper with Triton",
    "tiles of the product run while rows travel; what is sent is signalled in pieces",
)

CHOICES: Choices = {
    "linear": (
        Choice(
            "fused_dgrad",
            accumulating_products_run,
            "cuda, or fp32 or fp64",
            "GEMMs accumulate the gradient of a shared input and write weight gradients in their places",
        ),
        TILED_ROWS,
    ),
    "grouped_linear": (),
    "multiply_gathered": (TILES_IN_EXCHANGE,),
    "scatter_products": (TILES_IN_EXCHANGE,),
    "project_to_heads": (TILES_IN_EXCHANGE,),
    "project_from_heads": (TILES_IN_EXCHANGE,),
    "fp8_product": (FP8_GEMM,),
    "fp8_weight_product": (FP8_GEMM,),
    "tile_weight_product": (
        Choice("gluon", hopper_bf16_runs, "bf16 on Hopper with Triton", "the bf16 expert kernel, in one launch"),
    ),
}
