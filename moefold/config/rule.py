"""What a rule is: data that checks a configuration on a number of ranks, says what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from moefold.config.errors import printable_text
from moefold.config.keys import format_value
from moefold.config.run import Config


@dataclass(frozen=True)
class ConfigOnRanks:
    """A configuration on a number of ranks: what rules look at."""

    config: Config
    world: int = 1

    @property
    def dense_model_ranks(self) -> int:
        p = self.config.parallel
        return p.tp * p.cp * p.pp

    @property
    def expert_model_ranks(self) -> int:
        p = self.config.parallel
        return p.etp * p.ep * p.pp

    @property
    def dp(self) -> int:
        return max(1, self.world // self.dense_model_ranks)

    @property
    def share(self) -> int:
        """Sequences of a global batch that one data-parallel rank gets, at least one."""
        return max(1, self.config.train.global_batch // self.dp)


@dataclass(frozen=True)
class ConfigRule:
    name: str
    reads: tuple[str, ...]
    holds: Callable[[ConfigOnRanks], bool]
    says: Callable[[ConfigOnRanks], str]
    fix: Callable[[ConfigOnRanks], str]


def divisors_in_words(n: int, most: int = 12) -> str:
    """The divisors of n in words, the largest few when there are many."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    found = sorted({*small, *(n // d for d in small)})
    return ", ".join(map(str, found if len(found) <= most else [*found[:3], *found[-(most - 3) :]]))


def simple_rule(
    name: str, reads: tuple[str, ...], holds: Callable[[Config], bool], why: str, fix: str | Callable[[Config], str]
) -> ConfigRule:
    """A rule whose message is the values of its keys and one reason."""

    def values_and_reason(c: ConfigOnRanks) -> str:
        values = (f"{key} = {printable_text(format_value(attrgetter(key)(c.config)))}" for key in reads)
        return f"{', '.join(values)}: {why}"

    return ConfigRule(
        name,
        reads,
        lambda c: holds(c.config),
        values_and_reason,
        lambda c: fix if isinstance(fix, str) else fix(c.config),
    )
