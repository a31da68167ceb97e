"""How large everything is that one rank has of one microbatch, in one layer: what the tables of tensors are written in.

T   tokens of this rank              C   tokens of its cp rank: what weights cut over tp meet
R   rows of its experts              N   tokens that arrived here for them
D   width of the stream              W   width of a token on its way to experts
H G query and key/value heads here   Q V width of a query and of a value head
E e experts, of which e here         K   choices of a token
F A M   inner width here of an expert, of the shared experts, of a dense MLP        P  words of the head here
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moefold.anatomy.step_specs import dispatched_width, fits_fused_expert_mlp
from moefold.config.run import Config, ModelConfig
from moefold.dispatch.price import expected_distinct
from moefold.kernels.catalog import forced_implementations, pick_implementation
from moefold.kernels.facts import Facts
from moefold.plan.options import PlanChoices

RANK_SHAPE_AXES = ("tp", "cp", "ep", "etp")


@dataclass(frozen=True)
class RankPortion:
    """What of a microbatch one rank has, and how it travels. `splits`: weight gradients are computed apart; `weaves`:
    microbatches are cut at every step, to be woven; `adds`: it is one of several, and products add the gradients of
    weights to those of microbatches before it."""

    seq_len: int
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    context: str = "ring"
    dispatcher: str = "all_to_all"
    splits: bool = False
    weaves: bool = False
    adds: bool = False
    force: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        return self.seq_len * self.micro_batch / (self.cp * self.tp)

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in RANK_SHAPE_AXES}


class RankShapes:
    """The numbers of the legend for one kind of layer: with experts or without, with a window or not. `load` is how
    many times its even share of rows this rank gets."""

    def __init__(self, model: ModelConfig, p: RankPortion, choices: PlanChoices, window: int = 0, load: float = 1.0):
        a, moe = model.attention, model.moe
        self.model, self.portion, self.choices, self.window = model, p, choices, window
        self.T, self.C = p.tokens, p.tokens * p.tp
        self.S, self.B = p.seq_len, p.micro_batch
        self.D, self.W = model.hidden, dispatched_width(model)
        self.mla = a.kind == "mla"
        self.H, self.G = a.heads / p.tp, (a.heads if self.mla else a.kv_heads) / p.tp
        self.Q, self.V = a.head_dim, (self.mla and a.value_dim) or a.head_dim
        self.q_rank, self.kv_rank, self.rope = a.q_rank, a.kv_rank, a.rope_dim
        self.E, self.e, self.K = moe.experts, moe.experts / p.ep, moe.top_k
        self.F, self.A, self.M = moe.ffn / p.etp, moe.shared_ffn / p.tp, model.dense_ffn / p.tp
        self.P = model.vocab / p.tp
        self.R = self.rows() * load
        self.N = self.arriving() * (load if p.ep > 1 else 1.0)
        self.gate_inside, self.latent, self.qk_norm = moe.gate == "activation", moe.latent > 0, a.qk_norm

    def rows(self) -> float:
        """Rows a rank's experts get when all get as many; ranks that cut an expert among them all get its rows."""
        moe, even = self.model.moe, self.T * self.K * self.portion.etp
        if moe.capacity.factor and (moe.capacity.pad or moe.router.kind == "expert_choice"):
            even *= moe.capacity.factor
        elif moe.capacity.factor:
            even *= min(1.0, moe.capacity.factor)
        return even + self.e * (moe.capacity.pad_rows - 1) / 2

    def arriving(self) -> float:
        """Tokens that lie here for the experts: this rank's own, or copies that came."""
        p = self.portion
        if p.ep * p.etp == 1:
            return self.T
        copies = {"all_gather": p.ep, "all_to_all": self.K}.get(p.dispatcher, expected_distinct(self.K, p.ep))
        return self.T * copies * p.etp

    @cached_property
    def facts(self) -> Facts:
        c = self.choices
        capability = (c.capability // 10, c.capability % 10)
        dtype = "fp32" if c.precision == "fp32" else "bf16"
        return Facts(c.device, dtype, capability, hidden=int(self.W), ffn=int(self.F), triton=c.device == "cuda")

    def chosen_implementation(self, op: str) -> str:
        """The implementation of an operation that would be bound there."""
        return pick_implementation(op, self.facts, forced_implementations(self.portion.force).get(op))[0]

    @cached_property
    def fused(self) -> bool:
        """Whether one kernel does all of the routed experts."""
        return (
            fits_fused_expert_mlp(self.model)
            and not self.portion.splits
            and self.chosen_implementation("expert_mlp") != "reference"
        )

    @cached_property
    def plain_attention(self) -> bool:
        """Whether attention is made of plain operations: on a CPU, unless it is as common as can be."""
        odd = self.V != self.Q or self.window > 0 or self.model.attention.sinks
        return self.choices.device == "cpu" and odd

    @cached_property
    def composed_rmsnorm(self) -> bool:
        """Whether RMSNorm is made of plain operations, each keeping its own: torch has no fused one for a CPU."""
        return self.choices.device == "cpu"


def make_rank_portion(config: Config, dispatcher: str, splits: bool, adds: bool = False) -> RankPortion:
    p = config.parallel
    return RankPortion(
        config.data.seq_len,
        config.train.micro_batch,
        p.tp,
        p.cp,
        p.ep,
        p.etp,
        p.context,
        dispatcher,
        splits,
        config.pipeline.pair,
        adds,
        config.kernels.force,
    )
