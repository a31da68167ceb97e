"""The transformer: embed, blocks, predict. Losses are sums over tokens; the caller divides, once.

B sequences of S positions, T tokens of this rank, C tokens of its cp rank, D width, V vocabulary, M layers of
multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moefold.anatomy.stage_contents import Stage, whole_model_stage
from moefold.anatomy.step_specs import embed_step, look_ahead_step, predict_step, set_aside_step
from moefold.comm.collectives import all_gather
from moefold.config.run import ModelConfig
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.block import make_transformer_block
from moefold.model.embedding import Embedding
from moefold.model.head import FinalNorm, Head
from moefold.model.moe.balance import LayerLoads, remember_global_shares, update_selection_biases
from moefold.model.moe.router import ExpertLoad
from moefold.model.mtp import MtpLayer, labels_shifted_by, tokens_shifted_by
from moefold.model.norm import ResidualStream
from moefold.model.parts import ModelParts
from moefold.model.steps import Carry, Step, StepRewrite, drop_from_carry, run_step_sequence, steps_as_given
from moefold.model.token_layout import TokenShard, make_token_shard


class MicrobatchLosses(NamedTuple):
    """Sums over tokens of a microbatch: `cross_entropy` over those of this cp rank (the same on each of its tp ranks),
    `balance` over those of this rank alone, `ahead_M` the cross-entropy of each layer of multi-token prediction."""

    cross_entropy: Tensor
    balance: Tensor
    ahead_M: Tensor


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
    """The part of the model that this rank holds: all of it, or some pipeline stages."""

    def __init__(self, model: ModelConfig, parts: ModelParts, stages: Sequence[Stage] | None = None):
        super().__init__()
        self.model = model
        self.world = parts.world
        self.rewrite_steps: StepRewrite = steps_as_given  # memory policies may join steps (memory/policy.py)
        self.stages = [whole_model_stage(model)] if stages is None else list(stages)
        kernels = parts.kernels
        predicts = any(stage.predicts for stage in self.stages)
        ties_embedding = predicts and model.tied_head
        # in the order of the model: embedding, blocks, head, layers that look ahead
        if ties_embedding or any(stage.uses_embedding for stage in self.stages):
            self.embedding = Embedding(model, kernels, parts.world)
        blocks: dict[int, nn.Module] = {}
        for stage in self.stages:
            for layer in stage.layers:
                blocks[layer] = make_transformer_block(model, layer, parts)
        self.blocks = NumberedModules(blocks)
        if predicts:
            tied = self.embedding if ties_embedding else None
            self.head = Head(model, tied, kernels, parts.world)
        elif any(stage.uses_final_norm for stage in self.stages):
            self.head = FinalNorm(model, kernels, parts.world)
        ahead: dict[int, nn.Module] = {}
        for stage in self.stages:
            for depth in stage.ahead:
                ahead[depth - 1] = MtpLayer(model, depth, parts)
        self.ahead = NumberedModules(ahead)

    def begin(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        first: int = 0,
        begins_BS: Tensor | None = None,
        imposed: Mapping[int, Tensor] | None = None,
    ) -> Carry:
        """The carry of a microbatch before the first step."""
        any_weight = next(self.parameters())
        wide = torch.promote_types(any_weight.dtype, torch.float32)
        return {
            "tokens_BS": tokens_BS,
            "labels_BS": labels_BS,
            "imposed": imposed or {},
            "token_shard": make_token_shard(tokens_BS, self.world, first, begins_BS),
            "aux": tokens_BS.new_zeros((), dtype=wide),
            "streams": [],
        }

    # ---- steps of the model's own; those of a block are in block.py ----

    def embed(self, carry: Carry) -> Carry:
        shard = carry["token_shard"]
        tokens_C = shard.slice_for_cp_rank(carry["tokens_BS"])
        x_TD = self.embedding(tokens_C)
        return {**carry, "stream": ResidualStream(x_TD)}

    def look_ahead(self, layer: MtpLayer, carry: Carry) -> Carry:
        """The input of a layer of multi-token prediction: the normed stream that the head reads for the token before
        (the model's own, or that of the MTP layer before), joined with the next token. Published weights of such layers
        were trained on this."""
        shard = carry["token_shard"]
        next_tokens_BS = tokens_shifted_by(carry["tokens_BS"], layer.depth)
        next_tokens_C = shard.slice_for_cp_rank(next_tokens_BS)
        streams = self.normed_streams(carry)
        token_TD = self.embedding(next_tokens_C)
        x_TD = layer(streams[-1], token_TD)
        stream = ResidualStream(x_TD)
        return {**carry, "streams": streams, "stream": stream, "aux_before": carry["aux"]}

    def set_aside(self, layer: MtpLayer, carry: Carry) -> Carry:
        """Keeps the normed stream of an MTP layer for its loss. The layer's balance losses get the weight of that
        loss."""
        before = carry["aux_before"]
        weight = self.model.mtp_loss / self.model.mtp
        aux = before + weight * (carry["aux"] - before)
        _, h_TD = carry["stream"].normed(layer.norm)
        streams = [*carry["streams"], h_TD]
        kept = drop_from_carry(carry, "aux_before")
        return {**kept, "streams": streams, "aux": aux}

    def predict(self, carry: Carry) -> Carry:
        """One loss for each normed stream: the model's own, and those of MTP layers."""
        shard = carry["token_shard"]
        losses = []
        for depth, h_TD in enumerate(self.normed_streams(carry)):
            labels_C = labels_ahead(carry["labels_BS"], depth, shard)
            losses.append(self.head(h_TD, labels_C))
        return {**carry, "losses_1M": torch.stack(losses)}

    def normed_streams(self, carry: Carry) -> list[Tensor]:
        """What the head reads: the model's own normed stream first, then those that MTP layers have set aside."""
        return carry["streams"] or [self.head_input(carry)]

    def head_input(self, carry: Carry) -> Tensor:
        """The stream behind the final norm."""
        _, h_TD = carry["stream"].normed(self.head.norm)
        return h_TD

    # ---- lists of steps ----

    def body(self, stage: Stage) -> list[Step]:
        """A stage's steps up to the head. MTP layers run in training only. The head's norm adds the last layer's
        output; a stage without the head adds it itself, since one tensor is sent to the next stage."""
        steps: list[Step] = []
        if stage.embeds:
            spec = embed_step(self.model)
            steps.append(Step(spec, self.embed))
        for layer in stage.layers:
            steps += self.blocks[layer].steps()
        if self.training:
            for depth in stage.ahead:
                steps += self.bound_mtp_steps(self.ahead[depth - 1])
        if steps and not stage.predicts:
            last = steps.pop()
            settling = replace(last, run=partial(run_and_settle, last))
            steps.append(settling)
        return steps

    def bound_mtp_steps(self, layer: MtpLayer) -> list[Step]:
        look_ahead = partial(self.look_ahead, layer)
        set_aside = partial(self.set_aside, layer)
        number = layer.block.layer
        first = Step(look_ahead_step(self.model), look_ahead, number)
        last = Step(set_aside_step(self.model), set_aside, number)
        return [first, *layer.block.steps(), last]

    def steps(self, stage: Stage) -> list[Step]:
        """A stage's steps, up to the losses if it has them."""
        steps = self.body(stage)
        if stage.predicts:
            spec = predict_step(self.model)
            steps.append(Step(spec, self.predict))
        return self.rewrite_steps(steps)

    # ---- calls on a rank that holds all stages ----

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        first: int = 0,
        begins_BS: Tensor | None = None,
        imposed: Mapping[int, Tensor] | None = None,
    ) -> MicrobatchLosses:
        """`first` is the number of the first sequence in the run's order. `begins_BS` is where the document of each
        token begins, if attention stays within documents. `imposed` are expert ids (B, S, K) by layer that replace the
        routers' choices."""
        carry = self.begin(tokens_BS, labels_BS, first, begins_BS, imposed)
        for stage in self.stages:
            carry = run_step_sequence(self.steps(stage), carry)
        losses_1M = carry["losses_1M"]
        return MicrobatchLosses(losses_1M[0], carry["aux"], losses_1M[1:])

    def logits(self, ids_BS: Tensor) -> Tensor:
        """All logits (B, S, V)."""
        carry = self.begin(ids_BS)
        for stage in self.stages:
            carry = run_step_sequence(self.body(stage), carry)
        return self.logits_from_carry(carry)

    def logits_from_carry(self, carry: Carry) -> Tensor:
        """The logits of all positions, from the carry at the end of the last stage's body."""
        shard = carry["token_shard"]
        h_TD = self.head_input(carry)
        logits_CV = self.head(h_TD)
        logits_BSV = logits_CV.unflatten(0, (shard.sequences, -1))
        gathered_SBV = all_gather(logits_BSV.transpose(0, 1), shard.cp)
        return gathered_SBV[shard.sequence_order].transpose(0, 1)

    def labelled_token_counts(self, labels_BS: Tensor) -> Tensor:
        """The number of this cp rank's tokens that have a label, for `cross_entropy` and each loss of `ahead_M`: (1 +
        M,)."""
        shard = make_token_shard(labels_BS, self.world)
        counts = []
        for depth in range(1 + self.model.mtp):
            labels_C = labels_ahead(labels_BS, depth, shard)
            is_labelled = labels_C != IGNORE_INDEX
            counts.append(is_labelled.sum())
        return torch.stack(counts)

    # ---- expert load ----

    def loads(self) -> list[ExpertLoad]:
        return [module for module in self.modules() if isinstance(module, ExpertLoad)]

    def remember_batch_shares(self) -> None:
        """After a counting pass over the whole batch: the shares that the balance loss over it needs."""
        remember_global_shares(self.loads(), self.world.dp_cp_tp)

    def balance(self, sound: Tensor | bool = True, pace: float = 1.0) -> LayerLoads:
        """After a step: moves the selection biases, unless the step was not `sound`; `pace` is the learning rate as a
        share of its highest. Returns the load of every layer's experts."""
        loads = self.loads()
        return update_selection_biases(loads, self.model.moe, self.world.dp_cp_tp, sound, pace)


def labels_ahead(labels_BS: Tensor, depth: int, shard: TokenShard) -> Tensor:
    """The labels `depth` tokens further ahead, of this cp rank's tokens: (C,)."""
    shifted_BS = labels_shifted_by(labels_BS, depth)
    return shard.slice_for_cp_rank(shifted_BS)


def run_and_settle(step: Step, carry: Carry) -> Carry:
    """The step, with its output added to the stream."""
    carry = step.run(carry)
    settled = carry["stream"].settled()
    return {**carry, "stream": ResidualStream(settled)}
