"""What every kind of attention has: norm, projections, the reach of a layer, the scale of scores, sinks."""

from __future__ import annotations

from torch import Tensor

from moefold.anatomy.step_specs import sliding_window_of
from moefold.comm.collectives import all_gather, bind_collective, reduce_scatter
from moefold.config.run import ModelConfig
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import sharded_over_tp
from moefold.model.attention.rope_tables import softmax_scale
from moefold.model.norm import AddNorm
from moefold.model.parts import ModelParts
from moefold.model.steps import Region
from moefold.model.token_layout import TokenShard
from moefold.precision.linear import Linear


class AttentionBase(DeclaringModule):
    def __init__(self, model: ModelConfig, layer: int, parts: ModelParts):
        super().__init__(parts.world)
        a = model.attention
        self.tp = parts.world.axis("tp")
        self.gather_tokens = bind_collective(all_gather, self.tp)  # all tokens of this cp rank, for this rank's heads
        self.scatter_sums = bind_collective(reduce_scatter, self.tp)  # sums over all heads; a rank keeps its own tokens
        self.context = parts.context
        self.scale = softmax_scale(a.head_dim, a.rope)
        self.window = sliding_window_of(model, layer)
        self.sinks = None
        if a.sinks:
            by_head = sharded_over_tp(0)
            sinks = self.declare_parameter("sinks", a.heads, placement=by_head, std=0.0)
            self.sinks = sinks
        kernels = parts.kernels
        self.norm = AddNorm(model.hidden, model.norm_eps, kernels, self.world)
        self.std = model.init_std
        residual_adds = 2 * model.layers
        self.out_std = self.std / residual_adds**0.5
        self.core = Region("core")
        self.out_region = Region("out")

    def make_linear(self, inputs: int, outputs: int, bias: bool = False) -> Linear:
        """A projection that every tp rank holds whole."""
        return Linear(self.world, inputs, outputs, bias=bias, std=self.std)

    def make_head_linear(self, inputs: int, heads: int, width: int, bias: bool = False) -> Linear:
        """A projection to heads, which tp cuts."""
        by_head = sharded_over_tp(0)
        return Linear(self.world, inputs, heads, width, bias=bias, std=self.std, placement=by_head)

    def make_out_linear(self, inputs: int, outputs: int, bias: bool) -> Linear:
        """The projection of all heads back to the stream: each tp rank computes a summand."""
        by_input = sharded_over_tp(1)
        return Linear(self.world, inputs, outputs, bias=bias, std=self.out_std, placement=by_input)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, shard: TokenShard) -> Tensor:
        """(C, H x V): what the context mechanism gives for each token, its heads joined."""
        scale = self.scale
        window = self.window
        begins_BS = shard.begins_BS
        y_BSHV = self.core(self.context, q, k, v, scale, window, self.sinks, begins_BS)
        y_BSN = y_BSHV.flatten(2)
        return y_BSN.flatten(0, 1)

    def forward(self, h_TD: Tensor, shard: TokenShard) -> Tensor:
        """Attention over normed tokens; the residual connection is the block's."""
        raise NotImplementedError
