"""Prices of dynamic context parallelism by FLOPs: what a run knows of its model without a machine. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from moefold.anatomy.step_specs import StepSpec, block_step_specs, predict_step
from moefold.config.run import ModelConfig
from moefold.data.dynamic_context import SampleSeconds

FIXED_TOKENS = 256  # whose FLOPs take about as long as the launches of a microbatch


class FlopsPrice:
    """FLOPs of samples in forward, in place of seconds. `sent_keys`: FLOPs of attention to so many keys take as long as
    what a token has sent, by the size of its group."""

    def __init__(self, model: ModelConfig, sent_keys: Mapping[int, float]):
        blocks = [block_step_specs(model, layer) for layer in range(model.layers + model.mtp)]
        steps = [step for block in blocks for step in block]
        steps.append(predict_step(model))
        products = sum(step.matmul for step in steps)
        self.sent_keys = sent_keys
        self.each_token = 2 * products
        self.each_key = 2 * sum(step.context for step in steps)
        self.fixed = FIXED_TOKENS * self.each_token
        self.layers = Counter[StepSpec]()  # that attend, those alike together
        for step in steps:
            if step.context:
                self.layers[step] += 1

    def of_sample(self, length: int, size: int) -> SampleSeconds:
        seen = sum(count * step.context * step.seen(length) for step, count in self.layers.items())
        held = length / size
        sending = held * self.each_key * self.sent_keys[size]
        return SampleSeconds(held * self.each_token, 2 * held * seen, sending)
