"""What a rule is: data that checks a configuration on a number of ranks, says what is wrong and how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from moefold.config.keys import show
from moefold.config.refused import printable
from moefold.config.run import Config


@dataclass(frozen=True)
class Case:
    """A configuration on a number of ranks: what rules look at."""

    config: Config
    world: int = 1

    @property
    def dense_part(self) -> int:
        p = self.config.parallel
        return p.tp * p.cp * p.pp

    @property
    def expert_part(self) -> int:
        p = self.config.parallel
        return p.etp * p.ep * p.pp

    @property
    def dp(self) -> int:
        return max(1, self.world // self.dense_part)

    @property
    def share(self) -> int:
        """Sequences of a global batch that one data-parallel rank gets, at least one."""
        return max(1, self.config.train.global_batch // self.dp)


@dataclass(frozen=True)
class Rule:
    name: str
    reads: tuple[str, ...]
    holds: Callable[[Case], bool]
    says: Callable[[Case], str]
    fix: Callable[[Case], str]


def divisors(n: int, most: int = 12) -> str:
    """The divisors of n in words, the largest few when there are many."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    found = sorted({*small, *(n // d for d in small)})
    return ", ".join(map(str, found if len(found) <= most else [*found[:3], *found[-(most - 3) :]]))


def rule(
    name: str, reads: tuple[str, ...], holds: Callable[[Config], bool], why: str, fix: str | Callable[[Config], str]
) -> Rule:
    """A rule whose message is the values of its keys and one reason."""

    def says(c: Case) -> str:
        values = (f"{key} = {printable(show(attrgetter(key)(c.config)))}" for key in reads)
        return f"{', '.join(values)}: {why}"

    return Rule(name, reads, lambda c: holds(c.config), says, lambda c: fix if isinstance(fix, str) else fix(c.config))
