"""Past keys: what attention made of earlier positions, kept while text is generated.

The generator puts one object into the microbatch of each pass. The first pass is that of the prompts: a layer keeps
what it makes of their positions. Each further pass has one new position of every sequence, whose number is on the
device: a layer writes what it makes of it and reads all that is kept (kernels/attention/cached_attention.py).

    positions   0 1 2 3 4 5        a layer keeps each position p in slot p modulo its slots: those of a window,
    slots       0 1 2 0 1 2        or as many as a sequence may come to have positions

Positions before a prompt are padding: a document of its own, which the prompt does not see.

B sequences, L slots.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Rooms = list[Tensor]  # (B, L, ...) each
Positions = slice | Tensor
T = TypeVar("T")


class PastKeys:
    """`most`: positions that a sequence may come to have. `begin_B`: where each prompt begins, behind its padding.
    `position`: that of the next pass's tokens, on the device. `has_prompt`: the prompts' pass is over."""

    def __init__(self, most: int, begin_B: Tensor):
        self.most = most
        self.begin_B = begin_B
        self.position = torch.zeros_like(begin_B[:1])
        self.has_prompt = False
        self.by_layer: dict[int, Rooms] = {}
        self.made_once: dict[Hashable, Any] = {}

    def keep_prompt(self, layer: int, made: Sequence[Tensor], window: int = 0) -> None:
        """What a layer made of the positions of all prompts; with a window, of the last ones."""
        slots = min(window or self.most, self.most)
        self.by_layer[layer] = [fill_room(x, slots) for x in made]

    def rooms(self, layer: int) -> Rooms:
        return self.by_layer[layer]

    def advance(self, count: int) -> None:
        """After a pass over `count` positions of each sequence."""
        self.position += count
        self.has_prompt = True
        self.made_once = {}

    def positions(self, count: int, begins_BS: Tensor | None) -> Positions:
        """The positions of this pass, counted from where each document begins."""
        if self.has_prompt:
            position_B = self.position - self.begin_B
            return position_B[:, None]
        if begins_BS is None:
            return slice(count)
        position_S = torch.arange(count, device=begins_BS.device)
        return position_S - begins_BS

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What all layers make alike in a pass, made by the first of them."""
        if key not in self.made_once:
            self.made_once[key] = make()
        return self.made_once[key]


def fill_room(x: Tensor, slots: int) -> Tensor:
    """Slots with the last positions of (B, S, ...); zeros where there is none."""
    sequences, count, *widths = x.shape
    first = max(0, count - slots)
    position = torch.arange(first, count, device=x.device)
    room = x.new_zeros(sequences, slots, *widths)
    room[:, position % slots] = x[:, first:]
    return room
