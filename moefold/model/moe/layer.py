"""A Mixture-of-Experts layer: router, dispatcher, routed experts, shared experts.

Each step of the layer is a method here, from carry to carry. `forward` runs them in the anatomy's order and a block
runs the same methods as its steps, so there is one statement of the layer. A block gives the layer the norm before it
as a member, as checkpoints name it, and applies it; neither norm nor residual connection is part of `forward`.

The carry between the steps: `h_TD` the normed tokens, `for_router_TD` the same tensor for the router, `routing`,
`receipt` (the dispatcher's metadata), `latent_TL`, `rows`, `y_RD`, `shared_TD`, and in the end `output_TD`; `aux` the
sum of the balance losses so far.

T tokens of this rank, D width, L width of a latent, R rows of the experts held here, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from moefold.anatomy.step_specs import moe_step_specs
from moefold.config.run import ModelConfig
from moefold.dispatch.base import Receipt
from moefold.layout.token_numbers import numbers_of_rows
from moefold.model.moe.experts import Experts
from moefold.model.moe.router import Router
from moefold.model.moe.shared import SharedExperts
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Carry, drop_from_carry
from moefold.model.token_layout import TokenShard, make_token_shard
from moefold.precision.linear import Linear


class MoeSublayer(nn.Module):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts, norm: AddNorm | None = None):
        super().__init__()
        moe = model.moe
        kernels = parts.kernels
        world = parts.world
        self.world = world
        self.specs = moe_step_specs(model)
        if norm is not None:
            self.norm = norm
        self.router = Router(model, layer, kernels, world)
        self.experts = Experts(model, kernels, world)
        if moe.shared_ffn:
            self.shared = SharedExperts(model, kernels, world)
        if moe.latent:  # the width of tokens in the all-to-all and inside the experts
            self.narrow = Linear(world, model.hidden, moe.latent, std=model.init_std)
            self.widen = Linear(world, moe.latent, model.hidden, std=model.init_std)
        self.dispatcher = parts.dispatcher

    def forward(self, x_BSD: Tensor, imposed_BSK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The layer on normed tokens of any leading shape; the last dim but one counts the positions of a sequence.
        Returns the output in the same shape, and the balance losses: weighted, summed over this rank's tokens.
        `imposed_BSK` are expert ids that replace the router's choice."""
        positions = x_BSD.shape[-2] if x_BSD.dim() > 1 else 1
        sequences = x_BSD.reshape(prod(x_BSD.shape[:-2]), positions, x_BSD.shape[-1])
        h_TD = sequences.flatten(0, 1)
        carry = {
            "h_TD": h_TD,
            "for_router_TD": h_TD,
            "token_shard": self.token_shard(sequences),
            "imposed": imposed_experts(self.router.layer, imposed_BSK, sequences),
            "aux": torch.zeros((), dtype=torch.promote_types(h_TD.dtype, torch.float32), device=h_TD.device),
        }
        methods = self.step_methods()
        for spec in self.specs:
            carry = methods[spec.name](carry)
        return carry["output_TD"].view(x_BSD.shape), carry["aux"]

    def token_shard(self, sequences_BSD: Tensor) -> TokenShard:
        """All tokens given are this rank's own, as on a rank of its own sequences."""
        numbers_BS = torch.empty(sequences_BSD.shape[:2], device=sequences_BSD.device)
        return make_token_shard(numbers_BS, self.world)

    def step_methods(self) -> dict[str, Callable[[Carry], Carry]]:
        """The methods by the names that the anatomy gives the steps."""
        return {
            "route": self.route_tokens,
            "narrow": self.narrow_tokens,
            "plan": self.plan_rows,
            "dispatch": self.dispatch_tokens,
            "shared": self.run_shared_experts,
            "experts": self.run_routed_experts,
            "combine": self.combine_rows,
            "widen": self.widen_tokens,
            "add": self.add_shared_experts,
        }

    def route_tokens(self, carry: Carry) -> Carry:
        shard = carry["token_shard"]
        imposed_BSK = carry.get("imposed", {}).get(self.router.layer)
        imposed_TK = None if imposed_BSK is None else shard.slice_for_rank(imposed_BSK).long()
        routing, aux = self.router(carry["for_router_TD"], shard, imposed_TK)
        aux = carry["aux"] + aux
        return drop_from_carry(carry | {"routing": routing, "aux": aux}, "for_router_TD")

    def narrow_tokens(self, carry: Carry) -> Carry:
        latent_TL = self.narrow(carry["h_TD"])
        return carry | {"latent_TL": latent_TL}

    def plan_rows(self, carry: Carry) -> Carry:
        receipt = self.dispatcher.plan(carry["routing"])
        return drop_from_carry(carry | {"receipt": receipt}, "routing")

    def dispatch_tokens(self, carry: Carry) -> Carry:
        tokens = carry["latent_TL"] if "latent_TL" in carry else carry["h_TD"]
        receipt = carry["receipt"]
        rows = self.dispatcher.dispatch(tokens, receipt)
        if self.experts.rounds_by_token:
            rows = rows._replace(number_N=self.dispatch_numbers(len(tokens), receipt))
        if self.training:
            row_bytes = tokens.shape[1] * tokens.element_size()
            self.router.load.note_moved(receipt.rows_moved * row_bytes)
        return drop_from_carry(carry | {"rows": rows}, "latent_TL")

    def dispatch_numbers(self, tokens: int, receipt: Receipt) -> Tensor:
        """Numbers of the tokens that arrive, sent as tokens are. fp64 holds them exactly."""
        number_T = numbers_of_rows(tokens, self.router.weight.device)
        arrived_N1 = self.dispatcher.dispatch(number_T[:, None].double(), receipt).source_ND
        return arrived_N1[:, 0].long()

    def run_shared_experts(self, carry: Carry) -> Carry:
        shared_TD = self.shared(carry["h_TD"])
        return carry | {"shared_TD": shared_TD}

    def run_routed_experts(self, carry: Carry) -> Carry:
        y_RD = self.experts(carry["rows"])
        return drop_from_carry(carry | {"y_RD": y_RD}, "rows", "h_TD")

    def combine_rows(self, carry: Carry) -> Carry:
        combined = self.dispatcher.combine(carry["y_RD"], carry["receipt"])
        carry = drop_from_carry(carry, "y_RD", "receipt")
        name = "latent_TL" if hasattr(self, "widen") else "output_TD"
        return carry | {name: combined}

    def widen_tokens(self, carry: Carry) -> Carry:
        output_TD = self.widen(carry["latent_TL"])
        return drop_from_carry(carry | {"output_TD": output_TD}, "latent_TL")

    def add_shared_experts(self, carry: Carry) -> Carry:
        output_TD = carry["output_TD"] + carry["shared_TD"]
        return drop_from_carry(carry | {"output_TD": output_TD}, "shared_TD")


def imposed_experts(layer: int, imposed_BSK: Tensor | None, sequences_BSD: Tensor) -> dict[int, Tensor]:
    """Expert ids set from outside, by layer, as a carry holds them."""
    if imposed_BSK is None:
        return {}
    shape = sequences_BSD.shape[:2]
    return {layer: imposed_BSK.reshape(*shape, -1)}
