"""Shapes of one rank's part of one microbatch in one layer, used by the tables of tensors.

T   tokens of this rank              C   tokens of its cp rank: input of weights sharded over tp
R   rows of its experts              N   tokens that arrived here for them
D   width of the stream              W   width of a token sent to experts
S   sequence length                  B   sequences of the microbatch
H G query and key/value heads here   Q V width of a query and of a value head
E e experts, of which e here         K   choices of a token
F A M   inner width here of an expert, of the shared experts, of a dense MLP        P  vocab of the head here

`expert_parts`, `shared_parts`, `dense_parts`: 2 where the activation has a gate (gate and up), else 1 (up).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from moefold.anatomy.activations import dense_kind, expert_kind, shared_kind
from moefold.anatomy.step_specs import dispatched_width, fits_fused_expert_mlp
from moefold.config.precision_recipes import RecipeSpec
from moefold.config.run import Config, ModelConfig, PrecisionConfig
from moefold.dispatch.catalog import expected_distinct
from moefold.kernels.catalog import forced_implementations, pick_implementation
from moefold.kernels.facts import Facts
from moefold.plan.layer.layer_recipes import PLAIN_LAYER, PLAIN_PRECISION, LayerRecipes
from moefold.plan.options import PlanChoices

RANK_SHAPE_AXES = ("tp", "cp", "ep", "etp")
UNCHOSEN = "ring"  # what is counted where `parallel.context auto` was not chosen yet
EXPERT_PRODUCTS = ("moe.experts.up_product", "moe.experts.down_product")


@dataclass(frozen=True)
class RankPortion:
    """One rank's portion of a microbatch, and the dispatch of its tokens. `defers_wgrad`: weight gradients are computed
    after the data gradients of their stage; `accumulates`: a step has several microbatches, and GEMMs accumulate weight
    gradients; `precision`: recipes of the products; `clone_slots`: spare slots for clones of experts;
    `stashes`: rows that experts save lie in a pool; `head_tiles`: heads are swapped inside projections."""

    seq_len: int
    micro_batch: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    context: str = "ring"
    dispatcher: str = "all_to_all"
    defers_wgrad: bool = False
    accumulates: bool = False
    force: tuple[str, ...] = ()
    precision: PrecisionConfig = PLAIN_PRECISION
    clone_slots: int = 0
    stashes: bool = False
    head_tiles: bool = False

    @property
    def tokens(self) -> float:
        ranks = self.cp * self.tp
        return self.seq_len * self.micro_batch / ranks

    @cached_property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in RANK_SHAPE_AXES}


class RankShapes:
    """Shapes of the legend for one kind of layer: dense or MoE, with or without a sliding window. `load`: rows of this
    rank's experts over their even share. `products`: recipes of the layer's products."""

    def __init__(
        self,
        model: ModelConfig,
        p: RankPortion,
        choices: PlanChoices,
        window: int = 0,
        load: float = 1.0,
        products: LayerRecipes = PLAIN_LAYER,
    ):
        self.model = model
        self.portion = p
        self.choices = choices
        self.recipe = choices.recipe
        self.window = window
        self.products = products
        self.implementations: dict[tuple[str, str], str] = {}  # chosen so far, by op and recipe
        # Tokens and the stream.
        self.T = p.tokens
        self.C = p.tokens * p.tp
        self.S = p.seq_len
        self.B = p.micro_batch
        self.D = model.hidden
        self.W = dispatched_width(model)
        self.P = model.vocab / p.tp
        self.M = model.dense_ffn / p.tp
        self.dense_parts = dense_kind(model).parts
        self.set_attention_shapes()
        self.set_expert_shapes(load)

    def set_attention_shapes(self) -> None:
        attention = self.model.attention
        tp = self.portion.tp
        self.mla = attention.kind == "mla"
        self.H = attention.heads / tp
        key_heads = attention.heads if self.mla else attention.kv_heads
        self.G = max(1.0, key_heads / tp)  # ranks may share a head; all are projected on each of them
        self.projected_kv_heads = self.G if key_heads >= tp else key_heads
        self.Q = attention.head_dim
        value_dim = self.mla and attention.value_dim
        self.V = value_dim or attention.head_dim
        self.q_rank = attention.q_rank
        self.kv_rank = attention.kv_rank
        self.rope = attention.rope_dim
        self.qk_norm = attention.qk_norm

    @cached_property
    def ranks_swapping_heads(self) -> int:
        """Ranks of a cp group that swap positions for heads: all, or with `hierarchical` those of a node."""
        p = self.portion
        if p.context == "all_to_all":
            return p.cp
        if p.context != "hierarchical":
            return 1
        in_node = self.choices.node // p.tp
        return max(1, min(p.cp, in_node))

    @cached_property
    def kv_copies(self) -> int:
        """Copies of each key/value head that are sent where fewer heads than ranks are swapped."""
        heads = max(1, int(self.G))
        return lcm(heads, self.ranks_swapping_heads) // heads

    def set_expert_shapes(self, load: float) -> None:
        moe = self.model.moe
        p = self.portion
        self.E = moe.experts
        self.e = moe.experts / p.ep
        self.K = moe.top_k
        self.F = moe.ffn / p.etp
        self.A = moe.shared_ffn / p.tp
        self.expert_parts = expert_kind(self.model).parts
        self.shared_parts = shared_kind(self.model).parts
        arrival_load = load if p.ep > 1 else 1.0
        self.R = self.even_expert_rows() * load
        self.N = self.even_arrived_tokens() * arrival_load
        self.gate_inside = moe.gate == "activation"
        self.latent = moe.latent > 0

    def even_expert_rows(self) -> float:
        """Rows of a rank's experts under an even load; every etp rank of an expert gets all of its rows."""
        moe = self.model.moe
        capacity = moe.capacity
        rows = self.T * self.K * self.portion.etp
        fills_capacity = capacity.pad or moe.router.kind == "expert_choice"
        if capacity.factor and fills_capacity:
            rows *= capacity.factor
        elif capacity.factor:
            rows *= min(1.0, capacity.factor)
        padding = self.e * (capacity.pad_rows - 1) / 2
        return rows + padding

    def even_arrived_tokens(self) -> float:
        """Tokens on this rank for its experts: its own, or copies that arrived."""
        p = self.portion
        if p.ep * p.etp == 1:
            return self.T
        if p.dispatcher == "all_gather":
            copies = p.ep
        elif p.dispatcher == "all_to_all":
            copies = self.K
        else:
            copies = expected_distinct(self.K, p.ep)
        return self.T * copies * p.etp

    @cached_property
    def facts(self) -> Facts:
        c = self.choices
        capability = divmod(c.capability, 10)
        dtype = "fp32" if c.precision == "fp32" else "bf16"
        hidden = int(self.W)
        ffn = int(self.F)
        has_triton = c.device == "cuda"
        return Facts(c.device, dtype, capability, hidden=hidden, ffn=ffn, triton=has_triton)

    def chosen_implementation(self, op: str, recipe: str = "plain") -> str:
        """The implementation of an op that a run would choose on this device."""
        key = (op, recipe)
        if key not in self.implementations:
            forced = forced_implementations(self.portion.force)
            facts = replace(self.facts, recipe=recipe)
            choice = forced.get(op)
            self.implementations[key], _ = pick_implementation(op, facts, choice)
        return self.implementations[key]

    @cached_property
    def expert_recipe(self) -> RecipeSpec | None:
        """The recipe of both products of the routed experts; None where they differ."""
        up, down = map(self.products.spec, EXPERT_PRODUCTS)
        return up if up is down else None

    @cached_property
    def fuses_experts(self) -> bool:
        """Whether one function runs all of the routed experts, plain or in FP8."""
        if not fits_fused_expert_mlp(self.model) or self.expert_recipe is None:
            return False
        return self.chosen_implementation("expert_mlp", self.expert_recipe.name) != "reference"

    @cached_property
    def fuses_fp8_experts(self) -> bool:
        recipe = self.expert_recipe
        return self.fuses_experts and recipe is not None and recipe.quantises

    @cached_property
    def fp8_expert_wgrad(self) -> bool:
        """Whether fused experts compute weight gradients in FP8, and keep the pre-activation in it."""
        return self.fuses_fp8_experts and not self.products.keeps_input(EXPERT_PRODUCTS)

    @cached_property
    def plain_attention(self) -> bool:
        """Whether attention is composed of plain ops: on a CPU, for shapes that torch's attention does not support."""
        if self.choices.device != "cpu":
            return False
        has_window = self.window > 0
        has_sinks = self.model.attention.sinks
        return self.V != self.Q or has_window or has_sinks


def make_rank_portion(config: Config, dispatcher: str, defers_wgrad: bool, accumulates: bool = False) -> RankPortion:
    p = config.parallel
    return RankPortion(
        seq_len=config.data.seq_len,
        micro_batch=config.train.micro_batch,
        tp=p.tp,
        cp=p.cp,
        ep=p.ep,
        etp=p.etp,
        context=UNCHOSEN if p.context == "auto" else p.context,
        dispatcher=dispatcher,
        defers_wgrad=defers_wgrad,
        accumulates=accumulates,
        force=config.kernels.force,
        precision=config.precision,
        clone_slots=p.clone_slots,
        stashes=config.memory.stash != "none",
        head_tiles="heads" in p.tiles,
    )
