"""Rules of the section `precision`: readable entries, widths that FP8 kernels can read, options that do something."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter

from moefold.config.errors import UserError
from moefold.config.keys import format_value
from moefold.config.precision_recipes import (
    RECIPE_SPECS,
    WIDTH_MULTIPLE,
    NumberFormat,
    RecipeSpec,
    parse_recipe_entries,
    recipe_entry_problems,
)
from moefold.config.rule import Condition, ConfigOnRanks, ConfigRule, RuleList, message_of

RECIPE = "precision.recipe"
ENTRIES = "precision.recipes"

PRECISION_RULES = RuleList()


def entry_problems(c: ConfigOnRanks) -> str:
    return recipe_entry_problems(c.precision.recipes)


@PRECISION_RULES.rule(
    "precision recipes can be read",
    (ENTRIES,),
    says=entry_problems,
    fix='set precision.recipes to ""',
)
def precision_recipes_can_be_read(c: ConfigOnRanks) -> bool:
    return not entry_problems(c)


def recipes_in_use(c: ConfigOnRanks) -> list[RecipeSpec]:
    """The default recipe and those of all entries that can be read."""
    names = [c.precision.recipe]
    with suppress(UserError):  # reported by the rule above
        entries = parse_recipe_entries(c.precision.recipes)
        names += [entry.recipe for entry in entries]
    return [RECIPE_SPECS[name] for name in names]


def quantises_by_default(c: ConfigOnRanks) -> bool:
    return RECIPE_SPECS[c.precision.recipe].quantises


def format_in_use(*formats: NumberFormat) -> Condition:
    def is_in_use(c: ConfigOnRanks) -> bool:
        return any(spec.format in formats for spec in recipes_in_use(c))

    return is_in_use


def scales_in_some_epilogue(c: ConfigOnRanks) -> bool:
    return any(spec.scales_in_epilogue for spec in recipes_in_use(c))


def delays_some_scales(c: ConfigOnRanks) -> bool:
    return c.precision.scaling == "delayed" and scales_in_some_epilogue(c)


def trains_in_fp16(c: ConfigOnRanks) -> bool:
    return c.train.precision == "fp16"


def sends_to_experts(c: ConfigOnRanks) -> bool:
    return c.parallel.ep * c.parallel.etp > 1


def sums_over_tp(c: ConfigOnRanks) -> bool:
    return c.parallel.tp > 1


def sends_fp8(c: ConfigOnRanks) -> bool:
    """Whether anything is sent in FP8 beside weights."""
    precision = c.precision
    sent = (precision.dispatch, precision.combine_gradient, precision.tp_sums, precision.tp_sum_gradients)
    return c.optim.gradient_reduce == "fp8" or any(format != "plain" for format in sent)


def has_fp8_scales(c: ConfigOnRanks) -> bool:
    return format_in_use("fp8")(c) or sends_fp8(c)


# Options that would be ignored.


def option_rule(
    option: str,
    default: object,
    needed: Condition,
    why: str,
    *others: str,
    by: tuple[str, ...] = (RECIPE, ENTRIES),
) -> ConfigRule:
    """The option has its default value unless the recipes in use, or other keys, need it."""
    path = f"precision.{option}"

    def option_is_used(c: ConfigOnRanks) -> bool:
        return attrgetter(path)(c) == default or needed(c)

    reads = (path, *others, *by)
    values = ", ".join(f"<{key}>" for key in reads)
    fix = f"set {path} to {format_value(default)}"
    says = message_of(f"{values}: {why}")
    return ConfigRule(f"{path} is used", reads, option_is_used, says, message_of(fix))


NO_FP8 = "no recipe in use has FP8 scales"
NO_MXFP8 = "no recipe in use is mxfp8"
NO_NVFP4 = "no recipe in use is nvfp4"
NO_MICRO = "no recipe in use is mxfp8 or nvfp4"
NOT_IN_EPILOGUE = "no recipe in use applies scales to finished sums, as fp8_tensor and fp8_row do"
NOT_DELAYED = "no scales are delayed"
NOT_SENT = "all experts are on each rank, so no token is sent"
NOT_SUMMED = "there is one tp rank, so nothing is summed over tp"
NOT_FP16 = "only fp16 has a loss scale"
NOT_BY_DEFAULT = "layers are excluded from precision.recipe, which is plain"

OPTION_RULES = [
    option_rule("power_of_two_scales", False, has_fp8_scales, NO_FP8),
    option_rule("gradient_format", "e4m3", format_in_use("fp8"), NO_FP8),
    option_rule("scale_rounding", "up", format_in_use("mxfp8"), NO_MXFP8),
    option_rule("weight_blocks", "auto", format_in_use("mxfp8", "nvfp4"), NO_MICRO),
    option_rule("hadamard", True, format_in_use("nvfp4"), NO_NVFP4),
    option_rule("stochastic", True, format_in_use("nvfp4"), NO_NVFP4),
    option_rule("rounding_seed", 0, format_in_use("nvfp4"), NO_NVFP4),
    option_rule("storage", "plain", format_in_use("fp8"), NO_FP8),
    option_rule("accumulate", "promoted", scales_in_some_epilogue, NOT_IN_EPILOGUE),
    option_rule("scaling", "current", scales_in_some_epilogue, NOT_IN_EPILOGUE),
    option_rule("history", 16, delays_some_scales, NOT_DELAYED, "precision.scaling"),
    option_rule("margin", 0, delays_some_scales, NOT_DELAYED, "precision.scaling"),
    option_rule("dispatch", "plain", sends_to_experts, NOT_SENT, by=("parallel.ep", "parallel.etp")),
    option_rule("combine_gradient", "plain", sends_to_experts, NOT_SENT, by=("parallel.ep", "parallel.etp")),
    option_rule("tp_sums", "plain", sums_over_tp, NOT_SUMMED, by=("parallel.tp",)),
    option_rule("tp_sum_gradients", "plain", sums_over_tp, NOT_SUMMED, by=("parallel.tp",)),
    option_rule("loss_scale", 65536.0, trains_in_fp16, NOT_FP16, by=("train.precision",)),
    option_rule("loss_scale_growth", 2000, trains_in_fp16, NOT_FP16, by=("train.precision",)),
    option_rule("exclude_first", 0, quantises_by_default, NOT_BY_DEFAULT),
    option_rule("exclude_last", -1, quantises_by_default, NOT_BY_DEFAULT),
]
PRECISION_RULES.extend(OPTION_RULES)


@PRECISION_RULES.rule(
    "fp16 products are plain",
    ("train.precision", RECIPE, ENTRIES),
    says="<train.precision>, <precision.recipe>, <precision.recipes>: quantised products read and write bf16 or fp32",
    fix="set train.precision to bf16",
)
def fp16_products_are_plain(c: ConfigOnRanks) -> bool:
    return not trains_in_fp16(c) or not any(spec.quantises for spec in recipes_in_use(c))


@PRECISION_RULES.rule(
    "deepep sends bf16",
    ("parallel.dispatcher", "precision.dispatch", "precision.combine_gradient"),
    says="<parallel.dispatcher> sends rows of bf16, but <precision.dispatch> and <precision.combine_gradient>",
    fix="set precision.dispatch and precision.combine_gradient to plain",
)
def deepep_sends_bf16(c: ConfigOnRanks) -> bool:
    formats = (c.precision.dispatch, c.precision.combine_gradient)
    return c.parallel.dispatcher != "deepep" or formats == ("plain", "plain")


@PRECISION_RULES.rule(
    "some layer is not excluded",
    ("precision.exclude_first", "precision.exclude_last", "model.layers"),
    says="<precision.exclude_first> and <precision.exclude_last> leave no layer of <model.layers>",
    fix="set precision.exclude_first to 0 and precision.exclude_last to 0",
)
def some_layer_is_not_excluded(c: ConfigOnRanks) -> bool:
    excluded = c.precision.exclude_first + max(0, c.precision.exclude_last)
    return excluded == 0 or excluded < c.model.layers


# Storage of weights.


@PRECISION_RULES.rule(
    "FP8 storage has one set of bytes for both layouts",
    ("precision.storage", RECIPE, ENTRIES),
    says="<precision.storage> keeps one set of bytes for both layouts of a weight, but fp8_row quantises each layout "
    "with scales of its own (<precision.recipe>, <precision.recipes>)",
    fix="set precision.storage to plain",
)
def fp8_storage_has_one_set_of_bytes(c: ConfigOnRanks) -> bool:
    return c.precision.storage != "fp8" or all(spec.weight != "channel" for spec in recipes_in_use(c))


# Widths of products on one rank.


def is_latent(c: ConfigOnRanks) -> bool:
    return c.model.attention.kind == "mla"


def has_dense_mlp(c: ConfigOnRanks) -> bool:
    moe = c.model.moe
    return moe.dense_layers > 0 or moe.every > 1


def always(_: ConfigOnRanks) -> bool:
    return True


@dataclass(frozen=True)
class ProductWidth:
    """A key that is a width of products, for each head where `per_head`, cut over the ranks of `axis`."""

    path: str
    axis: str = ""
    per_head: bool = False
    applies: Callable[[ConfigOnRanks], bool] = always

    def ranks(self, c: ConfigOnRanks) -> int:
        """The ranks that cut the width; 1 where they share key/value heads, which are whole on each."""
        if not self.axis:
            return 1
        ranks: int = getattr(c.parallel, self.axis)
        is_shared = self.per_head and ranks > c.model.attention.kv_heads
        return 1 if is_shared else ranks

    def on_one_rank(self, c: ConfigOnRanks) -> int:
        heads = c.model.attention.kv_heads if self.per_head else 1
        width = attrgetter(self.path)(c)
        return width * heads // self.ranks(c)

    def rule(self) -> ConfigRule:
        def width_is_a_multiple(c: ConfigOnRanks) -> bool:
            if not quantises_by_default(c) or not self.applies(c):
                return True
            return self.on_one_rank(c) % WIDTH_MULTIPLE == 0

        def advise_multiple(c: ConfigOnRanks) -> str:
            ranks = 1 if self.per_head else self.ranks(c)
            return f"set {self.path} to a multiple of {WIDTH_MULTIPLE * ranks}"

        def describe_width(c: ConfigOnRanks) -> str:
            value = attrgetter(self.path)(c)
            width = self.on_one_rank(c)
            needs = f"{RECIPE} = {c.precision.recipe} needs multiples of {WIDTH_MULTIPLE}"
            return f"{self.path} = {value} is a width of {width} on a rank, but {needs}"

        axes = (f"parallel.{self.axis}",) if self.axis else ()
        heads = ("model.attention.kv_heads",) if self.per_head else ()
        reads = (self.path, RECIPE, *axes, *heads)
        return ConfigRule(f"FP8 fits {self.path}", reads, width_is_a_multiple, describe_width, advise_multiple)


PRODUCT_WIDTHS = (
    ProductWidth("model.hidden"),
    ProductWidth("model.dense_ffn", "tp", applies=has_dense_mlp),
    ProductWidth("model.moe.ffn", "etp"),
    ProductWidth("model.moe.shared_ffn", "tp"),
    ProductWidth("model.moe.latent"),
    ProductWidth("model.attention.head_dim", "tp", per_head=True),
    ProductWidth("model.attention.value_dim", "tp", per_head=True, applies=is_latent),
    ProductWidth("model.attention.rope_dim", applies=is_latent),
    ProductWidth("model.attention.q_rank", applies=is_latent),
    ProductWidth("model.attention.kv_rank", applies=is_latent),
)
PRECISION_RULES.extend(width.rule() for width in PRODUCT_WIDTHS)
