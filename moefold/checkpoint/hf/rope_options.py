"""Rotary position options of config.json, read and written. Torch-free.

There are two spellings: `rope_theta` and `rope_scaling`, and since transformers 5 one `rope_parameters` for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions, show_value
from moefold.checkpoint.hf.published_defaults import ROPE_KEYS
from moefold.config.run import RopeConfig

ROPE_PREFIX = "attention.rope."
ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
LENGTHENING = ("llama3", "yarn")  # types that know the length before


def read_rope_options(options: ConfigOptions, latent: bool = False) -> dict[str, Any]:
    """Our keys, for heads of which all dims have rope."""
    parameters = take_rope_parameters(options)
    partial = parameters.pop("partial_rotary_factor", 1.0)
    if partial != 1:
        shown = show_value(partial)
        options.add_problem(f"partial_rotary_factor = {shown} is not supported (all dims of a head have rope)")
    return read_rope_parameters(options, parameters, latent)


def take_rope_parameters(options: ConfigOptions) -> dict[str, Any]:
    """`rope_parameters` as transformers makes it of all spellings: `rope_scaling` takes the place of `rope_parameters`,
    and a key inside goes before the same key outside."""
    parameters: dict[str, Any] = {}
    older = options.take_optional("rope_scaling")
    newer = options.take_optional("rope_parameters")
    if newer is None:
        newer = options.published.defaults["rope_parameters"]
    chosen = older or newer or {}
    if isinstance(chosen, Mapping):
        parameters |= chosen
    else:
        options.add_problem("rope_parameters and rope_scaling are objects")
    parameters.setdefault("rope_theta", options.take_optional("rope_theta"))
    if "partial_rotary_factor" in options.published.defaults:
        share = options.take_optional("partial_rotary_factor")
        if share is not None:
            parameters.setdefault("partial_rotary_factor", share)
    kind = parameters.pop("type", "default")
    parameters.setdefault("rope_type", kind)
    return parameters


def read_rope_parameters(options: ConfigOptions, parameters: dict[str, Any], latent: bool = False) -> dict[str, Any]:
    """Our keys. Only `latent` families (MLA) scale attention logits by mscale_all_dim."""
    kind = parameters.pop("rope_type")
    if kind not in ROPE_TYPES:
        options.add_problem(f"rope_type = {show_value(kind)} is not supported; expected one of {', '.join(ROPE_TYPES)}")
        return {}
    # Options of their own, of which none may be left over.
    inner = ConfigOptions(parameters, f"{options.where}: rope_parameters", ROPE_KEYS[kind])
    theta = inner.take_value("rope_theta")
    values: dict[str, Any] = {"theta": theta, "scaling": ROPE_TYPES[kind]}
    longest = longest_position(options)
    if kind in LENGTHENING:
        values["original_length"] = read_original_length(options, inner, longest)
    if kind in ("linear", "llama3"):
        values["factor"] = inner.take_value("factor")
    if kind == "llama3":
        values["low_frequency"] = inner.take_value("low_freq_factor")
        values["high_frequency"] = inner.take_value("high_freq_factor")
    if kind == "yarn" and not inner.problems:
        values |= read_yarn_options(inner, values, longest, latent)
    inner.ignore_keys(["factor", "original_max_position_embeddings"])  # of a type that does not read them
    options.problems += inner.problems
    options.problems += [f"{inner.where}: {name} is not supported" for name in inner.left]
    return {ROPE_PREFIX + name: value for name, value in values.items()}


def read_original_length(options: ConfigOptions, inner: ConfigOptions, longest: int) -> Any:
    """The length before the scaling: inside, or else the longest."""
    name = "original_max_position_embeddings"
    if name in options.left:
        # transformers lets it go before the one inside; published code does not.
        options.ignore_keys([name])
        options.add_problem(f"{name} outside of rope_parameters is not supported; put it inside")
    if name in inner.left:
        return inner.take_value(name)
    return longest


def longest_position(options: ConfigOptions) -> int:
    """max_position_embeddings, which only scaled rope reads."""
    return options.take_count("max_position_embeddings", most=10**12)


def read_yarn_options(inner: ConfigOptions, values: dict[str, Any], longest: int, latent: bool) -> dict[str, Any]:
    if "factor" not in inner.left:
        inner.add_missing("factor")
        return {}
    factor = inner.take_optional("factor")
    if factor is None and latent and inner.left.get("mscale_all_dim"):
        inner.add_problem("factor = null is not supported beside mscale_all_dim")
    if factor is None:
        factor = longest / values["original_length"]
    yarn = {
        "factor": factor,
        "beta_fast": inner.take_optional("beta_fast") or 32.0,
        "beta_slow": inner.take_optional("beta_slow") or 1.0,
        "round_dims": inner.take_flag("truncate"),
    }
    refuse_endless_dims(inner, values)
    return yarn | read_yarn_mscale(inner, factor, latent)


def refuse_endless_dims(inner: ConfigOptions, values: dict[str, Any]) -> None:
    """Refuse a base or a length for which no dim turns a given number of times: its logarithm is 0 or undefined."""
    theta = values["theta"]
    length = values["original_length"]
    if theta <= 1 or length <= 0:
        inner.add_problem(f"rope_theta = {theta}, original_max_position_embeddings = {length} is not legal with YaRN")


def read_yarn_mscale(inner: ConfigOptions, factor: float, latent: bool) -> dict[str, Any]:
    """YaRN's mscale. With m(s) = 0.1 s ln(factor) + 1, rotary tables are scaled by m(mscale) / m(mscale_all_dim), or by
    `attention_factor`. With MLA, attention logits are also scaled by m(mscale_all_dim) squared."""
    mscale = inner.take_optional("mscale")
    mscale_all = inner.take_optional("mscale_all_dim")
    direct = inner.take_optional("attention_factor")
    if latent and mscale_all:
        if not mscale or direct is not None:
            inner.add_problem(
                f"mscale = {mscale}, mscale_all_dim = {mscale_all}, attention_factor = {direct} is not supported; "
                "expected mscale and mscale_all_dim together, without attention_factor"
            )
        return {"mscale": mscale, "mscale_all": mscale_all}
    slope = 0.1 * math.log(max(factor, 1))
    if direct is None and mscale and mscale_all:
        direct = (mscale * slope + 1) / (mscale_all * slope + 1)
    if direct is None or direct == slope + 1:
        return {"mscale": 1.0}
    if direct < 1 or not slope:
        inner.add_problem(f"attention_factor = {direct} is not supported with factor = {factor}; expected 1 or more")
        return {}
    return {"mscale": (direct - 1) / slope}


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
        logarithm = math.log(rope.factor)
        attention_factor = 0.1 * rope.mscale * logarithm + 1
        return {"attention_factor": attention_factor}
    return {}
