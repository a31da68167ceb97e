"""A tensor that a layer has, as a line of a table: how many rows of what width, and how an element is held.

A stack (`plan/moefold_layers.py`, `plan/megatron_layers.py`) is a table of such lines: what its steps keep for their
backward, and what they need for the moment. Rows and widths are functions of the letters of `plan/sizes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moefold.plan.choices import Recipe
from moefold.plan.sizes import Sizes

Number = Callable[[Sizes], float]

HELD: dict[str, Callable[[Recipe], float]] = {
    "wide": lambda r: r.wide,  # in the model's precision
    "linear": lambda r: r.linear,  # a product's input: quantised where the precision is low
    "each": lambda r: 2 * r.linear if r.quantizes else r.wide,  # as linear, but two readers quantise it for themselves
    "copy": lambda r: r.linear if r.quantizes else 0.0,  # quantised, beside a wide one
    "fp32": lambda r: 4.0,
    "int64": lambda r: 8.0,
    "int32": lambda r: 4.0,
    "byte": lambda r: 1.0,
}


def always(_: Sizes) -> bool:
    return True


@dataclass(frozen=True)
class Tensor:
    """`made`: the regions whose recompute makes it again. `read`: the region whose input it is, which offloading moves.
    `entry`: a layer's own input, which is there when all of the layer is recomputed."""

    name: str
    step: str
    rows: Number
    width: Number
    held: str = "wide"
    made: tuple[str, ...] = ()
    read: str = ""
    when: Callable[[Sizes], bool] = always
    entry: bool = False

    def each(self, s: Sizes) -> float:
        """Bytes of an element."""
        return HELD[self.held](s.choices.recipe)

    def bytes(self, s: Sizes) -> float:
        return self.rows(s) * self.width(s) * self.each(s)


Moment = tuple[Tensor, ...]


@dataclass(frozen=True)
class Stack:
    """A way to build layers: what their steps keep, and the moments of a step, sets of tensors that are there at once,
    by step and way (F forward, B backward)."""

    kept: tuple[Tensor, ...]
    moments: Mapping[tuple[str, str], tuple[Moment, ...]]

    def working(self, step: str, way: str, s: Sizes) -> float:
        """Bytes of a step's largest moment."""
        moments = self.moments.get((step, way), ())
        return max((sum(each.bytes(s) for each in moment if each.when(s)) for moment in moments), default=0.0)


def T(s: Sizes) -> float:
    return s.T


def C(s: Sizes) -> float:
    return s.C


def R(s: Sizes) -> float:
    return s.R


def D(s: Sizes) -> float:
    return s.D


def W(s: Sizes) -> float:
    return s.W


def one(_: Sizes) -> float:
    return 1.0


def mla(s: Sizes) -> bool:
    return s.mla


def gqa(s: Sizes) -> bool:
    return not s.mla


def q_k_v(s: Sizes) -> float:
    return s.H * s.Q + s.G * (s.Q + s.V)
