"""Implementations of the embedding and of the head with its loss. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import TILED_ROWS, Choice, Choices, always_runs, triton_computes_bf16, triton_runs

CHOICES: Choices = {
    "embedding": (
        Choice(
            "triton",
            triton_runs,
            "cuda with Triton",
            "the weight's gradient in one pass over the vocabulary, written in its place, no atomics",
        ),
    ),
    "cross_entropy": (
        Choice(
            "triton",
            triton_computes_bf16,
            "bf16 on cuda with Triton",
            "logits of a chunk are read twice and written once; the head's gradient accumulates in fp32",
        ),
        Choice("chunked", always_runs, "nothing", "holds the logits of one chunk of tokens at a time"),
        TILED_ROWS,
    ),
    "token_losses": (
        Choice("chunked", always_runs, "nothing", "holds the logits of one chunk of tokens; backward has them again"),
    ),
}
