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
from moefold.layout.past_keys import PastKeys
from moefold.model.block import make_transformer_block
from moefold.model.embedding import Embedding
from moefold.model.head import FinalNorm, Head
from moefold.model.moe.balance import LayerLoads, remember_global_shares, update_selection_biases
from moefold.model.moe.router import ExpertLoad, expert_loads
from moefold.model.mtp import MtpLayer, tokens_shifted_by
from moefold.model.norm import ResidualStream
from moefold.model.objective import NextTokens, Objective
from moefold.model.parts import ModelParts
from moefold.model.steps import Carry, Step, StepRewrite, Steps, drop_from_carry, run_step_sequence, steps_as_given
from moefold.model.token_layout import make_token_shard

ImposedExperts = Mapping[int, Tensor]  # expert ids (B, S, K) by layer


class MicrobatchLosses(NamedTuple):
    """Sums over tokens of a microbatch: `cross_entropy` over those of this cp rank (the same on each of its tp ranks),
    `balance` over those of this rank alone, `ahead_M` the cross-entropy of each layer of multi-token prediction."""

    cross_entropy: Tensor
    balance: Tensor
    ahead_M: Tensor


class NumberedModules(nn.Module):
    """Modules under their numbers in the whole model, of which a pipeline stage holds some: names stay the same."""

    def hold(self, number: int, member: nn.Module) -> None:
        name = str(number)
        self.add_module(name, member)

    def __getitem__(self, number: int) -> Any:
        name = str(number)
        return self._modules[name]

    def __iter__(self) -> Iterator[Any]:
        members = self._modules.values()
        return iter(members)

    def __len__(self) -> int:
        return len(self._modules)


class Transformer(nn.Module):
    """The part of the model that this rank holds: all of it, or some pipeline stages."""

    def __init__(self, model: ModelConfig, parts: ModelParts, stages: Sequence[Stage] | None = None):
        super().__init__()
        self.model = model
        self.world = parts.world
        self.tp_projections = parts.tp_projections
        self.heads_in_exchanges = parts.heads_in_exchanges
        self.rewrite_steps: StepRewrite = steps_as_given  # memory policies may join steps (memory/policy.py)
        self.objective: Objective = NextTokens(model)
        if stages is None:
            stages = [whole_model_stage(model)]
        self.stages = list(stages)
        predicts = any(stage.predicts for stage in stages)
        is_tied = predicts and model.tied_head
        # in the order of the model: embedding, blocks, head, layers that look ahead
        embeds = any(stage.uses_embedding for stage in stages)
        if embeds or is_tied:
            self.embedding = Embedding(model, parts)
        self.blocks = NumberedModules()
        for stage in stages:
            for layer in stage.layers:
                block = make_transformer_block(model, layer, parts)
                self.blocks.hold(layer, block)
        norms = any(stage.uses_final_norm for stage in stages)
        if predicts:
            tied = self.embedding if is_tied else None
            self.head = Head(model, tied, parts)
        elif norms:
            self.head = FinalNorm(model, parts)
        self.ahead = NumberedModules()
        for stage in stages:
            for depth in stage.ahead:
                mtp_layer = MtpLayer(model, depth, parts)
                self.ahead.hold(depth - 1, mtp_layer)

    def require_peers(self) -> None:
        """Fail if a rank gave no signal in an exchange of projections, as far as the host knows without a wait."""
        self.tp_projections.require_peers()
        if self.heads_in_exchanges is not None:
            self.heads_in_exchanges.require_peers()

    def begin(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        first: int | Tensor = 0,
        begins_BS: Tensor | None = None,
        imposed: ImposedExperts | None = None,
        filled_B: Tensor | None = None,
        past: PastKeys | None = None,
        cp_size: int | None = None,
        numbers_BS: Tensor | None = None,
    ) -> Carry:
        """The carry of a microbatch before the first step."""
        documents = (begins_BS, filled_B, past)
        token_shard = make_token_shard(tokens_BS, self.world, first, *documents, cp_size, numbers_BS)
        any_weight = next(self.parameters())
        wide = torch.promote_types(any_weight.dtype, torch.float32)
        no_loss = tokens_BS.new_zeros((), dtype=wide)
        return {
            "tokens_BS": tokens_BS,
            "labels_BS": labels_BS,
            "imposed": imposed or {},
            "token_shard": token_shard,
            "aux": no_loss,
            "streams": [],
        }

    # ---- steps of the model's own; those of a block are in block.py ----

    def embed(self, carry: Carry) -> Carry:
        shard = carry["token_shard"]
        tokens_BS = carry["tokens_BS"]
        tokens_C = shard.slice_for_cp_rank(tokens_BS)
        x_TD = self.embedding(tokens_C)
        stream = ResidualStream(x_TD)
        return {**carry, "stream": stream}

    def look_ahead(self, layer: MtpLayer, carry: Carry) -> Carry:
        """The input of a layer of multi-token prediction: the normed stream that the head reads for the token before
        (the model's own, or that of the MTP layer before), joined with the next token. Published weights of such layers
        were trained on this."""
        shard = carry["token_shard"]
        tokens_BS = carry["tokens_BS"]
        depth = layer.depth
        next_tokens_BS = tokens_shifted_by(tokens_BS, depth, shard.begins_BS)
        next_tokens_C = shard.slice_for_cp_rank(next_tokens_BS)
        streams = self.normed_streams(carry)
        token_TD = self.embedding(next_tokens_C)
        known_TD = streams[-1]
        x_TD = layer(known_TD, token_TD)
        next_carry = carry.copy()
        next_carry["streams"] = streams
        next_carry["stream"] = ResidualStream(x_TD)
        next_carry["aux_before"] = carry["aux"]
        return next_carry

    def set_aside(self, layer: MtpLayer, carry: Carry) -> Carry:
        """Keeps the normed stream of an MTP layer for its loss. The layer's balance losses get the weight of that
        loss."""
        before = carry["aux_before"]
        of_layer = carry["aux"] - before
        model = self.model
        weight = model.mtp_loss / model.mtp
        stream = carry["stream"]
        _, h_TD = stream.normed(layer.norm)
        next_carry = drop_from_carry(carry, "aux_before")
        next_carry["aux"] = before + weight * of_layer
        next_carry["streams"] = [*carry["streams"], h_TD]
        return next_carry

    def predict(self, carry: Carry) -> Carry:
        """The sums of the objective."""
        streams = self.normed_streams(carry)
        losses_1M = self.objective.losses(self.head, streams, carry)
        return {**carry, "losses_1M": losses_1M}

    def normed_streams(self, carry: Carry) -> list[Tensor]:
        """What the head reads: the model's own normed stream first, then those that MTP layers have set aside."""
        set_aside = carry["streams"]
        return set_aside or [self.head_input(carry)]

    def head_input(self, carry: Carry) -> Tensor:
        """The stream behind the final norm."""
        stream = carry["stream"]
        _, h_TD = stream.normed(self.head.norm)
        return h_TD

    # ---- lists of steps ----

    def body(self, stage: Stage) -> Steps:
        """A stage's steps up to the head. MTP layers run in training only. The head's norm adds the last layer's
        output; a stage without the head adds it itself, since one tensor is sent to the next stage."""
        steps: Steps = []
        if stage.embeds:
            spec = embed_step(self.model)
            step = Step(spec, self.embed)
            steps.append(step)
        for layer in stage.layers:
            block = self.blocks[layer]
            steps += block.steps()
        if self.training:
            for depth in stage.ahead:
                mtp_layer = self.ahead[depth - 1]
                steps += self.bound_mtp_steps(mtp_layer)
        if steps and not stage.predicts:
            last = steps.pop()
            run = partial(run_and_settle, last)
            settling = replace(last, run=run)
            steps.append(settling)
        return steps

    def bound_mtp_steps(self, layer: MtpLayer) -> Steps:
        block = layer.block
        number = block.layer
        model = self.model
        look_ahead = partial(self.look_ahead, layer)
        set_aside = partial(self.set_aside, layer)
        first_spec = look_ahead_step(model)
        last_spec = set_aside_step(model)
        first = Step(first_spec, look_ahead, number)
        last = Step(last_spec, set_aside, number)
        return [first, *block.steps(), last]

    def steps(self, stage: Stage) -> Steps:
        """A stage's steps, up to the losses if it has them."""
        steps = self.body(stage)
        if stage.predicts:
            spec = predict_step(self.model)
            step = Step(spec, self.predict)
            steps.append(step)
        return self.rewrite_steps(steps)

    # ---- calls on a rank that holds all stages ----

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor,
        first: int | Tensor = 0,
        begins_BS: Tensor | None = None,
        imposed: ImposedExperts | None = None,
        filled_B: Tensor | None = None,
    ) -> MicrobatchLosses:
        """`first` is the number of the first sequence in the run's order. `begins_BS` is where the document of each
        token begins, if attention stays within documents. `imposed` are expert ids (B, S, K) by layer that replace the
        routers' choices. `filled_B` are the tokens of packed sequences before their padding."""
        carry = self.begin(tokens_BS, labels_BS, first, begins_BS, imposed, filled_B)
        for stage in self.stages:
            steps = self.steps(stage)
            carry = run_step_sequence(steps, carry)
        losses_1M = carry["losses_1M"]
        loss = losses_1M[0]
        balance = carry["aux"]
        return MicrobatchLosses(loss, balance, losses_1M[1:])

    def logits(self, ids_BS: Tensor) -> Tensor:
        """All logits (B, S, V)."""
        carry = self.begin(ids_BS)
        carry = self.run_bodies(carry)
        return self.logits_from_carry(carry)

    def run_bodies(self, carry: Carry) -> Carry:
        """The carry behind the bodies of all stages, on a rank that holds every stage."""
        for stage in self.stages:
            steps = self.body(stage)
            carry = run_step_sequence(steps, carry)
        return carry

    def last_logits(self, carry: Carry) -> Tensor:
        """(B, V): the logits behind the last position of each sequence, on a rank that holds whole sequences."""
        shard = carry["token_shard"]
        h_TD = self.head_input(carry)
        by_sequence = (shard.sequences, -1)
        h_BSD = h_TD.unflatten(0, by_sequence)
        last_BD = h_BSD[:, -1]
        return self.head(last_BD)

    def logits_from_carry(self, carry: Carry) -> Tensor:
        """The logits of all positions, from the carry at the end of the last stage's body."""
        shard = carry["token_shard"]
        h_TD = self.head_input(carry)
        logits_CV = self.head(h_TD)
        by_sequence = (shard.sequences, -1)
        held_BsV = logits_CV.unflatten(0, by_sequence)
        held_sBV = held_BsV.transpose(0, 1)
        gathered_SBV = all_gather(held_sBV, shard.cp)
        in_order_SBV = gathered_SBV[shard.sequence_order]
        return in_order_SBV.transpose(0, 1)

    def loss_counts(self, labels_BS: Tensor, begins_BS: Tensor | None = None, cp_size: int | None = None) -> Tensor:
        """What each sum of the objective is a mean over, such as the number of this cp rank's tokens that have a
        label."""
        shard = make_token_shard(labels_BS, self.world, begins_BS=begins_BS, cp_size=cp_size)
        return self.objective.counts(labels_BS, shard)

    # ---- expert load ----

    def loads(self) -> list[ExpertLoad]:
        return expert_loads(self)

    def remember_batch_shares(self) -> None:
        """After a counting pass over the whole batch: the shares that the balance loss over it needs."""
        everyone = self.world.dp_cp_tp
        loads = self.loads()
        remember_global_shares(loads, everyone)

    def balance(self, sound: Tensor | bool = True, pace: float | Tensor = 1.0) -> LayerLoads:
        """After a step: moves the selection biases, unless the step was not `sound`; `pace` is the learning rate as a
        share of its highest. Returns the load of every layer's experts."""
        loads = self.loads()
        moe = self.model.moe
        everyone = self.world.dp_cp_tp
        return update_selection_biases(loads, moe, everyone, sound, pace)


def run_and_settle(step: Step, carry: Carry) -> Carry:
    """The step, with its output added to the stream."""
    carry = step.run(carry)
    stream = carry["stream"]
    settled = ResidualStream(stream.settled())
    return {**carry, "stream": settled}
