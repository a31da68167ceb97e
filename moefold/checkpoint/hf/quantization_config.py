"""The quantization_config of a config.json: the forms that are read, and the one that is written. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from moefold.checkpoint.hf.config_options import ConfigOptions, show_value
from moefold.config.errors import printable_text

FP8_BLOCK = 128  # rows, and columns, that share a scale
FP8_BLOCK_SIZE = [FP8_BLOCK, FP8_BLOCK]
FP8_BLOCKS: dict[str, Any] = {  # as DeepSeek-V3 has it
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": FP8_BLOCK_SIZE,
}
QUANT_METHODS = {"fp8": "blocks of 128 x 128 with weight_scale_inv", "mxfp4": "blocks of 32 with a shared power of two"}
FP8_VALUES: dict[str, tuple[Any, ...]] = {  # of quant_method fp8; of the legal values, the first is an absent key's
    "quant_method": ("fp8",),
    "weight_block_size": (FP8_BLOCK_SIZE,),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0", None),  # the files tell which
    "expert_dtype": ("fp8",),
}
# Keys without effect: the files tell which tensors are quantised.
HARMLESS_FP8_KEYS = ("dequantize", "ignored_layers", "modules_to_not_convert")
WHAT_TO_DO = "dequantise the folder with the library that wrote it and save it in bf16"


def fp8_quantisation(plain_modules: list[str]) -> dict[str, Any]:
    """The quantization_config of 128 x 128 FP8 blocks. `plain_modules` are linear layers that are not quantised."""
    quantisation = dict(FP8_BLOCKS)
    if plain_modules:
        quantisation["modules_to_not_convert"] = plain_modules
    return quantisation


def check_quantisation(options: ConfigOptions) -> None:
    """Refuse quantised weights that are neither 128 x 128 FP8 blocks nor MXFP4."""
    quantisation = options.left.pop("quantization_config", None)
    if quantisation is None:
        return
    if not isinstance(quantisation, dict):
        shown = show_value(quantisation)
        options.add_problem(f"quantization_config = {shown} is not legal; expected an object with quant_method")
        return
    values = cast(dict[str, Any], quantisation)
    method = str(values.get("quant_method"))
    if method not in QUANT_METHODS:
        described = [f"{name}: {blocks}" for name, blocks in QUANT_METHODS.items()]
        kinds = "; ".join(described)
        shown = printable_text(method)
        options.add_problem(f"quantization_config has quant_method = {shown}; expected one of {kinds}; {WHAT_TO_DO}")
    elif method == "fp8":
        check_fp8_values(options, values)


def check_fp8_values(options: ConfigOptions, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in HARMLESS_FP8_KEYS:
            continue
        legal = FP8_VALUES.get(name, (None,))
        if value not in legal:
            text = f"quantization_config has {printable_text(name)} = {show_value(value)}, which is not supported"
            options.add_problem(f"{text}; expected {expected_value(name)}; {WHAT_TO_DO}")


def expected_value(name: str) -> str:
    if name not in FP8_VALUES:
        return "no such key"
    first, *_ = FP8_VALUES[name]
    return show_value(first)
