"""The whole model: embed, blocks, predict. Its losses are sums over tokens; whoever calls divides, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from moefold.anatomy.stage_contents import Stage, whole_model_stage
from moefold.anatomy.step_specs import embed_step, look_ahead_step, predict_step, set_aside_step
from moefold.comm.collectives import all_gather
from moefold.config.run import ModelConfig
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.block import drop_from_carry, make_transformer_block, settle_residual
from moefold.model.embedding import Embedding
from moefold.model.head import FinalNorm, Head
from moefold.model.moe.balance import ExpertLoad, LayerLoads, remember_global_shares, update_selection_biases
from moefold.model.mtp import MtpLayer, labels_shifted_by, tokens_shifted_by
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Carry, Step, run_step_sequence
from moefold.model.token_layout import make_token_shard


class MicrobatchLosses(NamedTuple):
    """Sums over tokens of a microbatch: `cross_entropy` over those of this cp rank (the same on each of its tp ranks),
    `balance` over those of this rank alone, `ahead_M` the cross-entropy of each layer of multi-token prediction."""

    cross_entropy: torch.Tensor
    balance: torch.Tensor
    ahead_M: torch.Tensor


class NumberedModules(nn.Module):
    """Modules under their numbers in the whole model, of which a pipeline stage holds some: names stay the same."""

    def __init__(self, members: Mapping[int, nn.Module]):
        super().__init__()
        for number, member in members.items():
            self.add_module(str(number), member)

    def __getitem__(self, number: int) -> Any:
        return self._modules[str(number)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)


class Transformer(nn.Module):
    """What this rank holds of the model: all of it, or some pipeline stages."""

    def __init__(self, model: ModelConfig, choices: ModelParts, stages: Sequence[Stage] | None = None):
        super().__init__()
        self.model = model
        self.world = choices.world
        self.stages = list(stages) if stages is not None else [whole_model_stage(model)]
        predicts = any(stage.predicts for stage in self.stages)
        if any(stage.uses_embedding for stage in self.stages) or (predicts and model.tied_head):
            self.embedding = Embedding(model, choices.kernels, choices.world)
        self.blocks = NumberedModules(
            {n: make_transformer_block(model, n, choices) for stage in self.stages for n in stage.layers}
        )
        if predicts:
            tied = self.embedding if model.tied_head else None
            self.head = Head(model, tied, choices.kernels, choices.world)
        elif any(stage.uses_final_norm for stage in self.stages):
            self.head = FinalNorm(model, choices.kernels, choices.world)
        depths = [depth for stage in self.stages for depth in stage.ahead]
        self.ahead = NumberedModules({depth - 1: MtpLayer(model, depth, choices) for depth in depths})

    def begin(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        first: int = 0,
        begins_BS: torch.Tensor | None = None,
        imposed: Mapping[int, torch.Tensor] | None = None,
    ) -> Carry:
        """What a microbatch has with it before any step."""
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        return {
            "tokens_BS": tokens_BS,
            "labels_BS": labels_BS,
            "imposed": imposed or {},
            "share": make_token_shard(tokens_BS, self.world, first, begins_BS),
            "aux": torch.zeros((), dtype=dtype, device=tokens_BS.device),
            "streams": [],
        }

    def embed(self, carry: Carry) -> Carry:
        return {**carry, "x_TD": self.embedding(carry["share"].slice_for_cp_rank(carry["tokens_BS"]))}

    def look_ahead(self, layer: MtpLayer, carry: Carry) -> Carry:
        """A layer reads the normed stream that the head reads for the token before: the model's own, or that of the
        layer before it. This is what published weights of such layers were trained on."""
        token_C = carry["share"].slice_for_cp_rank(tokens_shifted_by(carry["tokens_BS"], layer.depth))
        streams = carry["streams"] or [normed_stream(self.head.norm, carry)]
        x_TD = layer(streams[-1], self.embedding(token_C))
        return drop_from_carry({**carry, "streams": streams, "x_TD": x_TD, "aux_before": carry["aux"]}, "given_TD")

    def set_aside(self, layer: MtpLayer, carry: Carry) -> Carry:
        """Keep the normed stream for its loss. The layer's balance losses count as much as that one does."""
        before, weight = carry["aux_before"], self.model.mtp_loss / self.model.mtp
        aux = before + weight * (carry["aux"] - before)
        streams = [*carry["streams"], normed_stream(layer.norm, carry)]
        return drop_from_carry({**carry, "streams": streams, "aux": aux}, "aux_before")

    def predict(self, carry: Carry) -> Carry:
        """One loss for each normed stream: the model's own alone, or with it those of layers ahead."""
        streams = carry["streams"] or [normed_stream(self.head.norm, carry)]
        labels = [
            carry["share"].slice_for_cp_rank(labels_shifted_by(carry["labels_BS"], m)) for m in range(len(streams))
        ]
        each = zip(streams, labels, strict=True)
        return {**carry, "losses_1M": torch.stack([self.head(h_TD, labels_C) for h_TD, labels_C in each])}

    def body(self, stage: Stage) -> list[Step]:
        """A stage's steps up to the streams. Further tokens are predicted in training only. The head's norm adds what
        the last layer gives; to another stage one stream is handed on."""
        begin = [Step(embed_step(self.model), self.embed)] if stage.embeds else []
        layers = [step for number in stage.layers for step in self.blocks[number].steps()]
        depths = stage.ahead if self.training else ()
        ahead = [step for depth in depths for step in self.bound_mtp_steps(self.ahead[depth - 1])]
        steps = [*begin, *layers, *ahead]
        if steps and not stage.predicts:
            last = steps.pop()
            steps.append(Step(last.spec, lambda carry: settle_residual(last.run(carry))))
        return steps

    def bound_mtp_steps(self, layer: MtpLayer) -> list[Step]:
        begin = Step(look_ahead_step(self.model), partial(self.look_ahead, layer))
        return [begin, *layer.block.steps(), Step(set_aside_step(self.model), partial(self.set_aside, layer))]

    def steps(self, stage: Stage) -> list[Step]:
        """A stage's steps, up to the losses if it has them."""
        return [*self.body(stage), *([Step(predict_step(self.model), self.predict)] if stage.predicts else [])]

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        first: int = 0,
        begins_BS: torch.Tensor | None = None,
        imposed: Mapping[int, torch.Tensor] | None = None,
    ) -> MicrobatchLosses:
        """For a rank that holds all stages. `first` is the number of the first sequence in the run's order. `begins_BS`
        is where the document of each token begins, if it shall see no other. `imposed` are the experts (B, S, K) that
        the routers of some layers, by their number, shall choose."""
        carry = self.begin(tokens_BS, labels_BS, first, begins_BS, imposed)
        for stage in self.stages:
            carry = run_step_sequence(self.steps(stage), carry)
        return MicrobatchLosses(carry["losses_1M"][0], carry["aux"], carry["losses_1M"][1:])

    def labelled_token_counts(self, labels_BS: torch.Tensor) -> torch.Tensor:
        """How many of the tokens behind `cross_entropy` have a label, and behind each loss of `ahead_M`: (1 + M,)."""
        share = make_token_shard(labels_BS, self.world)
        depths = range(1 + self.model.mtp)
        return torch.stack(
            [(share.slice_for_cp_rank(labels_shifted_by(labels_BS, m)) != IGNORE_INDEX).sum() for m in depths]
        )

    def logits(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """All logits (B, S, V), on a rank that holds all stages."""
        carry = self.begin(ids_BS)
        for stage in self.stages:
            carry = run_step_sequence(self.body(stage), carry)
        return self.logits_from_carry(carry)

    def logits_from_carry(self, carry: Carry) -> torch.Tensor:
        """The logits of all positions, from the end of the last stage's body."""
        share = carry["share"]
        logits_BSV = self.head(normed_stream(self.head.norm, carry)).unflatten(0, (share.sequences, -1))
        return all_gather(logits_BSV.transpose(0, 1), share.cp)[share.sequence_order].transpose(0, 1)

    def loads(self) -> list[ExpertLoad]:
        return [module for module in self.modules() if isinstance(module, ExpertLoad)]

    def remember_batch_shares(self) -> None:
        """After a pass over the whole batch that only counted: what the balance loss over it needs to know."""
        remember_global_shares(self.loads(), self.world.axis("dp", "cp", "tp"))

    def balance(self, sound: torch.Tensor | bool = True, pace: float = 1.0) -> LayerLoads:
        """After a step: move the selection biases, unless it was not `sound`; `pace` is the learning rate as a share of
        its highest. Returns what the routing came to."""
        return update_selection_biases(self.loads(), self.model.moe, self.world.axis("dp", "cp", "tp"), sound, pace)


def normed_stream(norm: AddNorm, carry: Carry) -> torch.Tensor:
    """The stream as the head reads it."""
    _, h_TD, _ = norm(carry["x_TD"], carry.get("given_TD"))
    return h_TD
