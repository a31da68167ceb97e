"""config.json to our model configuration, and back. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from moefold.checkpoint.hf.config_options import ConfigOptions
from moefold.checkpoint.hf.families.deepseek_v2 import DEEPSEEK_V2
from moefold.checkpoint.hf.families.deepseek_v3 import DEEPSEEK_V3
from moefold.checkpoint.hf.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from moefold.checkpoint.hf.families.glm4_moe import GLM4_MOE
from moefold.checkpoint.hf.families.gpt_oss import GPT_OSS
from moefold.checkpoint.hf.families.kimi_k2 import KIMI_K2
from moefold.checkpoint.hf.families.mixtral import MIXTRAL
from moefold.checkpoint.hf.families.olmoe import OLMOE
from moefold.checkpoint.hf.families.qwen2_moe import QWEN2_MOE
from moefold.checkpoint.hf.families.qwen3_moe import QWEN3_MOE
from moefold.checkpoint.hf.family import ModelFamily
from moefold.checkpoint.hf.model_folder import ModelFolder
from moefold.config.errors import UserError, one_of, printable_text
from moefold.config.keys import format_value, iterate_keys
from moefold.config.read import with_values
from moefold.config.run import Config, ModelConfig

FAMILIES: dict[str, ModelFamily] = {
    family.kind: family
    for family in (
        *(MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V2, GPT_OSS, GLM4_MOE),
        *(LLAMA, MISTRAL, QWEN2, QWEN3),
    )
}
QUANT_METHODS = {"fp8": "blocks of 128 x 128 with weight_scale_inv", "mxfp4": "blocks of 32 with a shared power of two"}

# Keys of a model that act in training alone, or only on how and not on what is computed: no config.json holds them.
TRAINING_KEYS = (
    *(
        "init_std",
        "mtp_loss",
        "moe.balance.aux_loss",
        "moe.balance.aux_over",
        "moe.balance.bias_rate",
        "moe.balance.bias_step",
        "moe.balance.bias_pace",
        "moe.balance.device_loss",
    ),
    *(
        "moe.balance.devices",
        "moe.capacity.per_device",
        "moe.balance.z_loss",
        "moe.router.jitter",
        "moe.router.force_balance",
        "moe.capacity.factor",
    ),
    *(
        "moe.capacity.drop",
        "moe.capacity.over",
        "moe.capacity.pad",
        "moe.capacity.pad_rows",
        "moe.gate",
        "moe.router.looks_ahead",
    ),
)


@dataclass(frozen=True)
class DescribedModel:
    """What a folder's config.json says, and what the files say about it."""

    family: ModelFamily
    model: ModelConfig
    notes: tuple[str, ...] = ()


def describe_model(folder: ModelFolder) -> DescribedModel:
    """The model that a folder holds. An option that we do not have is refused by name."""
    where = str(folder.path / "config.json")
    kind = folder.options.get("model_type")
    family = FAMILIES[one_of(f"model_type (in {where})", printable_text(str(kind)), FAMILIES)]
    options = ConfigOptions(folder.options, where)
    check_quantisation(options)
    model = read_model_config(family, options)
    tensors = len(folder.tensors)
    if model.layers > tensors or model.layers * model.moe.experts > 1000 * tensors:  # a table of that would never end
        sizes = f"{model.layers} layers with {model.moe.experts} experts"
        raise UserError(f"{where} tells of {sizes}, but the files hold {tensors} tensors; one of the two is wrong")
    return without_missing_mtp(DescribedModel(family, model), folder)


def read_model_config(family: ModelFamily, options: ConfigOptions) -> ModelConfig:
    try:
        values = family.read(options)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        options.add_problem(
            f"an option has a value of the wrong kind ({printable_text(str(error))}); expected sizes as numbers"
        )
        values = {}
    options.finish()
    problems: dict[str, str] = {}
    config = with_values(Config(), {f"model.{name}": value for name, value in values.items()}, problems)
    if problems:
        raise UserError(*(f"{options.where}: {problem}" for problem in problems.values()))
    return config.model


def check_quantisation(options: ConfigOptions) -> None:
    said = options.take_optional("quantization_config")
    if said is None:
        return
    method = said.get("quant_method") if isinstance(said, dict) else said
    if method not in QUANT_METHODS:
        kinds = "; ".join(f"{name}: {what}" for name, what in QUANT_METHODS.items())
        options.add_problem(
            f"quantization_config has quant_method = {printable_text(str(method))}; expected one of {kinds}"
        )
    elif method == "fp8" and said.get("weight_block_size", [128, 128]) != [128, 128]:
        options.add_problem(f"weight_block_size = {said['weight_block_size']} is not supported; expected [128, 128]")


def without_missing_mtp(described: DescribedModel, folder: ModelFolder) -> DescribedModel:
    """Layers that predict further tokens are there if the files hold them: transformers leaves them out when it saves,
    and does not change what config.json says."""
    model = described.model
    beyond = {f"model.layers.{model.layers + depth}." for depth in range(model.mtp)}
    held = {prefix for prefix in beyond if any(name.startswith(prefix) for name in folder.tensors)}
    if held or not beyond:
        return described
    note = f"{folder.path} has no tensors of the {model.mtp} layers that predict further tokens; going on without"
    return DescribedModel(described.family, replace(model, mtp=0), (note,))


def essential_values(model: ModelConfig) -> dict[str, Any]:
    """The keys of a model that take part in what it computes, so that two models can be compared."""
    values = {key.path.removeprefix("model."): key.default for key in iterate_keys(Config(model=model))}
    values = {key: value for key, value in values.items() if hasattr(model, key.split(".")[0])}
    a, moe, rope = model.attention, model.moe, model.attention.rope
    unused = set(TRAINING_KEYS)
    if a.kind != "mla":
        unused |= {"attention.kv_rank", "attention.q_rank", "attention.value_dim"}
    used_by = {"none": (), "linear": ("factor",), "llama3": ("factor", "original_length", "low_frequency")}
    yarn = ("factor", "original_length", "beta_fast", "beta_slow", "round_dims", "mscale", "mscale_all")
    acting = {f"attention.rope.{name}" for name in ("theta", "scaling", *used_by.get(rope.scaling, yarn))}
    acting |= {"attention.rope.high_frequency"} if rope.scaling == "llama3" else set()
    unused |= {key for key in values if key.startswith("attention.rope.")} - acting
    if moe.router.groups_chosen >= moe.router.groups:
        unused |= {"moe.router.groups", "moe.router.groups_chosen", "moe.router.group_score"}
    if moe.activation != "clamped_swiglu":
        unused.add("moe.clamp")
    if not moe.dense_layers and moe.every == 1:
        unused.add("dense_ffn")
    values["attention.value_dim"] = a.value_dim or a.head_dim
    values["attention.rope_dim"] = a.rope_dim or a.head_dim
    return {key: value for key, value in values.items() if key not in unused}


def config_json_for(family: ModelFamily, model: ModelConfig) -> dict[str, Any]:
    """config.json for a model of this family, which must have a place for all that the model computes."""
    written, missing = write_and_read_back(family, model)
    if missing:
        raise UserError(*(f"a {family.kind} model has no place for {text}" for text in missing))
    return written


def write_and_read_back(family: ModelFamily, model: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """config.json of a model, and what differs when it is read again."""
    written = {"architectures": [family.architecture], "model_type": family.kind, **family.write(model)}
    try:
        again = essential_values(read_model_config(family, ConfigOptions(written, "config.json")))
    except UserError as refused:
        return written, list(refused.problems)
    mine = essential_values(model)
    differing = [key for key in mine if key not in again or not nearly_equal(mine[key], again[key])]
    return written, [f"model.{key} = {format_value(mine[key])}" for key in differing]


def nearly_equal(a: Any, b: Any) -> bool:
    return abs(a - b) <= 1e-12 * abs(a) if isinstance(a, float) and isinstance(b, float) else a == b


def family_for_model(model: ModelConfig, kind: str | None = None) -> ModelFamily:
    """The family that can hold a model: the one asked for, or the first that fits."""
    if kind is not None:
        return FAMILIES[one_of("family", kind, writable_families())]
    lacks = {name: write_and_read_back(FAMILIES[name], model)[1] for name in writable_families()}
    fitting = [name for name, lack in lacks.items() if not lack]
    if fitting:
        return FAMILIES[fitting[0]]
    nearest = min(lacks, key=lambda name: len(lacks[name]))
    raise UserError(
        f"no family of Hugging Face models has a place for all of this one; the nearest, {nearest}, has none for",
        *lacks[nearest],
    )


def writable_families() -> Iterable[str]:
    return [name for name, family in FAMILIES.items() if not family.dense]
