"""Implementations of the router's ops and of moving rows. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import TILED_ROWS, Choice, Choices, always_runs, triton_computes, triton_runs
from moefold.kernels.facts import Facts


def bf16_gemm_runs(facts: Facts) -> bool:
    return facts.device == "cuda" and facts.dtype == "bf16" and facts.capability >= (8, 0)


def router_kernel_runs(facts: Facts) -> bool:
    return facts.built_in_score and triton_computes(facts)


TRITON_ROWS = Choice(
    "triton", triton_runs, "cuda with Triton", "reads and writes each row once; its backward is the other's forward"
)

CHOICES: Choices = {
    "router_logits": (
        Choice(
            "bf16_exact",
            bf16_gemm_runs,
            "bf16 on cuda",
            "fp32 sums of exact products on the tensor cores, no fp32 copies of tokens and weights",
        ),
        TILED_ROWS,
    ),
    "router_topk": (
        Choice(
            "triton",
            router_kernel_runs,
            "cuda with Triton, fp32 scores, a built-in score",
            "softmax, top-k, weights and sums for balance in one pass, no sort",
        ),
    ),
    "arrange_rows": (
        Choice("triton", triton_runs, "cuda with Triton", "a counting sort instead of a sort; no atomics"),
    ),
    "gather_rows": (
        TRITON_ROWS,
        Choice("gather_backward", always_runs, "nothing", "its backward is a gather: no atomics, the same every run"),
    ),
    "spread_rows": (
        Choice("triton", triton_runs, "cuda with Triton", "reads each source once, writes no row behind the last"),
    ),
    "sum_rows": (
        TRITON_ROWS,
        Choice("gather_backward", always_runs, "nothing", "its backward is a gather of the tokens' gradients"),
    ),
    "announce_choices": (
        Choice("triton", triton_runs, "cuda with Triton", "one launch: choices, counts and signals to all ranks"),
    ),
    "arrange_arrivals": (
        Choice("triton", triton_runs, "cuda with Triton", "all maps of rows in one pass over the choices; no sort"),
    ),
    "push_peer_rows": (Choice("triton", triton_runs, "cuda with Triton", "reads a row once for all ranks it goes to"),),
    "sum_rows_into": (Choice("triton", triton_runs, "cuda with Triton", "sums where other ranks read, no copy"),),
    "write_choices_into": (Choice("triton", triton_runs, "cuda with Triton", "one launch, which signals too"),),
    "sum_peer_rows": (Choice("triton", triton_runs, "cuda with Triton", "reads rows where they lie, sums in fp32"),),
}
