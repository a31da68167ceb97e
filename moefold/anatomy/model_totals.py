"""Parameters and FLOPs of a model, summed over its steps. Torch-free; tests hold them against the real modules."""

from __future__ import annotations

from moefold.anatomy.step_specs import prefixed_model_steps, prefixed_mtp_steps
from moefold.config.run import ModelConfig


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its full name."""
    every = (*prefixed_model_steps(model), *prefixed_mtp_steps(model))
    return {prefix + w.name: w.shape for prefix, step in every for w in step.weights}


def total_parameters(model: ModelConfig) -> int:
    """As models are published: without the layers of multi-token prediction."""
    return sum(step.parameters for _, step in prefixed_model_steps(model))


def mtp_parameters(model: ModelConfig) -> int:
    """Those of multi-token prediction alone."""
    return sum(step.parameters for _, step in prefixed_mtp_steps(model))


def active_parameters(model: ModelConfig) -> int:
    """Parameters one token meets: all but the experts it does not visit."""
    return round(sum(step.active for _, step in prefixed_model_steps(model)))


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Forward and backward (twice the forward), multi-token prediction included, recompute not counted."""
    return 3 * sum(step.flops(seq_len) for _, step in (*prefixed_model_steps(model), *prefixed_mtp_steps(model)))
