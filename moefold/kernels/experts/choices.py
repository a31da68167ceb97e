"""Implementations of the experts' ops: grouped GEMMs, activations, biases, the fused MLP. Torch-free."""

from __future__ import annotations

from moefold.config.base_formats import BASE_FORMATS
from moefold.config.precision_recipes import SCALE_BLOCK, WIDTH_MULTIPLE, is_fp8
from moefold.kernels.choice import (
    TILED_ROWS,
    Choice,
    Choices,
    always_runs,
    hopper_bf16_runs,
    triton_computes,
    triton_runs,
)
from moefold.kernels.facts import Facts


def grouped_mm_runs(facts: Facts) -> bool:
    """torch.nn.functional.grouped_mm: on cuda bf16 alone, from Ampere on."""
    if not facts.rows_aligned_to(16):
        return False
    if facts.device == "cuda":
        return facts.dtype == "bf16" and facts.capability >= (8, 0)
    return facts.device == "cpu" and facts.dtype in ("fp32", "bf16", "fp16")


def expert_gemm_runs(facts: Facts) -> bool:
    """Uses Hopper's instructions (wgmma, TMA); TMA needs rows that begin at multiples of 16 bytes. Weights are plain,
    or those of a frozen base in blocks."""
    if facts.recipe != "plain" and facts.recipe not in BASE_FORMATS:
        return False
    if facts.dtype != "bf16" or facts.capability[0] != 9:
        return False
    if facts.unfused_experts or facts.invariant:
        return False
    if not facts.hidden or not facts.ffn:
        return False
    return facts.rows_aligned_to(16) and triton_runs(facts)


def fp8_experts_run(facts: Facts) -> bool:
    """FP8 kernels read rows that begin at multiples of 16 bytes; gate and up are blocks of 128 of their own."""
    if not is_fp8(facts.recipe) or facts.unfused_experts or facts.adapted_experts:
        return False
    if not facts.hidden or not facts.ffn:
        return False
    return facts.hidden % WIDTH_MULTIPLE == 0 and facts.ffn % SCALE_BLOCK == 0


def refuse_unfused_experts(facts: Facts) -> str:
    if facts.invariant:
        return "kernels.invariant: rows of experts are multiplied in tiles of their own"
    if not facts.unfused_experts:
        return ""
    return f"{facts.unfused_experts}: not on the fused expert kernel; the experts run as a composition of ops"


def refuse_adapted_experts(facts: Facts) -> str:
    if facts.adapted_experts and is_fp8(facts.recipe):
        return f"{facts.adapted_experts}: adapters are not inside FP8 products; the experts run as a composition of ops"
    return refuse_unfused_experts(facts)


TORCH_GROUPED_MM = Choice(
    "torch_grouped_mm",
    grouped_mm_runs,
    "bf16 on cuda (fp32, bf16 or fp16 on cpu) and rows that are multiples of 16 bytes",
    "one call for all experts, offsets stay on the device",
)
RECOMPUTE_BACKWARD = Choice(
    "recompute_backward", always_runs, "nothing", "saves the pre-activation only, no intermediate values"
)

TRITON_ACTIVATION = Choice(
    "triton",
    triton_computes,
    "cuda with Triton, fp32 or bf16",
    "one pass each way; saves the pre-activation only",
)

SWIGLU_PASS = Choice(
    "gluon", hopper_bf16_runs, "bf16 on Hopper with Triton", "SwiGLU's gradient quantised both ways in one read"
)
FP8_GEMM = Choice(
    "gluon", hopper_bf16_runs, "bf16 on Hopper with Triton", "SwiGLU or its gradient inside the FP8 product"
)

TRITON_STASH = Choice("triton", triton_runs, "cuda with Triton", "reads and writes the defined rows alone, once")

TILES_IN_EXCHANGE = Choice(
    "triton",
    hopper_bf16_runs,
    "bf16 on Hopper with Triton",
    "tiles of the product run while rows travel; what is sent is signalled in pieces",
)

CHOICES: Choices = {
    "swiglu": (TRITON_ACTIVATION, RECOMPUTE_BACKWARD),
    "mlp_activation": (TRITON_ACTIVATION, RECOMPUTE_BACKWARD),
    "clamped_swiglu": (RECOMPUTE_BACKWARD,),
    "expert_bias": (),
    "multiply_arrivals": (TILES_IN_EXCHANGE,),
    "return_products": (TILES_IN_EXCHANGE,),
    "push_rows": (TRITON_STASH,),
    "pop_rows": (TRITON_STASH,),
    "expert_mlp": (
        Choice(
            "gluon",
            expert_gemm_runs,
            "bf16 on Hopper with Triton, SwiGLU experts without biases, sizes that are multiples of 8",
            "activation, its gradient and adapters inside the GEMMs; saves tokens and pre-activation only",
            refusal=refuse_unfused_experts,
        ),
        Choice(
            "fp8",
            fp8_experts_run,
            "an FP8 recipe, SwiGLU experts without biases, hidden a multiple of 16 and ffn of 128",
            "tokens quantised once, activations inside the products; saves tokens, and the pre-activation in FP8",
            refusal=refuse_adapted_experts,
        ),
    ),
    "fp8_swiglu_product": (FP8_GEMM,),
    "fp8_dswiglu_product": (FP8_GEMM,),
    "quantise_swiglu_gradient": (SWIGLU_PASS,),
    "quantise_delayed_gradient": (SWIGLU_PASS,),
    "grouped_gemm": (TORCH_GROUPED_MM, TILED_ROWS),
    "grouped_gemm_weight": (TORCH_GROUPED_MM,),
}
