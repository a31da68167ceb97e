"""Options of config.json: every key is used, known to be harmless, or refused by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moefold.checkpoint.hf.published_defaults import PublishedKeys
from moefold.config.errors import UserError, printable_text

# Keys without effect on training: a model's origin, text generation, and bookkeeping of libraries.
HARMLESS_KEYS = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "ep_size",
    "id2label",
    "initial_context_length",
    "is_decoder",
    "is_encoder_decoder",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_length",
    "model_type",
    "_name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "sep_token_id",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
}


class ConfigOptions:
    """The options of a config.json, with the published defaults of its family for those that are absent. A family takes
    those that it has; `refuse_leftovers` refuses the others."""

    def __init__(self, raw: Mapping[str, Any], where: str, published: PublishedKeys):
        self.left = dict(raw)
        self.where = where  # for messages: the path of the file
        self.published = published
        self.problems: list[str] = []

    def take_optional(self, name: str) -> Any:
        """The value of an option or its default. None: null where that is legal, or a default that is none."""
        default = self.published.defaults[name]
        names = [name, *self.second_names(name)]
        given: dict[str, Any] = {}
        for spelling in names:
            if spelling in self.left:
                given[spelling] = self.left.pop(spelling)
        if not given:
            return default
        for spelling, value in given.items():
            if value is None and name not in self.published.nullable:
                self.add_problem(f"{spelling} = null is not supported; expected a value, or no such key")
                return default
        values = list(given.values())
        first, *others = values
        if any(value != first for value in others):
            self.add_problem(f"{' and '.join(given)} are one option, but have different values")
        return values[0]

    def second_names(self, name: str) -> list[str]:
        pairs = self.published.second_names.items()
        return [second for second, first in pairs if first == name]

    def take_value(self, name: str) -> Any:
        """The value of an option that must have one."""
        told = len(self.problems)
        value = self.take_optional(name)
        if value is None and len(self.problems) == told:
            self.add_missing(name)
        return value

    def take_flag(self, name: str) -> bool:
        """True or false; null is false where it is legal."""
        value = self.take_optional(name)
        if value is not None and not isinstance(value, bool):
            self.add_problem(f"{name} = {show_value(value)} is not legal; expected true or false")
        return bool(value)

    def take_size(self, name: str) -> int:
        """A number that is computed with: whole, and not negative."""
        value = self.take_value(name)
        if type(value) is int and value >= 0:
            return value
        if value is not None:
            self.add_problem(f"{name} = {show_value(value)} is not legal; expected a whole number")
        return 1

    def take_count(self, name: str, most: int) -> int:
        """A number of layers or heads, over which tables loop: at least 1, and at most a plausible number."""
        value = self.take_value(name)
        if type(value) is int and 1 <= value <= most:
            return value
        self.add_problem(f"{name} = {show_value(value)} is not legal; expected a whole number from 1 to {most}")
        return 1

    def require_value(self, name: str, *legal: Any, why: str) -> None:
        """Refuse any value but the legal ones. Null, where it is legal, is the first of them."""
        value = self.take_optional(name)
        if value is None:
            return
        is_flag = isinstance(value, bool)
        same_kind = is_flag == isinstance(legal[0], bool)
        if value not in legal or not same_kind:
            expected = " or ".join(map(str, legal))
            self.add_problem(f"{name} = {show_value(value)} is not supported ({why}); expected {expected}")

    def ignore_keys(self, names: Iterable[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def add_missing(self, name: str) -> None:
        self.problems.append(f'{self.where} has no "{name}", for which there is no default')

    def add_problem(self, text: str) -> None:
        self.problems.append(f"{self.where}: {text}")

    def refuse_leftovers(self) -> None:
        """Raise all problems, and refuse every option that was not taken."""
        self.ignore_keys(HARMLESS_KEYS)
        for name, value in self.left.items():
            if value is None:
                continue  # an option that the family does not have, and that is off
            shown = printable_text(str(name))
            self.add_problem(
                f"{shown} = {show_value(value)} is not supported; "
                "moefold does not know what it changes, so it does not ignore it"
            )
        if self.problems:
            raise UserError(*self.problems)


def show_value(value: Any) -> str:
    """A value as JSON has it; a text without quotes."""
    if value is None:
        return "null"
    text = str(value)
    if isinstance(value, bool):
        text = text.lower()
    return printable_text(text)
