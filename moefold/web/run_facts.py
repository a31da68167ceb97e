"""What a run is, in a few lines, from its configuration."""

from __future__ import annotations

from moefold.anatomy.model_totals import active_parameters, total_parameters
from moefold.anatomy.step_specs import is_moe_layer
from moefold.config.errors import printable_text
from moefold.config.run import Config, MoeConfig
from moefold.observe.progress import compact_number

RANK_AXES = ("tp", "cp", "pp", "ep", "etp")


def describe_run(config: Config, step: int) -> list[tuple[str, str]]:
    """The run in a few lines, each a name and a text."""
    model = config.model
    moe = model.moe
    train = config.train
    seq_len = config.data.seq_len
    parameters = compact_number(total_parameters(model))
    active = compact_number(active_parameters(model))
    routed = len(moe_layer_numbers(config))
    tokens = compact_number(step * tokens_per_step(config))
    return [
        ("model", printable_text(config.name)),
        ("parameters", f"{parameters}, {active} active per token"),
        ("experts", f"{moe.experts}, {moe.top_k} per token, in {routed} of {model.layers} layers"),
        ("balance", describe_balance(moe)),
        ("steps", f"{step:,} of {train.steps:,}"),
        ("tokens", tokens),
        ("batch", f"{train.global_batch} sequences of {seq_len} tokens"),
        ("layout", describe_degrees(config)),
        ("precision", describe_precision(config)),
        ("data", printable_text(config.data.source)),
    ]


def describe_precision(config: Config) -> str:
    train = config.train
    model = f"{train.precision} on {train.device}"
    recipe = config.precision.recipe
    return model if recipe == "plain" else f"{model}; products in {recipe}"


def describe_balance(moe: MoeConfig) -> str:
    means: list[str] = []
    if moe.balance.bias_rate:
        means.append(f"bias rate {moe.balance.bias_rate:g}")
    if moe.balance.aux_loss:
        means.append(f"loss {moe.balance.aux_loss:g}")
    balance = " and ".join(means) or "none"
    capacity = "dropless"
    if moe.capacity.factor:
        capacity = f"capacity {moe.capacity.factor:g} x even"
    return f"{balance}; {capacity}"


def describe_degrees(config: Config) -> str:
    parallel = config.parallel
    degrees = [f"{axis} {getattr(parallel, axis)}" for axis in RANK_AXES]
    slots = parallel.clone_slots
    if slots:
        degrees.append(f"{slots} spare slots for clones of experts")
    return ", ".join(degrees)


def tokens_per_step(config: Config) -> int:
    return config.train.global_batch * config.data.seq_len


def moe_layer_numbers(config: Config) -> list[int]:
    model = config.model
    layers = range(model.layers)
    return [layer for layer in layers if is_moe_layer(model, layer)]
