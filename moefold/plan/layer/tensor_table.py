"""A tensor that a layer has, as a line of a table: how many rows of what width, and how an element is held.

A stack (`plan/layer/moefold_layers.py`, `plan/layer/megatron_layers.py`) is a table of such lines: what its steps keep for their
backward, and what they need for the moment. Rows and widths are functions of the letters of `plan/layer/rank_shapes.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moefold.plan.layer.rank_shapes import RankShapes
from moefold.plan.options import PrecisionRecipe

ShapeFunction = Callable[[RankShapes], float]

ELEMENT_BYTES: dict[str, Callable[[PrecisionRecipe], float]] = {
    "wide": lambda r: r.wide,  # in the model's precision
    "linear": lambda r: r.linear,  # a product's input: quantised where the precision is low
    "each": lambda r: 2 * r.linear if r.quantizes else r.wide,  # as linear, but two readers quantise it for themselves
    "copy": lambda r: r.linear if r.quantizes else 0.0,  # quantised, beside a wide one
    "fp32": lambda r: 4.0,
    "int64": lambda r: 8.0,
    "int32": lambda r: 4.0,
    "byte": lambda r: 1.0,
}


def always(_: RankShapes) -> bool:
    return True


@dataclass(frozen=True)
class TensorEntry:
    """`made`: the regions whose recompute makes it again. `read`: the region whose input it is, which offloading moves.
    `entry`: a layer's own input, which is there when all of the layer is recomputed."""

    name: str
    step: str
    rows: ShapeFunction
    width: ShapeFunction
    held: str = "wide"
    made: tuple[str, ...] = ()
    read: str = ""
    when: Callable[[RankShapes], bool] = always
    entry: bool = False

    def each(self, s: RankShapes) -> float:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.held](s.choices.recipe)

    def bytes(self, s: RankShapes) -> float:
        return self.rows(s) * self.width(s) * self.each(s)


WorkingSet = tuple[TensorEntry, ...]


@dataclass(frozen=True)
class LayerStack:
    """A way to build layers: what their steps keep, and the moments of a step, sets of tensors that are there at once,
    by step and way (F forward, B backward)."""

    kept: tuple[TensorEntry, ...]
    moments: Mapping[tuple[str, str], tuple[WorkingSet, ...]]

    def working(self, step: str, way: str, s: RankShapes) -> float:
        """Bytes of a step's largest moment."""
        moments = self.moments.get((step, way), ())
        return max((sum(each.bytes(s) for each in moment if each.when(s)) for moment in moments), default=0.0)


def T(s: RankShapes) -> float:
    return s.T


def C(s: RankShapes) -> float:
    return s.C


def R(s: RankShapes) -> float:
    return s.R


def D(s: RankShapes) -> float:
    return s.D


def W(s: RankShapes) -> float:
    return s.W


def single_column(_: RankShapes) -> float:
    return 1.0


def uses_mla(s: RankShapes) -> bool:
    return s.mla


def uses_gqa(s: RankShapes) -> bool:
    return not s.mla


def qkv_width(s: RankShapes) -> float:
    return s.H * s.Q + s.G * (s.Q + s.V)
