"""Translation of config.json to the model's configuration, and back. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from moefold.anatomy.step_specs import is_moe_layer
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
from moefold.checkpoint.hf.published_defaults import family_keys
from moefold.checkpoint.hf.quantization_config import check_quantisation
from moefold.config.errors import UserError, one_of, printable_text
from moefold.config.keys import format_value, iterate_keys
from moefold.config.read import with_values
from moefold.config.run import Config, ModelConfig, RopeConfig

MOE_FAMILIES = (MIXTRAL, OLMOE, QWEN3_MOE, QWEN2_MOE, DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V2, GPT_OSS, GLM4_MOE)
DENSE_FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)
ALL_FAMILIES = (*MOE_FAMILIES, *DENSE_FAMILIES)
FAMILIES: dict[str, ModelFamily] = {family.kind: family for family in ALL_FAMILIES}

# Keys of a model that act in training only, or on the way of computing and not on the result: no config.json has them.
TRAINING_KEYS = (
    "init_std",
    "mtp_loss",
    "moe.balance.aux_loss",
    "moe.balance.aux_over",
    "moe.balance.bias_rate",
    "moe.balance.bias_step",
    "moe.balance.bias_pace",
    "moe.balance.device_loss",
    "moe.balance.devices",
    "moe.balance.z_loss",
    "moe.capacity.drop",
    "moe.capacity.factor",
    "moe.capacity.over",
    "moe.capacity.pad",
    "moe.capacity.pad_rows",
    "moe.capacity.per_device",
    "moe.gate",
    "moe.router.force_balance",
    "moe.router.jitter",
    "moe.router.looks_ahead",
)
MLA_KEYS = ("attention.kv_rank", "attention.q_rank", "attention.value_dim")
GROUP_KEYS = ("moe.router.groups", "moe.router.groups_chosen", "moe.router.group_score")
ROPE_KEYS = {  # below attention.rope, by the kind of scaling: those that the kind reads
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_length", "low_frequency", "high_frequency"),
    "yarn": ("factor", "original_length", "beta_fast", "beta_slow", "round_dims", "mscale", "mscale_all"),
}
JOINT_AUX_LOSS = "router_aux_loss_coef"  # of families whose balance loss is transformers' own
MOST_EXPERTS_A_TENSOR = 1000  # layers x experts per stored tensor


@dataclass(frozen=True)
class DescribedModel:
    """The model that a folder's config.json describes, and notes on what the files lack of it."""

    family: ModelFamily
    model: ModelConfig
    notes: tuple[str, ...] = ()


def describe_model(folder: ModelFolder) -> DescribedModel:
    """The model of a folder. Options of config.json that are not supported are refused by name."""
    where = str(folder.path / "config.json")
    described = describe_options(folder.options, where)
    model = described.model
    # Sizes that the files cannot have would make name tables without end.
    tensors = len(folder.tensors)
    experts = model.layers * model.moe.experts
    if model.layers > tensors or experts > MOST_EXPERTS_A_TENSOR * tensors:
        sizes = f"{model.layers} layers with {model.moe.experts} experts"
        raise UserError(f"{where} tells of {sizes}, but the files hold {tensors} tensors; one of the two is wrong")
    described = without_missing_mtp(described, folder)
    return replace(described, model=with_legal_dense_layers(described.model))


def describe_options(raw: Mapping[str, Any], where: str) -> DescribedModel:
    """The model of the options of a config.json alone; `where` names the file in messages."""
    kind = raw.get("model_type")
    name = one_of(f"model_type (in {where})", printable_text(str(kind)), FAMILIES)
    family = FAMILIES[name]
    keys = family_keys(family.kind)
    options = ConfigOptions(raw, where, keys)
    check_quantisation(options)
    return DescribedModel(family, read_model_config(family, options))


def read_model_config(family: ModelFamily, options: ConfigOptions) -> ModelConfig:
    try:
        values = family.read(options)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        reason = printable_text(str(error))
        options.add_problem(f"an option has a value of the wrong kind ({reason}); expected sizes as numbers")
        values = {}
    options.refuse_leftovers()
    problems: dict[str, str] = {}
    model_values: dict[str, Any] = {}
    for name, value in values.items():
        model_values[f"model.{name}"] = value
    config = with_values(Config(), model_values, problems)
    if problems:
        described = [f"{options.where}: {problem}" for problem in problems.values()]
        raise UserError(*described)
    model = config.model
    if JOINT_AUX_LOSS not in options.published.defaults:
        return model
    per_layer = model.moe.balance.aux_loss / joint_loss_factor(model)
    return with_aux_loss(model, per_layer)


def joint_loss_factor(model: ModelConfig) -> float:
    """transformers' coefficient over moefold's. Its balance loss is one for all layers together and counts K choices of
    a token, so K at perfect balance; moefold's is one at perfect balance, in each layer."""
    layers = range(model.layers)
    moe_layers = sum(is_moe_layer(model, layer) for layer in layers)
    return max(1, moe_layers) / model.moe.top_k


def to_twelve_digits(x: float) -> float:
    """Rounded, so that a coefficient that was read is written as the same number."""
    return float(f"{x:.12g}")


def with_aux_loss(model: ModelConfig, weight: float) -> ModelConfig:
    """The model with another weight of the balance loss, counted over a microbatch as transformers does."""
    aux_loss = to_twelve_digits(weight)
    balance = model.moe.balance
    balance = replace(balance, aux_loss=aux_loss, aux_over="microbatch")
    moe = replace(model.moe, balance=balance)
    return replace(model, moe=moe)


def without_missing_mtp(described: DescribedModel, folder: ModelFolder) -> DescribedModel:
    """The model without MTP layers if the files have none: transformers leaves these out when it saves a model, and
    keeps their number in config.json."""
    model = described.model
    if not model.mtp:
        return described
    for depth in range(model.mtp):
        prefix = f"model.layers.{model.layers + depth}."
        if any(name.startswith(prefix) for name in folder.tensors):
            return described
    note = f"{folder.path} has no tensors of the {model.mtp} layers that predict further tokens; going on without"
    without_mtp = replace(model, mtp=0)
    return DescribedModel(described.family, without_mtp, (note,))


def with_legal_dense_layers(model: ModelConfig) -> ModelConfig:
    """The model with as many dense layers as it has layers, where config.json tells of more of them."""
    layers = model.layers + model.mtp
    dense_layers = min(model.moe.dense_layers, layers)
    moe = replace(model.moe, dense_layers=dense_layers)
    return replace(model, moe=moe)


def essential_values(model: ModelConfig) -> dict[str, Any]:
    """The keys of a model that determine what it computes, so that two models can be compared."""
    values: dict[str, Any] = {}
    unused = unused_keys(model)
    for key in iterate_keys(Config(model=model)):
        name = key.path.removeprefix("model.")
        section = name.split(".")[0]
        if hasattr(model, section) and name not in unused:
            values[name] = key.default
    attention = model.attention
    head = attention.head_dim
    if "attention.value_dim" in values:
        values["attention.value_dim"] = attention.value_dim or head
    if "attention.rope_dim" in values:
        values["attention.rope_dim"] = attention.rope_dim or head
    return values


def unused_keys(model: ModelConfig) -> set[str]:
    """The keys that have no effect on what this model computes."""
    moe = model.moe
    router = model.moe.router
    unused = set(TRAINING_KEYS) | unused_rope_keys(model.attention.rope)
    if model.attention.kind != "mla":
        unused.update(MLA_KEYS)
    if router.groups_chosen >= router.groups:
        unused.update(GROUP_KEYS)
    if moe.activation != "clamped_swiglu":
        unused.add("moe.clamp")
    if not moe.dense_layers and moe.every == 1:
        unused.update(("dense_ffn", "dense_activation"))
    return unused


def unused_rope_keys(rope: RopeConfig) -> set[str]:
    used = {"theta", "scaling", *ROPE_KEYS[rope.scaling]}
    names = {field.name for field in fields(rope)}
    return {f"attention.rope.{name}" for name in names - used}


def config_json_for(family: ModelFamily, model: ModelConfig) -> dict[str, Any]:
    """config.json of a model. Refused if the family has no option for something that the model computes."""
    written, missing = write_and_read_back(family, model)
    if missing:
        raise UserError(*(f"a {family.kind} model has no place for {text}" for text in missing))
    return written


def write_and_read_back(family: ModelFamily, model: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """config.json of a model, and the differences after reading it again."""
    written = {
        "architectures": [family.architecture],
        "model_type": family.kind,
        **family.write(model),
    }
    if JOINT_AUX_LOSS in written:
        joint = model.moe.balance.aux_loss * joint_loss_factor(model)
        written[JOINT_AUX_LOSS] = to_twelve_digits(joint)
    keys = family_keys(family.kind)
    written_options = ConfigOptions(written, "config.json", keys)
    try:
        model_again = read_model_config(family, written_options)
    except UserError as refused:
        return written, list(refused.problems)
    expected = essential_values(model)
    again = essential_values(model_again)
    differences: list[str] = []
    for key, value in expected.items():
        is_same = key in again and nearly_equal(value, again[key])
        if not is_same:
            differences.append(f"model.{key} = {format_value(value)}")
    return written, differences


def nearly_equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-12 * abs(a)
    return a == b


def family_for_model(model: ModelConfig, kind: str | None = None) -> ModelFamily:
    """The family of an exported model: the one asked for, or the first that has an option for everything in it."""
    if kind is not None:
        name = one_of("family", kind, writable_families())
        return FAMILIES[name]
    missing: dict[str, list[str]] = {}
    for name in writable_families():
        family = FAMILIES[name]
        _, missing[name] = write_and_read_back(family, model)
        if not missing[name]:
            return family
    nearest = min(missing, key=lambda name: len(missing[name]))
    raise UserError(
        f"no family of Hugging Face models has a place for all of this one; the nearest, {nearest}, has none for",
        *missing[nearest],
    )


def writable_families() -> Iterable[str]:
    families = FAMILIES.values()
    return [family.kind for family in families if not family.dense]
