"""What every kind of attention has: how far a layer sees, how scores are scaled, and its sinks."""

from __future__ import annotations

from moefold.anatomy.steps import window_of
from moefold.config.run import ModelConfig
from moefold.layout.axes import World
from moefold.layout.declare import Declaring
from moefold.layout.placement import over_tp
from moefold.model.attention.context import Sight
from moefold.model.attention.positions import score_scale


class Seeing(Declaring):
    def __init__(self, model: ModelConfig, layer: int, world: World):
        super().__init__(world)
        a = model.attention
        self.scale, self.window = score_scale(a.head_dim, a.rope), window_of(model, layer)
        self.sinks = self.declare("sinks", a.heads, placement=over_tp(0), std=0.0) if a.sinks else None

    def sight(self) -> Sight:
        return Sight(self.scale, self.window, self.sinks)
