"""A whole model for a torch loop of one's own: `moefold.Model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefold.anatomy.step_specs import prefixed_model_steps
from moefold.api.choices import Device, describe_kernels, module_config
from moefold.api.presets import preset, with_keys
from moefold.config.errors import UserError
from moefold.config.memory_regions import entries_of_expert_weights
from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.generate.decode import check_prompts, decode_ids, evaluating, tokens_that_fit
from moefold.generate.next_logits import TokenIds, model_logits
from moefold.generate.sampling import Sampling
from moefold.model.moe.balance import LayerLoads
from moefold.model.steps import Carry
from moefold.train.assemble import build_model, choose_kernels


class ModelOutput(NamedTuple):
    """`loss`: mean cross-entropy over labelled tokens, with the losses of multi-token prediction in their weight.
    `aux`: balance losses in their weight, mean over all tokens. A training loop minimises `loss + aux`."""

    loss: Tensor | None
    logits: Tensor | None
    aux: Tensor


def refuse_policies_of_steps(config: Config) -> None:
    """Refuse memory policies that need a run's step: weights that are fetched ahead, rows that a step guards."""
    memory = config.memory
    if entries_of_expert_weights(memory.offload):
        raise UserError("memory.offload = expert_weights is of runs; expected it to be left out of a model alone")
    if memory.stash != "none":
        raise UserError(f"memory.stash = {memory.stash} is of runs; set it to none for a model alone")


class Model(nn.Module):
    """A preset's model, or that of a configuration: `Model("olmoe-1b-7b", layers=4)`. Further keys are those of `model`
    with `__` for a dot: `moe__experts=16`."""

    def __init__(
        self,
        config: str | Config,
        device: Device = None,
        dtype: torch.dtype | None = None,
        seq_len: int | None = None,
        **keys: Any,
    ):
        super().__init__()
        if isinstance(config, str):
            config = preset(config)
        config = with_keys(config, keys, "model.")
        if seq_len is not None:
            config = with_keys(config, {"seq_len": seq_len}, "data.")
        config, self.world = module_config(config, device, dtype, None)
        self.config = check_config(config, 1)
        refuse_policies_of_steps(self.config)
        kernels = choose_kernels(self.config, self.world)
        self.transformer = build_model(self.config, self.world, kernels)

    def forward(self, ids: Tensor, labels: Tensor | None = None, logits: bool = False) -> ModelOutput:
        """`ids` and `labels` are (sequences, positions). A label is the token that follows its position, -100 for none.
        Logits are computed where there are no labels, or where they are asked for: the fused loss needs none."""
        if labels is ids:
            raise UserError("labels are the ids themselves; expected the token after each position, such as ids[:, 1:]")
        model = self.transformer
        carry = model.begin(ids, labels)
        carry = model.run_bodies(carry)
        loss = None
        if labels is not None:
            loss = self.mean_loss(carry)
        all_logits = None
        if logits or labels is None:
            all_logits = model.logits_from_carry(carry)
        tokens = max(1, ids.numel())
        aux = carry["aux"] / tokens
        return ModelOutput(loss, all_logits, aux)

    def generate(
        self, ids: Sequence[TokenIds], tokens: int = 200, ends: Sequence[int] = (), **sampling: Any
    ) -> list[list[int]]:
        """New tokens behind each list of ids, of any lengths: up to `tokens`, the longest sequence (`seq_len`), or the
        first of `ends`. `sampling`: temperature, top_k, top_p, min_p, seed (generate/sampling.py)."""
        prompts = [list(row) for row in ids]
        longest = self.config.data.seq_len
        check_prompts(prompts, longest, self.config.model.vocab)
        count = tokens_that_fit(prompts, longest, tokens)
        source = model_logits(self.transformer)
        with evaluating(self.transformer):
            return decode_ids(source, prompts, Sampling(**sampling), count, ends)

    def mean_loss(self, carry: Carry) -> Tensor:
        losses_1M = self.transformer.predict(carry)["losses_1M"]
        labelled_1M = self.labelled(carry["labels_BS"])
        means_1M = losses_1M / labelled_1M[: len(losses_1M)]
        own = means_1M[0]
        ahead_M = means_1M[1:]
        if len(ahead_M) == 0:
            return own
        weight = self.config.model.mtp_loss
        return own + weight * ahead_M.mean()

    def labelled(self, labels: Tensor) -> Tensor:
        counts_1M = self.transformer.loss_counts(labels)
        return counts_1M.clamp(min=1)

    def step_balance(self, pace: float = 1.0) -> LayerLoads:
        """After the optimizer's step: moves every layer's selection bias, and returns the load of its experts."""
        return self.transformer.balance(pace=pace)

    def explain(self) -> str:
        """One line for each operation: the implementation in use, and why."""
        prefixed = prefixed_model_steps(self.config.model)
        specs = [spec for _, spec in prefixed]
        return describe_kernels(specs, self.config, self.world)
