"""A Mixture-of-Experts layer: router, dispatcher, routed experts, shared experts.

Each step of the layer is a method here, from carry to carry. `forward` runs them in the anatomy's order and a block
runs the same methods as its steps, so there is one statement of the layer. A block gives the layer the norm before it
as a member, as checkpoints name it, and applies it; neither norm nor residual connection is part of `forward`.

The carry between the steps: `h_TD` the normed tokens, `for_router_TD` the same tensor for the router, `routing`,
`receipt` (the dispatcher's metadata; one for each of the `parts` that `plan` is asked for), `latent_TL`, `rows`,
`y_RD` (results of tokens already, where these travel while experts multiply), `shared_TD`, and in the end `output_TD`;
`aux` the sum of the balance losses so far.

T tokens of this rank, D width, L width of a latent, R rows of the experts held here, K experts of a token.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from moefold.anatomy.step_specs import moe_step_specs
from moefold.config.run import ModelConfig
from moefold.dispatch.base import Receipt, plan_parts, split_routing
from moefold.dispatch.cloning_dispatcher import CloningDispatcher, for_one_layer
from moefold.dispatch.fp8_dispatcher import unquantised
from moefold.dispatch.symmetric import SymmetricDispatcher
from moefold.layout.token_numbers import numbers_of_rows
from moefold.model.moe.clones import ExpertClones
from moefold.model.moe.experts import Experts
from moefold.model.moe.router import Router
from moefold.model.moe.row_chunks import PARTS
from moefold.model.moe.shared import SharedExperts
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Carry, Region, StepMethods, drop_from_carry
from moefold.model.token_layout import make_token_shard
from moefold.precision.linear import Linear


class MoeSublayer(nn.Module):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts, norm: AddNorm | None = None):
        super().__init__()
        moe = model.moe
        kernels = parts.kernels
        world = parts.world
        self.world = world
        self.specs = moe_step_specs(model, parts.row_chunks)
        self.row_chunks = parts.row_chunks
        if norm is not None:
            self.norm = norm
        self.router = Router(model, layer, kernels, world)
        self.experts = Experts(model, kernels, world)
        if moe.shared_ffn:
            self.shared = SharedExperts(model, parts)
        self.has_latent = moe.latent > 0
        if self.has_latent:  # the width of tokens in the all-to-all and inside the experts
            hidden = model.hidden
            latent = moe.latent
            std = model.init_std
            self.narrow = Linear(world, hidden, latent, std=std)
            self.widen = Linear(world, latent, hidden, std=std)
        self.dispatcher = for_one_layer(parts.dispatcher)
        if isinstance(self.dispatcher, CloningDispatcher):
            self.clones = ExpertClones(self.experts, world)
        self.sending = Region("dispatch")

    def forward(self, x_BSD: Tensor, imposed_BSK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The layer on normed tokens of any leading shape; the last dim but one counts the positions of a sequence.
        Returns the output in the same shape, and the balance losses: weighted, summed over this rank's tokens.
        `imposed_BSK` are expert ids that replace the router's choice."""
        *batch, width = x_BSD.shape
        positions = batch.pop() if batch else 1
        sequences = prod(batch)
        h_BSD = x_BSD.reshape(sequences, positions, width)
        carry = self.begin(h_BSD, imposed_BSK)
        methods = self.step_methods()
        for spec in self.specs:
            run = methods[spec.name]
            carry = run(carry)
        output_TD = carry["output_TD"]
        y_BSD = output_TD.view(x_BSD.shape)
        return y_BSD, carry["aux"]

    def begin(self, h_BSD: Tensor, imposed_BSK: Tensor | None) -> Carry:
        """The carry before the first step. All tokens given are this rank's own, as on a rank of its own sequences."""
        sequences, positions, _ = h_BSD.shape
        shape = (sequences, positions)
        any_numbers_BS = torch.empty(shape, device=h_BSD.device)
        token_shard = make_token_shard(any_numbers_BS, self.world)
        imposed: dict[int, Tensor] = {}
        if imposed_BSK is not None:
            layer = self.router.layer
            choices = imposed_BSK.shape[-1]
            imposed[layer] = imposed_BSK.reshape(*shape, choices)
        wide = torch.promote_types(h_BSD.dtype, torch.float32)
        no_loss = h_BSD.new_zeros((), dtype=wide)
        h_TD = h_BSD.flatten(0, 1)
        return {
            "h_TD": h_TD,
            "for_router_TD": h_TD,
            "token_shard": token_shard,
            "imposed": imposed,
            "aux": no_loss,
        }

    def step_methods(self) -> StepMethods:
        """The methods by the names that the anatomy gives the steps."""
        return {
            "route": self.route_tokens,
            "narrow": self.narrow_tokens,
            "plan": self.plan_rows,
            "dispatch": self.dispatch_tokens,
            "shared": self.run_shared_experts,
            "experts": self.run_routed_experts,
            "combine": self.combine_rows,
            "join": self.hand_on_results,
            "widen": self.widen_tokens,
            "add": self.add_shared_experts,
        }

    def route_tokens(self, carry: Carry) -> Carry:
        shard = carry["token_shard"]
        imposed = carry.get("imposed", {})
        imposed_BSK = imposed.get(self.router.layer)
        imposed_TK = None
        if imposed_BSK is not None:
            ids_TK = shard.slice_for_rank(imposed_BSK)
            imposed_TK = ids_TK.long()
        h_TD = carry["for_router_TD"]
        routing, aux = self.router(h_TD, shard, imposed_TK)
        carry = drop_from_carry(carry, "for_router_TD")
        carry["routing"] = routing
        if aux is not None:
            carry["aux"] = carry["aux"] + aux
        return carry

    def narrow_tokens(self, carry: Carry) -> Carry:
        h_TD = carry["h_TD"]
        latent_TL = self.narrow(h_TD)
        return carry | {"latent_TL": latent_TL}

    def plan_rows(self, carry: Carry) -> Carry:
        routing = carry["routing"]
        carry = drop_from_carry(carry, "routing")
        parts = carry.get(PARTS)
        if parts is None:
            carry["receipt"] = self.dispatcher.plan(routing)
        else:
            routings = split_routing(routing, parts)
            carry["receipt"] = plan_parts(self.dispatcher, routings)
        return carry

    def dispatch_tokens(self, carry: Carry) -> Carry:
        name = "latent_TL" if self.has_latent else "h_TD"
        tokens = carry[name]
        receipt = carry["receipt"]
        rows = self.sending(self.dispatcher.dispatch, tokens, receipt)
        if receipt.clones is not None:
            rows = rows._replace(clones=self.clones(receipt.clones))
            if self.training:
                figures = self.clones.figures(receipt.clones)
                self.router.load.note_clones(figures)
        if self.experts.draws_by_token:
            count = len(tokens)
            number_N = self.dispatch_numbers(count, receipt)
            rows = rows._replace(number_N=number_N)
        if self.training and receipt.rows_moved:
            width = tokens.shape[1]
            row_bytes = width * tokens.element_size()
            sent = receipt.bytes_moved(row_bytes)
            self.router.load.note_moved(sent)
        carry = drop_from_carry(carry, "latent_TL")
        return carry | {"rows": rows}

    def dispatch_numbers(self, tokens: int, receipt: Receipt) -> Tensor:
        """Numbers of the tokens that arrive, sent as tokens are. fp64 holds them exactly."""
        device = self.router.weight.device
        number_T = numbers_of_rows(tokens, device)
        number_T1 = number_T[:, None].double()
        dispatcher = unquantised(self.dispatcher)
        arrived = dispatcher.dispatch(number_T1, receipt)
        number_N = arrived.source_ND[:, 0]
        return number_N.long()

    def run_shared_experts(self, carry: Carry) -> Carry:
        h_TD = carry["h_TD"]
        shared_TD = self.shared(h_TD)
        return carry | {"shared_TD": shared_TD}

    def run_routed_experts(self, carry: Carry) -> Carry:
        rows = carry["rows"]
        carry = drop_from_carry(carry, "rows", "h_TD")
        carry["y_RD"] = self.experts(rows)
        return carry

    def combine_rows(self, carry: Carry) -> Carry:
        y_RD = carry["y_RD"]
        receipt = carry["receipt"]
        combined = self.dispatcher.combine(y_RD, receipt)
        carry = drop_from_carry(carry, "y_RD", "receipt")
        name = "latent_TL" if self.has_latent else "output_TD"
        return carry | {name: combined}

    def hand_on_results(self, carry: Carry) -> Carry:
        """The step that row chunks join before (model/moe/row_chunks.py)."""
        return carry

    def widen_tokens(self, carry: Carry) -> Carry:
        latent_TL = carry["latent_TL"]
        carry = drop_from_carry(carry, "latent_TL")
        carry["output_TD"] = self.widen(latent_TL)
        return carry

    def add_shared_experts(self, carry: Carry) -> Carry:
        shared_TD = carry["shared_TD"]
        carry = drop_from_carry(carry, "shared_TD")
        carry["output_TD"] = carry["output_TD"] + shared_TD
        return carry


def symmetric_dispatchers(model: nn.Module) -> set[SymmetricDispatcher]:
    """The dispatchers of a model's layers that send through an arena."""
    found: set[SymmetricDispatcher] = set()
    for module in model.modules():
        if isinstance(module, MoeSublayer):
            dispatcher = unquantised(module.dispatcher)
            if isinstance(dispatcher, SymmetricDispatcher):
                found.add(dispatcher)
    return found
