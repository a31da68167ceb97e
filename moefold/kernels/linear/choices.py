"""Implementations of linear layers. Torch-free."""

from __future__ import annotations

from moefold.kernels.choice import Choice, Choices, runs_on_cuda

CHOICES: Choices = {
    "linear": (
        Choice(
            "fused_dgrad",
            runs_on_cuda,
            "cuda",
            "GEMMs accumulate the gradient of a shared input and write weight gradients in their places",
        ),
    ),
    "grouped_linear": (),
    "fp8_product": (),
    "fp8_weight_product": (),
}
