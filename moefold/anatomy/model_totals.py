"""Parameters and FLOPs of a model, summed over its steps. Torch-free; tests compare them with the real modules."""

from __future__ import annotations

from moefold.anatomy.step_specs import StepSpec, prefixed_model_steps, prefixed_mtp_steps, prefixed_steps
from moefold.config.run import ModelConfig


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by its full name."""
    shapes: dict[str, tuple[int, ...]] = {}
    steps = prefixed_steps(model)
    for prefix, step in steps:
        for weight in step.weights:
            name = prefix + weight.name
            shapes[name] = weight.shape
    return shapes


def model_steps(model: ModelConfig) -> list[StepSpec]:
    """The steps from tokens to the loss."""
    return [step for _, step in prefixed_model_steps(model)]


def mtp_steps(model: ModelConfig) -> list[StepSpec]:
    """The steps of multi-token prediction."""
    return [step for _, step in prefixed_mtp_steps(model)]


def summed_parameters(steps: list[StepSpec]) -> int:
    return sum(step.parameters for step in steps)


def total_parameters(model: ModelConfig) -> int:
    """Number of parameters without multi-token prediction, as models are published."""
    return summed_parameters(model_steps(model))


def mtp_parameters(model: ModelConfig) -> int:
    """Number of parameters of multi-token prediction."""
    return summed_parameters(mtp_steps(model))


def active_parameters(model: ModelConfig) -> int:
    """Number of active parameters per token: all but those of experts that are not chosen."""
    steps = model_steps(model)
    active = sum(step.active for step in steps)
    return round(active)


def train_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs per token of forward and backward (twice the forward), multi-token prediction included, recompute not."""
    steps = model_steps(model) + mtp_steps(model)
    forward = sum(step.flops(seq_len) for step in steps)
    return 3 * forward
