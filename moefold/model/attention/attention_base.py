"""What every kind of attention has: how far a layer sees, how scores are scaled, and its sinks."""

from __future__ import annotations

from moefold.anatomy.step_specs import sliding_window_of
from moefold.config.run import ModelConfig
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.layout.placement import sharded_over_tp
from moefold.model.attention.rope_tables import softmax_scale


class AttentionBase(DeclaringModule):
    def __init__(self, model: ModelConfig, layer: int, world: World):
        super().__init__(world)
        a = model.attention
        self.scale = softmax_scale(a.head_dim, a.rope)
        self.window = sliding_window_of(model, layer)
        self.sinks = None
        if a.sinks:
            self.sinks = self.declare_parameter("sinks", a.heads, placement=sharded_over_tp(0), std=0.0)
