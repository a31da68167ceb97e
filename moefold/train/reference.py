"""The reference model of an objective that compares with one: the weights that a run began with.

With adapters it is the run's own model without them. Where all weights are trained it is a frozen copy, which
checkpoints have too: a run that resumes compares with the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from torch import Tensor

from moefold.checkpoint.live.logical_tensors import LogicalTensor, collect_model_tensors
from moefold.data.loader import Batch
from moefold.generate.decode import evaluating
from moefold.model.objective import Preferences
from moefold.model.steps import Carry
from moefold.model.transformer import Transformer
from moefold.pipeline.executor import Executor


class Reference:
    """`as_reference`: inside of it the executor's model is the reference."""

    def __init__(
        self,
        executor: Executor,
        objective: Preferences,
        as_reference: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.executor = executor
        self.model = executor.model
        self.objective = objective
        self.as_reference = as_reference

    def score(self, microbatches: Sequence[Batch]) -> list[Batch]:
        """The microbatches with the reference's log-probabilities of their labels, on ranks that have the head."""
        found: list[Tensor] = []

        def keep_log_probabilities(carry: Carry) -> None:
            streams = self.model.normed_streams(carry)
            log_p_C = self.objective.log_probabilities(self.model.head, streams, carry)
            found.append(log_p_C)

        with self.as_reference(), evaluating(self.model):
            self.executor.forward_only(microbatches, keep_log_probabilities)
        if not found:
            return list(microbatches)
        return [replace(part, reference_C=log_p_C) for part, log_p_C in zip(microbatches, found, strict=True)]


class FrozenWeights:
    """Weights and buffers of a copy, as a checkpoint has them."""

    def __init__(self, model: Transformer):
        self.model = model
        model.requires_grad_(False)

    def named_state(self) -> Iterable[tuple[str, LogicalTensor]]:
        """Of the weights whole or in shares, as those of the run's own model."""
        tensors = collect_model_tensors(self.model)
        for name, tensor in tensors.items():
            yield name.removeprefix("model."), tensor
