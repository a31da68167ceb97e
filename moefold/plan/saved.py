"""What layers keep between forward and backward, as tables: one line a tensor, one table for each way to build a layer.

A line has the step that keeps it, how many rows of what width (letters as in `plan/sizes.py`), and how an element is
held: `wide` in the model's precision; `linear` as the input of a linear layer, which a low precision quantises; `each`
the same, but every layer that reads it quantises a copy of its own; `copy` a quantised copy beside a wide one, nothing
in bf16; or plain fp32 and whole numbers. `made`: the regions whose recompute makes it again. `read`: the region whose
input it is, which offloading moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moefold.plan.choices import Recipe
from moefold.plan.sizes import Sizes

Number = Callable[[Sizes], float]


def always(_: Sizes) -> bool:
    return True


@dataclass(frozen=True)
class Kept:
    name: str
    step: str
    rows: Number
    width: Number
    held: str = "wide"
    made: tuple[str, ...] = ()
    read: str = ""
    when: Callable[[Sizes], bool] = always


HELD: dict[str, Callable[[Recipe], float]] = {
    "wide": lambda r: r.wide,
    "linear": lambda r: r.linear,
    "each": lambda r: 2 * r.linear if r.quantizes else r.wide,
    "copy": lambda r: r.linear if r.quantizes else 0.0,
    "fp32": lambda r: 4.0,
    "int64": lambda r: 8.0,
    "byte": lambda r: 1.0,
}


def T(s: Sizes) -> float:
    return s.T


def C(s: Sizes) -> float:
    return s.C


def R(s: Sizes) -> float:
    return s.R


def D(s: Sizes) -> float:
    return s.D


def one(_: Sizes) -> float:
    return 1.0


def mla(s: Sizes) -> bool:
    return s.mla


def has_shared(s: Sizes) -> bool:
    return s.A > 0


# As the published memory tables of Megatron-Core count: fused norms and RoPE, token permutation that writes a copy.
MEGATRON = (
    Kept("stream", "attend", T, D, read="norm"),
    Kept("normed", "attend", T, D, "each", ("norm",), when=mla),
    Kept("normed", "attend", T, D, "linear", ("norm",), when=lambda s: not s.mla),
    Kept("query latent", "attend", T, lambda s: s.q_rank, read="up", when=mla),
    Kept("key latent", "attend", T, lambda s: s.kv_rank + s.rope, read="up", when=mla),
    Kept("key latent split off", "attend", T, lambda s: s.kv_rank, read="up", when=mla),
    Kept("query latent normed", "attend", T, lambda s: s.q_rank, "linear", ("up",), when=mla),
    Kept("key latent normed", "attend", T, lambda s: s.kv_rank, "linear", ("up",), when=mla),
    Kept("q k v", "attend", C, lambda s: s.H * s.Q + s.G * (s.Q + s.V), "wide", ("up",), "core", mla),
    Kept("q k v", "attend", C, lambda s: s.H * s.Q + s.G * (s.Q + s.V), "wide", (), "core", lambda s: not s.mla),
    Kept("attended", "attend", C, lambda s: s.H * s.V, "wide", ("core",), "out"),
    Kept("log-sum-exp", "attend", C, lambda s: s.H, "fp32", ("core",)),
    Kept("stream", "mlp", T, D, read="norm"),
    Kept("normed", "mlp", T, D, "linear", ("norm",)),
    Kept("gate and up", "mlp", C, lambda s: 2 * s.M, "wide", ("mlp",)),
    Kept("activated", "mlp", C, lambda s: s.M, "linear", ("mlp",)),
    Kept("stream", "route", T, D, read="norm"),
    Kept("normed", "route", T, D, "wide", ("norm",)),
    Kept("scores and choice", "route", T, lambda s: 5 * s.E, "byte", ("moe",)),
    Kept("normed, for shared", "shared", T, D, "copy", ("norm", "moe")),
    Kept("gate and up", "shared", C, lambda s: 2 * s.A, "wide", ("shared", "moe")),
    Kept("activated", "shared", C, lambda s: s.A, "linear", ("shared", "moe")),
    Kept("rows", "experts", R, lambda s: s.W, "linear", ("experts", "moe"), "experts"),
    Kept("gate and up", "experts", R, lambda s: 2 * s.F, "wide", ("experts", "moe"), "activation"),
    Kept("activated", "experts", R, lambda s: s.F, "linear", ("activation", "experts", "moe")),
    Kept("results", "experts", R, lambda s: s.W, "wide", ("experts", "moe"), when=lambda s: not s.gate_inside),
    Kept("both streams joined", "look_ahead", T, lambda s: 2 * s.D, "linear"),
    Kept("logits and their softmax", "predict", C, lambda s: s.P * (1 + s.model.mtp) * 6, "byte"),
)
