"""Rotary position options of config.json, read and written. Torch-free.

There are two spellings: `rope_theta` and `rope_scaling`, and since transformers 5 one `rope_parameters` for both.
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
    """Our keys. `theta` is the family's default. Only `latent` families (MLA) scale attention logits by
    mscale_all_dim. `partial`: the family has read `partial_rotary_factor` itself."""
    given = options.take_optional("rope_parameters") or {}
    scaling = options.take_optional("rope_scaling") or {}
    if not isinstance(given, Mapping) or not isinstance(scaling, Mapping):
        options.add_problem("rope_parameters and rope_scaling are objects")
        return {}
    # Both spellings in one: options of their own, of which none may be left over.
    inner = ConfigOptions({**scaling, **given}, f"{options.where}: rope_parameters")
    outer_theta = options.take_optional("rope_theta") or theta
    values = {"theta": inner.take_value("rope_theta", default=outer_theta)}
    kind = inner.take_value("rope_type", "type", default="default")
    if kind in ROPE_TYPES:
        values["scaling"] = ROPE_TYPES[kind]
        longest = options.left.get("max_position_embeddings", 0)
        values |= read_rope_scaling(inner, kind, longest, latent)
        if partial:
            inner.ignore_keys(["partial_rotary_factor"])
        inner.require_value("partial_rotary_factor", 1.0, 1, why="all dims of a head have rope")
        options.problems += inner.problems
        options.problems += [f"{inner.where}: {name} is not supported" for name in inner.left]
    else:
        options.add_problem(f"rope_type = {kind} is not supported; expected one of {', '.join(ROPE_TYPES)}")
    return {ROPE_PREFIX + name: value for name, value in values.items()}


def read_rope_scaling(inner: ConfigOptions, kind: str, longest: int, latent: bool) -> dict[str, Any]:
    """The keys of a kind of scaling. `longest` is max_position_embeddings."""
    values: dict[str, Any] = {}
    original = inner.take_optional("original_max_position_embeddings") or longest
    factor = inner.take_optional("factor")
    if kind == "default":
        return values
    values["factor"] = longest / original if factor is None else factor
    if kind in ("llama3", "yarn"):
        values["original_length"] = original
    if kind == "llama3":
        values["low_frequency"] = inner.take_value("low_freq_factor")
        values["high_frequency"] = inner.take_value("high_freq_factor")
    if kind == "yarn":
        values["beta_fast"] = inner.take_optional("beta_fast") or 32.0
        values["beta_slow"] = inner.take_optional("beta_slow") or 1.0
        values["round_dims"] = inner.take_value("truncate", default=True)
        values |= read_yarn_mscale(inner, values["factor"], latent)
    return values


def read_yarn_mscale(inner: ConfigOptions, factor: float, latent: bool) -> dict[str, Any]:
    """YaRN's mscale. With m(s) = 0.1 s ln(factor) + 1, rotary tables are scaled by m(mscale) / m(mscale_all_dim), or by
    `attention_factor`. With MLA, attention logits are also scaled by m(mscale_all_dim) squared."""
    mscale = inner.take_optional("mscale")
    mscale_all = inner.take_optional("mscale_all_dim")
    direct = inner.take_optional("attention_factor")
    if direct is not None and not (mscale or mscale_all):
        if direct < 1 or factor <= 1:
            inner.add_problem(f"attention_factor = {direct} is not supported; expected 1 or more")
            return {}
        slope = 0.1 * math.log(factor)
        return {"mscale": (direct - 1) / slope}
    # Without attention_factor: none of the two, or with MLA both.
    both = bool(mscale) and bool(mscale_all)
    neither = not mscale and not mscale_all
    legal = neither or (latent and both)
    if direct is not None or not legal:
        expected = "mscale and mscale_all_dim together" if latent else "neither mscale nor mscale_all_dim"
        inner.add_problem(
            f"mscale = {mscale}, mscale_all_dim = {mscale_all}, attention_factor = {direct} is not supported; "
            f"expected {expected}"
        )
        return {}
    if both:
        return {"mscale": mscale, "mscale_all": mscale_all}
    return {"mscale": 1.0}


def write_rope_options(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": "default"}}
    scaling: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling != "linear":
        scaling["original_max_position_embeddings"] = rope.original_length
    if rope.scaling == "llama3":
        scaling["low_freq_factor"] = rope.low_frequency
        scaling["high_freq_factor"] = rope.high_frequency
    if rope.scaling == "yarn":
        scaling["beta_fast"] = rope.beta_fast
        scaling["beta_slow"] = rope.beta_slow
        scaling["truncate"] = rope.round_dims
        scaling |= write_yarn_mscale(rope)
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def write_yarn_mscale(rope: RopeConfig) -> dict[str, float]:
    if rope.mscale_all:
        return {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all}
    if rope.mscale != 1.0:
        attention_factor = 0.1 * rope.mscale * math.log(rope.factor) + 1
        return {"attention_factor": attention_factor}
    return {}
