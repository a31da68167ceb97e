"""config.json read with care: every key is used, known to change nothing, or refused by name. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moefold.config.errors import UserError, printable_text

# Keys that say nothing about what is computed in training: where a model came from, how text is generated with it, and
# what libraries keep for themselves.
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
    "max_position_embeddings",
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
    """What is not taken by the end is refused."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.left = {name: value for name, value in raw.items() if value is not None}
        self.where = where
        self.problems: list[str] = []

    def take(self, *names: str, default: Any = None) -> Any:
        """The value under the first of these names that is there, and no longer any of the others."""
        found = [self.left.pop(name) for name in names if name in self.left]
        if not found and default is None:
            self.problems.append(f'{self.where} has no "{names[0]}", which this family needs')
        if any(other != found[0] for other in found[1:]):
            self.problems.append(f"{self.where}: {' and '.join(names)} are one option, but have different values")
        return found[0] if found else default

    def count(self, name: str, most: int) -> int:
        """A number of things that are gone through one by one: at least 1, and no more than makes sense."""
        value = self.take(name)
        if type(value) is int and 1 <= value <= most:
            return value
        if value is not None:
            self.add_problem(f"{name} = {show_value(value)} is not legal; expected a whole number from 1 to {most}")
        return 1

    def take_optional(self, name: str) -> Any:
        """The value, or None."""
        return self.left.pop(name, None)

    def require_value(self, name: str, *legal: Any, why: str) -> None:
        """Refuse any value but these; an option that is not there is as the first of them."""
        value = self.left.pop(name, legal[0])
        if value not in legal or isinstance(value, bool) != isinstance(legal[0], bool):
            expected = " or ".join(map(str, legal))
            self.problems.append(
                f"{self.where}: {name} = {show_value(value)} is not supported ({why}); expected {expected}"
            )

    def ignore_keys(self, names: Iterable[str]) -> None:
        for name in names:
            self.left.pop(name, None)

    def add_problem(self, text: str) -> None:
        self.problems.append(f"{self.where}: {text}")

    def finish(self) -> None:
        """Refuse all that is wrong, and all that nobody took."""
        self.ignore_keys(HARMLESS_KEYS)
        unknown = [
            f"{self.where}: {printable_text(str(name))} = {show_value(value)} is not supported; "
            "moefold does not know what it changes, so it does not ignore it"
            for name, value in self.left.items()
        ]
        if self.problems or unknown:
            raise UserError(*self.problems, *unknown)


def show_value(value: Any) -> str:
    return printable_text(str(value).lower() if isinstance(value, bool) else str(value))
