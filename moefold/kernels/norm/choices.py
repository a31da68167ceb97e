"""Implementations of norms and rotary positions. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import Choice, Choices, always_runs, triton_computes
from moefold.kernels.facts import Facts

TRITON_NORM = Choice(
    "triton",
    triton_computes,
    "cuda with Triton, fp32 or bf16",
    "one pass each way; the weight's gradient without atomics",
)


def rope_kernel_runs(facts: Facts) -> bool:
    """Where bits may not depend on the batch, positions begin anew with each document: angles by sequence."""
    return triton_computes(facts) and not facts.invariant


TRITON_ROPE = Choice(
    "triton",
    rope_kernel_runs,
    "cuda with Triton, fp32 or bf16",
    "one pass each way, angles read once for all heads of a token",
)

CHOICES: Choices = {
    "rmsnorm": (
        TRITON_NORM,
        Choice("torch", always_runs, "nothing", "one fused pass where torch has one; on a CPU few passes each way"),
    ),
    "add_rmsnorm": (
        TRITON_NORM,
        Choice(
            "torch",
            always_runs,
            "nothing",
            "one fused norm where torch has one; on a CPU few passes each way",
        ),
    ),
    "rope": (
        TRITON_ROPE,
        Choice("rotate_back", always_runs, "nothing", "writes both halves in place; its backward rotates back"),
    ),
    "norm_rope": (TRITON_ROPE,),
}
