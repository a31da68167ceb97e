"""Rotary positions in config.json and back. Torch-free.

Two spellings exist: `rope_theta` beside `rope_scaling`, and since transformers 5 one `rope_parameters` for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.config.run import RopeConfig

ROPE_PREFIX = "attention.rope."
ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}


def read_rope_options(
    options: ConfigOptions, theta: float, latent: bool = False, partial: bool = False
) -> dict[str, Any]:
    """Our keys. `theta` is what the family has where nothing is said; `latent` families also mscale whole scores by
    mscale_all_dim, which others do not have; those that turn a part of the dims have read `partial_rotary_factor`."""
    given = options.take_optional("rope_parameters") or {}
    scaling = options.take_optional("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping):
        options.add_problem("rope_parameters and rope_scaling are objects")
        return {}
    inner = ConfigOptions({**scaling, **given}, f"{options.where}: rope_parameters")
    values: dict[str, Any] = {
        ROPE_PREFIX + "theta": inner.take("rope_theta", default=options.take_optional("rope_theta") or theta)
    }
    options.ignore_keys(["rope_theta"])
    kind = inner.take("rope_type", "type", default="default")
    if kind not in ROPE_TYPES:
        options.add_problem(f"rope_type = {kind} is not supported; expected one of {', '.join(ROPE_TYPES)}")
        return values
    values[ROPE_PREFIX + "scaling"] = ROPE_TYPES[kind]
    longest = options.left.get("max_position_embeddings", 0)
    original = inner.take_optional("original_max_position_embeddings") or longest
    factor = inner.take_optional("factor")
    if kind != "default":
        values[ROPE_PREFIX + "factor"] = factor if factor is not None else longest / original
    if kind in ("llama3", "yarn"):
        values[ROPE_PREFIX + "original_length"] = original
    if kind == "llama3":
        values[ROPE_PREFIX + "low_frequency"] = inner.take("low_freq_factor")
        values[ROPE_PREFIX + "high_frequency"] = inner.take("high_freq_factor")
    if kind == "yarn":
        values[ROPE_PREFIX + "beta_fast"] = inner.take_optional("beta_fast") or 32.0
        values[ROPE_PREFIX + "beta_slow"] = inner.take_optional("beta_slow") or 1.0
        values[ROPE_PREFIX + "round_dims"] = inner.take("truncate", default=True)
        values |= read_yarn_mscale(inner, values[ROPE_PREFIX + "factor"], latent)
    if partial:
        inner.ignore_keys(["partial_rotary_factor"])
    inner.require_value("partial_rotary_factor", 1.0, 1, why="all dims of a head turn")
    options.problems += [*inner.problems, *(f"{inner.where}: {name} is not supported" for name in inner.left)]
    return values


def read_yarn_mscale(inner: ConfigOptions, factor: float, latent: bool) -> dict[str, Any]:
    """How much YaRN sharpens: the turned dims by m(mscale) / m(mscale_all_dim) with m(s) = 0.1 s ln(factor) + 1, or as
    `attention_factor` says; where there are latents, whole scores by m(mscale_all_dim) squared."""
    some, every = inner.take_optional("mscale"), inner.take_optional("mscale_all_dim")
    direct = inner.take_optional("attention_factor")
    if direct is not None and not (some or every):
        if direct < 1 or factor <= 1:
            inner.problems.append(f"{inner.where}: attention_factor = {direct} is not supported; expected 1 or more")
            return {}
        return {ROPE_PREFIX + "mscale": (direct - 1) / (0.1 * math.log(factor))}
    if direct is not None or (every and not (latent and some)) or (some and not every):
        both = "mscale and mscale_all_dim together" if latent else "neither mscale nor mscale_all_dim"
        inner.problems.append(
            f"{inner.where}: mscale = {some}, mscale_all_dim = {every}, attention_factor = {direct} is not supported; "
            f"expected {both}"
        )
        return {}
    return {ROPE_PREFIX + "mscale": some, ROPE_PREFIX + "mscale_all": every} if every else {ROPE_PREFIX + "mscale": 1.0}


def write_rope_options(rope: RopeConfig) -> dict[str, Any]:
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
        if rope.mscale_all:
            scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all}
        elif rope.mscale != 1.0:
            scaling |= {"attention_factor": 0.1 * rope.mscale * math.log(rope.factor) + 1}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
