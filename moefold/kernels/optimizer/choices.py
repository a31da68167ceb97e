"""Implementations of the optimizer's passes over flat buckets. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import Choice, Choices, hopper_bf16_runs, runs_on_cuda, triton_computes
from moefold.kernels.facts import Facts
from moefold.kernels.quantise.choices import FP8_NEEDS, HOPPER_NEEDS, fp8_casts_run, fp8_gluon_runs


def fused_adamw_runs(facts: Facts) -> bool:
    return facts.dtype != "fp64" and facts.moments == "fp32" and facts.main in ("fp32", "split")


def states_run(facts: Facts) -> bool:
    """Triton casts FP8 on fewer cards than it computes on."""
    has_fp8 = "fp8" in facts.moments or "fp8" in (facts.main, facts.gradients)
    return triton_computes(facts) and (not has_fp8 or fp8_casts_run(facts))


def hopper_blocks_run(facts: Facts) -> bool:
    return triton_computes(facts) and fp8_gluon_runs(facts)


def fused_blocks_run(facts: Facts) -> bool:
    return triton_computes(facts) and fp8_casts_run(facts)


CHOICES: Choices = {
    "adamw": (
        Choice(
            "triton",
            states_run,
            "cuda with Triton, fp32 or bf16; FP8 states from compute capability 8.9 on",
            "one pass over gradients, moments, main weights and the model's, clipping included",
        ),
        Choice(
            "fused", fused_adamw_runs, "fp32 moments and main weights", "one pass over weights, gradients and moments"
        ),
    ),
    "adamw_blocks": (
        Choice(
            "gluon",
            hopper_blocks_run,
            f"{HOPPER_NEEDS}, fp32 or bf16",
            "FP8 copies are made of the updated weights in a second pass, each near the memory's speed",
        ),
        Choice(
            "triton",
            fused_blocks_run,
            f"{FP8_NEEDS}, fp32 or bf16",
            "FP8 copies are written where weights are updated, from values that are still in the cache",
        ),
        Choice(
            "fused", fused_adamw_runs, "fp32 moments and main weights", "one pass over weights, gradients and moments"
        ),
    ),
    "decode_moment": (
        Choice(
            "triton",
            states_run,
            "cuda with Triton, fp32 or bf16; FP8 states from compute capability 8.9 on",
            "one pass, so that a checkpoint's copy of moments in blocks takes no time from a step",
        ),
    ),
    "add_in_blocks": (
        Choice(
            "triton",
            states_run,
            "cuda with Triton, fp32 or bf16; FP8 states from compute capability 8.9 on",
            "one pass over a gradient and the codes of the sum",
        ),
    ),
    "add_squares": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 or bf16",
            "one pass; a few thousand squares are summed in fp32, these sums in fp64",
        ),
    ),
    "muon_momentum": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 or bf16",
            "one pass over gradient, momentum and direction, clipping included",
        ),
    ),
    "muon_weights": (
        Choice(
            "triton",
            triton_computes,
            "cuda with Triton, fp32 or bf16",
            "one pass over orthogonal matrices, main weights and the model's",
        ),
    ),
    "newton_schulz": (
        Choice(
            "gram",
            hopper_bf16_runs,
            "Hopper with Triton, bf16",
            "half the tiles of symmetric products, two products with the whole matrix",
        ),
        Choice(
            "batched",
            runs_on_cuda,
            "cuda",
            "products of all matrices of one shape at once",
        ),
    ),
}
