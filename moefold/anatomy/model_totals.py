"""Parameters and FLOPs of a model, summed over its steps. Torch-free; tests compare them with the real modules."""

from __future__ import annotations

from moefold.anatomy.step_specs import StepSpec, prefixed_model_steps, prefixed_mtp_steps
from moefold.config.run import ModelConfig


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its full name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for prefix, step in (*prefixed_model_steps(model), *prefixed_mtp_steps(model)):
        for weight in step.weights:
            shapes[prefix + weight.name] = weight.shape
    return shapes


def model_steps(model: ModelConfig) -> list[StepSpec]:
    """The steps from tokens to the loss."""
    return [step for _, step in prefixed_model_steps(model)]


def mtp_steps(model: ModelConfig) -> list[StepSpec]:
    """The steps of multi-token prediction."""
    return [step for _, step in prefixed_mtp_steps(model)]


def total_parameters(model: ModelConfig) -> int:
    """Number of parameters without multi-token prediction, as models are published."""
    return sum(step.parameters for step in model_steps(model))


def mtp_parameters(model: ModelConfig) -> int:
    """Number of parameters of multi-token prediction."""
    return sum(step.parameters for step in mtp_steps(model))


def active_parameters(model: ModelConfig) -> int:
    """Number of active parameters per token: all but those of experts that are not chosen."""
    active = sum(step.active for step in model_steps(model))
    return round(active)


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs per token of forward and backward (twice the forward), multi-token prediction included, recompute not."""
    steps = model_steps(model) + mtp_steps(model)
    return 3 * sum(step.flops(seq_len) for step in steps)
