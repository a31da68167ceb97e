"""The clones of a layer's experts: their weights for one microbatch."""

from __future__ import annotations

from moefold.dispatch.clone_weights import CloneFigures, CloneMap, CloneWeights, expert_bytes, send_clone_weights
from moefold.layout.axes import World
from moefold.layout.declare import DeclaringModule
from moefold.model.moe.experts import Experts


class ExpertClones(DeclaringModule):
    """A module, so that its call waits for the experts' weights, as a call of the experts does."""

    def __init__(self, experts: Experts, world: World):
        super().__init__(world)
        self.borrowed = (experts.first_weight, experts.down)

    def forward(self, clones: CloneMap) -> CloneWeights:
        up, down = self.borrowed
        return send_clone_weights(clones, up, down, self.world.ep)

    def figures(self, clones: CloneMap) -> CloneFigures:
        sent = clones.leaving_slots(self.world.ep.index)
        return clones.figures._replace(bytes=len(sent) * expert_bytes(self.borrowed))
