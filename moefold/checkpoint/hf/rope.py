"""Rotary positions in config.json and back. Torch-free.

Two spellings exist: `rope_theta` beside `rope_scaling`, and since transformers 5 one `rope_parameters` for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moefold.checkpoint.hf.options import Options
from moefold.config.run import RopeConfig

R = "attention.rope."
KINDS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_rope(options: Options, theta: float, latent: bool = False, partial: bool = False) -> dict[str, Any]:
    """Our keys. `theta` is what the family has where nothing is said; `latent` families also sharpen whole scores by
    mscale_all_dim, which others do not have; those that turn a part of the dims have read `partial_rotary_factor`."""
    given = options.optional("rope_parameters") or {}
    scaling = options.optional("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping):
        options.refuse("rope_parameters and rope_scaling are objects")
        return {}
    inner = Options({**scaling, **given}, f"{options.where}: rope_parameters")
    values: dict[str, Any] = {R + "theta": inner.take("rope_theta", default=options.optional("rope_theta") or theta)}
    options.ignore(["rope_theta"])
    kind = inner.take("rope_type", "type", default="default")
    if kind not in KINDS:
        options.refuse(f"rope_type = {kind} is not supported; expected one of {', '.join(KINDS)}")
        return values
    values[R + "scaling"] = KINDS[kind]
    longest = options.left.get("max_position_embeddings", 0)
    original = inner.optional("original_max_position_embeddings") or longest
    factor = inner.optional("factor")
    if kind != "default":
        values[R + "factor"] = factor if factor is not None else longest / original
    if kind in ("llama3", "yarn"):
        values[R + "original_length"] = original
    if kind == "llama3":
        values[R + "low_frequency"] = inner.take("low_freq_factor")
        values[R + "high_frequency"] = inner.take("high_freq_factor")
    if kind == "yarn":
        values[R + "beta_fast"] = inner.optional("beta_fast") or 32.0
        values[R + "beta_slow"] = inner.optional("beta_slow") or 1.0
        values[R + "round_dims"] = inner.take("truncate", default=True)
        values |= sharpening(inner, values[R + "factor"], latent)
    if partial:
        inner.ignore(["partial_rotary_factor"])
    inner.demand("partial_rotary_factor", 1.0, 1, why="all dims of a head turn")
    options.problems += [*inner.problems, *(f"{inner.where}: {name} is not supported" for name in inner.left)]
    return values


def sharpening(inner: Options, factor: float, latent: bool) -> dict[str, Any]:
    """How much YaRN sharpens: the turned dims by m(mscale) / m(mscale_all_dim) with m(s) = 0.1 s ln(factor) + 1, or as
    `attention_factor` says; where there are latents, whole scores by m(mscale_all_dim) squared."""
    some, every = inner.optional("mscale"), inner.optional("mscale_all_dim")
    direct = inner.optional("attention_factor")
    if direct is not None and not (some or every):
        if direct < 1 or factor <= 1:
            inner.problems.append(f"{inner.where}: attention_factor = {direct} is not supported; expected 1 or more")
            return {}
        return {R + "sharpen": (direct - 1) / (0.1 * math.log(factor))}
    if direct is not None or (every and not (latent and some)) or (some and not every):
        both = "mscale and mscale_all_dim together" if latent else "neither mscale nor mscale_all_dim"
        inner.problems.append(
            f"{inner.where}: mscale = {some}, mscale_all_dim = {every}, attention_factor = {direct} is not supported; "
            f"expected {both}"
        )
        return {}
    return {R + "sharpen": some, R + "sharpen_all": every} if every else {R + "sharpen": 1.0}


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": "default"}}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling != "linear":
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "llama3":
        scaling |= {"low_freq_factor": rope.low_frequency, "high_freq_factor": rope.high_frequency}
    if rope.scaling == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.round_dims}
        if rope.sharpen_all:
            scaling |= {"mscale": rope.sharpen, "mscale_all_dim": rope.sharpen_all}
        elif rope.sharpen != 1.0:
            scaling |= {"attention_factor": 0.1 * rope.sharpen * math.log(rope.factor) + 1}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
