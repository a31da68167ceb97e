"""A folder of adapters in PEFT's format, from anywhere: adapter_config.json and adapter_model.safetensors, checked
before anything is read. Torch-free.

Options that change what an adapter computes, and that moefold does not have, are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moefold.checkpoint.format.safetensors_header import DTYPE_BYTES, StoredTensor, tensors_in_file
from moefold.checkpoint.hf.model_folder import file_in_folder, first_few_lines, read_json_file
from moefold.config.errors import UserError, printable_text

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
Number = TypeVar("Number", int, float)
ROOT = "base_model.model."
TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
LARGEST_RANK = 4096
FLOATS = ("F64", "F32", "F16", "BF16")
# Options without effect on what a saved adapter computes, beside those that are read.
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying"),
    *("qalora_group_size", "eva_config", "lora_ga_config", "loftq_config", "corda_config"),
}
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base too
REGULAR_EXPRESSION = set("*+?[](){}|^$\\")


@dataclass(frozen=True)
class AdapterPair:
    """lora_A and lora_B of a module of theirs, whose name is without PEFT's prefix."""

    module: str
    a: StoredTensor
    b: StoredTensor


@dataclass(frozen=True)
class AdapterFolder:
    """`pairs`: by module. Ranks and alphas by pattern are those of names that end with the pattern."""

    path: Path
    rank: int
    alpha: float
    rs: bool
    ranks: dict[str, int]
    alphas: dict[str, float]
    pairs: dict[str, AdapterPair]

    def rank_of(self, target: str) -> int:
        return value_of_name(self.ranks, target, self.rank)

    def scale_of(self, target: str) -> float:
        """What B A of the target, a module or a parameter, is multiplied by."""
        rank = self.rank_of(target)
        alpha = value_of_name(self.alphas, target, self.alpha)
        return alpha / (rank**0.5 if self.rs else rank)


def value_of_name(by_pattern: Mapping[str, Number], name: str, otherwise: Number) -> Number:
    """The value of the first pattern that ends the name, with `.weight` behind it as target_parameters have it."""
    for pattern, value in by_pattern.items():
        if f".{name}".endswith(f".{pattern.removesuffix('.weight')}"):
            return value
    return otherwise


def open_adapter_folder(path: Path) -> AdapterFolder:
    """The folder's options and pairs of tensors, or a refusal with every problem."""
    if not (path / CONFIG_FILE).exists():
        raise UserError(f"{path} has no {CONFIG_FILE}; expected a folder of adapters, as PEFT saves them")
    if not (path / WEIGHTS_FILE).exists() and (path / PICKLED_FILE).exists():
        raise UserError(
            f"{path} has {PICKLED_FILE}, a pickled file, which is never opened; save the adapter as safetensors"
        )
    options = read_json_file(file_in_folder(path, CONFIG_FILE))
    tensors = tensors_in_file(file_in_folder(path, WEIGHTS_FILE))
    problems = option_problems(options)
    ranks = read_pattern(options, "rank_pattern", problems)
    alphas = read_pattern(options, "alpha_pattern", problems)
    rank = options.get("r")
    alpha = options.get("lora_alpha")
    if not is_rank(rank):
        problems.append(f"r = {printable_text(str(rank))}; expected a whole number from 1 to {LARGEST_RANK}")
    if not is_positive(alpha):
        problems.append(f"lora_alpha = {printable_text(str(alpha))}; expected a number above 0")
    pairs = read_pairs(tensors, problems)
    if problems:
        raise UserError(f"{path} has adapters that cannot be loaded:", *first_few_lines(problems))
    whole_ranks = {name: int(value) for name, value in ranks.items()}
    return AdapterFolder(path, rank, alpha, bool(options.get("use_rslora")), whole_ranks, alphas, pairs)  # pyright: ignore[reportArgumentType]


def option_problems(options: dict[str, Any]) -> list[str]:
    """A problem for each option that would change what the adapter computes."""
    problems: list[str] = []
    kind = options.get("peft_type")
    if kind != "LORA":
        problems.append(f"peft_type = {printable_text(str(kind))}; expected LORA")
    bias = options.get("bias", "none")
    if bias != "none":
        problems.append(f"bias = {printable_text(str(bias))}: biases of the base are frozen here; expected none")
    start = options.get("init_lora_weights", True)
    if start not in PLAIN_STARTS:
        shown = printable_text(str(start))
        problems.append(f"init_lora_weights = {shown} changes the base too; save the adapter converted to plain LoRA")
    for name, value in options.items():
        if value and name not in READ | WITHOUT_EFFECT:
            shown = printable_text(f"{name} = {value}")
            problems.append(f"{shown} is not supported; expected it to be absent, false or empty")
    return problems


def read_pattern(options: dict[str, Any], key: str, problems: list[str]) -> dict[str, float]:
    """Numbers by names of modules or their ends. Regular expressions are refused."""
    content = options.get(key) or {}
    if not isinstance(content, dict):
        problems.append(f"{key} is no object of numbers by name")
        return {}
    is_legal = is_rank if key == "rank_pattern" else is_positive
    found: dict[str, float] = {}
    for pattern, value in content.items():
        name = pattern.removeprefix("^").replace("\\.", ".")
        if REGULAR_EXPRESSION & set(name):
            shown = printable_text(pattern)
            problems.append(f'{key} has the regular expression "{shown}"; expected names, or ends of names')
        elif not is_legal(value):
            problems.append(f'{key} of "{printable_text(name)}" is {printable_text(str(value))}; expected a number')
        else:
            found[name] = value
    return found


def is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST_RANK


def is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e9


def read_pairs(tensors: dict[str, StoredTensor], problems: list[str]) -> dict[str, AdapterPair]:
    """The tensors by module, A with its B."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        found = TENSOR_NAME.fullmatch(name)
        shown = printable_text(name)
        if found is None:
            problems.append(f'"{shown}" is no lora_A or lora_B of a linear layer or of experts')
        elif len(stored.shape) != 2 or stored.dtype not in FLOATS:
            problems.append(f'"{shown}" is {stored.dtype} {list(stored.shape)}; expected a matrix of floats')
        else:
            halves.setdefault(found["module"], {})[found["part"]] = stored
    pairs: dict[str, AdapterPair] = {}
    for module, parts in halves.items():
        if len(parts) < 2:
            problems.append(f'"{printable_text(module)}" has lora_{"".join(parts)} alone; expected lora_A and lora_B')
        else:
            pairs[module] = AdapterPair(module, parts["A"], parts["B"])
    if not tensors:
        problems.append(f"{WEIGHTS_FILE} has no tensors")
    return pairs


def have_equal_bytes(pairs: Iterable[AdapterPair]) -> bool:
    """Whether lora_A of all pairs is the same to the byte."""
    stored = [pair.a for pair in pairs]
    kinds = {(each.dtype, each.shape) for each in stored}
    return len(kinds) <= 1 and len(set(map(bytes_of, stored))) <= 1


def bytes_of(stored: StoredTensor) -> bytes:
    rows, columns = stored.shape
    with stored.file.open("rb") as file:
        file.seek(stored.offset)
        return file.read(rows * columns * DTYPE_BYTES[stored.dtype])
