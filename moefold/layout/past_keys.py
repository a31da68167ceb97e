"""Past keys: what attention made of earlier positions, kept while text is generated.

The generator puts one object into the microbatch of each pass; a layer adds what it makes of new positions and gets all
that its new queries may see: keys and values of grouped-query attention, latents of latent attention. A layer with a
window keeps the window alone. Positions before a prompt are padding: a document of its own, which the prompt does not
see.

B sequences, S new positions, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = list[Tensor]  # (B, positions, ...) each


class PastKeys:
    """`most`: positions that a sequence may come to have. `length`: those before the microbatch."""

    def __init__(self, most: int):
        self.most = most
        self.length = 0
        self.by_layer: dict[int, Tensors] = {}

    def extend(self, layer: int, made: Sequence[Tensor], window: int = 0) -> Tensors:
        """What a layer made of new positions, behind what the layer has of earlier ones."""
        if window:
            return self.extend_window(layer, made, window)
        count = made[0].shape[1]
        end = self.length + count
        if layer not in self.by_layer:
            self.by_layer[layer] = [self.make_room(x) for x in made]
        rooms = self.by_layer[layer]
        for room, x in zip(rooms, made, strict=True):
            room[:, self.length : end] = x
        return [room[:, :end] for room in rooms]

    def make_room(self, x: Tensor) -> Tensor:
        sequences, _, *widths = x.shape
        return x.new_empty(sequences, self.most, *widths)

    def extend_window(self, layer: int, made: Sequence[Tensor], window: int) -> Tensors:
        """Likewise; kept are positions that the next query may see."""
        joined = list(made)
        if layer in self.by_layer:
            pairs = zip(self.by_layer[layer], made, strict=True)
            joined = [torch.cat(pair, dim=1) for pair in pairs]
        keys = joined[0].shape[1]
        first = max(0, keys - window + 1)
        self.by_layer[layer] = [x[:, first:].clone() for x in joined]
        return joined

    def advance(self, count: int) -> None:
        """After a pass over `count` new positions."""
        self.length += count

    def positions(self, count: int, begins_BS: Tensor | None) -> slice | Tensor:
        """The new positions, counted from where each document begins."""
        end = self.length + count
        if begins_BS is None:
            return slice(self.length, end)
        device = begins_BS.device
        position_S = torch.arange(self.length, end, device=device)
        return position_S - begins_BS

    def begins_among(self, keys: int, begins_BS: Tensor | None) -> Tensor | None:
        """Where documents begin among the last `keys` positions."""
        if begins_BS is None:
            return None
        count = begins_BS.shape[1]
        left_out = self.length + count - keys
        begins_BS = begins_BS - left_out
        return begins_BS.clamp(min=0)
