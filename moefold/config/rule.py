"""Rules of the configuration: a check on a number of ranks, a message for a broken rule, and a fix.

    @MODEL_RULES.rule("top-k within experts", reads, says="<model.moe.top_k> exceeds <model.moe.experts>", fix="...")
    def top_k_within_experts(c): ...

Messages are templates: `<model.moe.top_k>` becomes `model.moe.top_k = 9`, and `{model.moe.top_k}` becomes `9`. A
message that needs more is a function of the case.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from moefold.config.errors import printable_text
from moefold.config.keys import format_value
from moefold.config.run import (
    CheckpointConfig,
    Config,
    DataConfig,
    KernelsConfig,
    LoraConfig,
    MemoryConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    ShardConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class ConfigOnRanks:
    """A configuration on a number of ranks: the case that rules check. Its sections are attributes."""

    config: Config
    world: int = 1

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def data(self) -> DataConfig:
        return self.config.data

    @property
    def train(self) -> TrainConfig:
        return self.config.train

    @property
    def optim(self) -> OptimConfig:
        return self.config.optim

    @property
    def lora(self) -> LoraConfig:
        return self.config.lora

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def shard(self) -> ShardConfig:
        return self.config.shard

    @property
    def pipeline(self) -> PipelineConfig:
        return self.config.pipeline

    @property
    def precision(self) -> PrecisionConfig:
        return self.config.precision

    @property
    def memory(self) -> MemoryConfig:
        return self.config.memory

    @property
    def observe(self) -> ObserveConfig:
        return self.config.observe

    @property
    def kernels(self) -> KernelsConfig:
        return self.config.kernels

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.checkpoint

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def dense_model_ranks(self) -> int:
        p = self.parallel
        return p.tp * p.cp * p.pp

    @property
    def expert_model_ranks(self) -> int:
        p = self.parallel
        return p.etp * p.ep * p.pp

    @property
    def dp(self) -> int:
        return max(1, self.world // self.dense_model_ranks)

    @property
    def share(self) -> int:
        """Sequences of a global batch that one data-parallel rank gets, at least one."""
        return max(1, self.train.global_batch // self.dp)


Condition = Callable[[ConfigOnRanks], bool]
MessageOf = Callable[[ConfigOnRanks], str]
Message = str | MessageOf


@dataclass(frozen=True)
class ConfigRule:
    """A rule between keys. `reads` names its keys: the rule is skipped if one of them is known to be illegal. `says` is
    the message of the broken rule, `fix` the advice."""

    name: str
    reads: tuple[str, ...]
    holds: Condition
    says: MessageOf
    fix: MessageOf


class RuleList(list[ConfigRule]):
    """Rules in the order in which they are written."""

    def rule(
        self, name: str, reads: tuple[str, ...], fix: Message, says: Message = "", why: str = ""
    ) -> Callable[[Condition], Condition]:
        """Add the decorated condition as a rule. With `why`, its message is its keys' values and the reason."""
        if why:
            keys = ", ".join(f"<{path}>" for path in reads)
            says = f"{keys}: {why}"

        def add_condition(holds: Condition) -> Condition:
            rule = ConfigRule(name, reads, holds, message_of(says), message_of(fix))
            self.append(rule)
            return holds

        return add_condition


def message_of(message: Message) -> MessageOf:
    """The message as a function of the case: itself, or its template filled in."""
    if not isinstance(message, str):
        return message
    template = message

    def fill_template(c: ConfigOnRanks) -> str:
        return render_message(template, c)

    return fill_template


def render_message(template: str, c: ConfigOnRanks) -> str:
    """`<path>` becomes `path = value`, `{path}` becomes the value."""

    def shown_value(found: re.Match[str]) -> str:
        key_and_value, value_only = found.groups()
        if key_and_value:
            return f"{key_and_value} = {show_value_at(key_and_value, c)}"
        return show_value_at(value_only, c)

    return re.sub(r"<([\w.]+)>|\{([\w.]+)\}", shown_value, template)


def show_value_at(path: str, c: ConfigOnRanks) -> str:
    value: Any = attrgetter(path)(c)
    if isinstance(value, float):
        return f"{value:g}"
    return printable_text(format_value(value))


def set_to_divisor(key: str, of: str) -> MessageOf:
    """The advice to set a key to one of the divisors of another key's value."""

    def list_divisors(c: ConfigOnRanks) -> str:
        return f"set {key} to one of {divisors_in_words(attrgetter(of)(c))}"

    return list_divisors


def divisors_in_words(n: int, most: int = 12) -> str:
    """The divisors of n as text; of many, three small ones and the largest."""
    root = int(n**0.5)
    small = [d for d in range(1, root + 1) if n % d == 0]
    large = [n // d for d in small]
    divisors = sorted({*small, *large})
    if len(divisors) > most:
        largest = divisors[3 - most :]
        divisors = divisors[:3] + largest
    return ", ".join(map(str, divisors))
