"""Every rule that ties keys together, as data: the checks, the messages and the planner's pruning read one list.

A rule is (name, reads, holds, says, fix). `reads` names its keys, so that a rule is passed over when one of them
is already known to be illegal and arithmetic on it would only add noise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moefold.config.refused import Refused, printable
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


CROSS_FIELD: list[Rule] = [
    Rule(
        "the name can be a folder's",
        ("name",),
        lambda c: re.fullmatch(r"\w[\w.+-]{0,80}", c.config.name, re.ASCII) is not None,
        lambda c: f"name = {printable(c.config.name)} cannot name a folder; expected letters, digits and . _ + -",
        lambda c: "set name to something like my-run",
    ),
    Rule(
        "kv heads divide heads",
        ("model.attention.heads", "model.attention.kv_heads"),
        lambda c: c.config.model.attention.heads % c.config.model.attention.kv_heads == 0,
        lambda c: (
            f"model.attention.kv_heads = {c.config.model.attention.kv_heads} does not divide "
            f"model.attention.heads = {c.config.model.attention.heads}"
        ),
        lambda c: f"set model.attention.kv_heads to one of {divisors(c.config.model.attention.heads)}",
    ),
    Rule(
        "head width is even",
        ("model.attention.head_dim",),
        lambda c: c.config.model.attention.head_dim % 2 == 0,
        lambda c: f"model.attention.head_dim = {c.config.model.attention.head_dim} is odd; RoPE turns pairs",
        lambda c: f"set model.attention.head_dim to {c.config.model.attention.head_dim + 1}",
    ),
    Rule(
        "top-k within experts",
        ("model.moe.top_k", "model.moe.experts"),
        lambda c: c.config.model.moe.top_k <= c.config.model.moe.experts,
        lambda c: (
            f"model.moe.top_k = {c.config.model.moe.top_k} exceeds model.moe.experts = {c.config.model.moe.experts}"
        ),
        lambda c: f"set model.moe.top_k to at most {c.config.model.moe.experts}",
    ),
    Rule(
        "dense layers within layers",
        ("model.moe.dense_layers", "model.layers"),
        lambda c: c.config.model.moe.dense_layers <= c.config.model.layers,
        lambda c: (
            f"model.moe.dense_layers = {c.config.model.moe.dense_layers} exceeds model.layers = {c.config.model.layers}"
        ),
        lambda c: f"set model.moe.dense_layers to at most {c.config.model.layers}",
    ),
    Rule(
        "llama3 frequencies in order",
        ("model.attention.rope.low_frequency", "model.attention.rope.high_frequency", "model.attention.rope.scaling"),
        lambda c: (
            c.config.model.attention.rope.scaling != "llama3"
            or c.config.model.attention.rope.low_frequency < c.config.model.attention.rope.high_frequency
        ),
        lambda c: (
            f"model.attention.rope.low_frequency = {c.config.model.attention.rope.low_frequency:g} is not below "
            f"model.attention.rope.high_frequency = {c.config.model.attention.rope.high_frequency:g}"
        ),
        lambda c: f"set model.attention.rope.high_frequency above {c.config.model.attention.rope.low_frequency:g}",
    ),
    Rule(
        "yarn turns in order",
        ("model.attention.rope.beta_fast", "model.attention.rope.beta_slow", "model.attention.rope.scaling"),
        lambda c: (
            c.config.model.attention.rope.scaling != "yarn"
            or c.config.model.attention.rope.beta_slow < c.config.model.attention.rope.beta_fast
        ),
        lambda c: (
            f"model.attention.rope.beta_slow = {c.config.model.attention.rope.beta_slow:g} is not below "
            f"model.attention.rope.beta_fast = {c.config.model.attention.rope.beta_fast:g}"
        ),
        lambda c: f"set model.attention.rope.beta_fast above {c.config.model.attention.rope.beta_slow:g}",
    ),
    Rule(
        "files are named",
        ("data.source", "data.files"),
        lambda c: (c.config.data.source == "files") == bool(c.config.data.files),
        lambda c: (
            "data.source = files, but data.files is empty"
            if c.config.data.source == "files"
            else f"data.files = {printable(','.join(c.config.data.files))}, but data.source = {c.config.data.source}"
        ),
        lambda c: "set data.files to your files, such as --data.source files --data.files corpus.txt",
    ),
    Rule(
        "bytes fit the vocabulary",
        ("data.tokenizer", "model.vocab"),
        lambda c: c.config.data.tokenizer != "byte" or c.config.model.vocab >= 256,
        lambda c: f"model.vocab = {c.config.model.vocab} cannot hold the 256 tokens of data.tokenizer = byte",
        lambda c: "set model.vocab to 256 or more",
    ),
    Rule(
        "dense grid fits the world",
        ("parallel.tp", "parallel.cp", "parallel.pp"),
        lambda c: c.world % c.dense_part == 0,
        lambda c: f"parallel.tp x cp x pp = {c.dense_part} does not divide the number of ranks, {c.world}",
        lambda c: f"start a multiple of {c.dense_part} ranks, or choose a product among {divisors(c.world)}",
    ),
    Rule(
        "expert grid fits the world",
        ("parallel.ep", "parallel.etp", "parallel.pp"),
        lambda c: c.world % c.expert_part == 0,
        lambda c: f"parallel.etp x ep x pp = {c.expert_part} does not divide the number of ranks, {c.world}",
        lambda c: f"start a multiple of {c.expert_part} ranks, or choose a product among {divisors(c.world)}",
    ),
    Rule(
        "global batch splits evenly",
        ("train.global_batch", "train.micro_batch", "parallel.tp", "parallel.cp", "parallel.pp"),
        lambda c: c.config.train.global_batch % (c.dp * c.config.train.micro_batch) == 0,
        lambda c: (
            f"train.global_batch = {c.config.train.global_batch} does not split over {c.dp} data-parallel ranks "
            f"in parts of train.micro_batch = {c.config.train.micro_batch}"
        ),
        lambda c: (
            f"set train.micro_batch to one of {divisors(c.config.train.global_batch // c.dp)}"
            if c.config.train.global_batch % c.dp == 0
            else f"set train.global_batch to a multiple of {c.dp * c.config.train.micro_batch}"
        ),
    ),
]


def not_yet(degree: str, what: str) -> Rule:
    """A degree the configuration knows and this version cannot run."""
    return Rule(
        f"{degree} is one",
        (f"parallel.{degree}",),
        lambda c: getattr(c.config.parallel, degree) == 1,
        lambda c: (
            f"parallel.{degree} = {getattr(c.config.parallel, degree)}, but this version has no {what} parallelism"
        ),
        lambda c: f"set parallel.{degree} to 1; more ranks are used for data parallelism",
    )


NOT_YET = [
    not_yet("tp", "tensor"),
    not_yet("cp", "context"),
    not_yet("pp", "pipeline"),
    not_yet("ep", "expert"),
    not_yet("etp", "expert tensor"),
]

RULES = CROSS_FIELD + NOT_YET


def broken(case: Case, illegal: Iterable[str] = ()) -> list[str]:
    """The message and the fix of every broken rule whose keys are themselves legal."""
    skip = set(illegal)
    found = [rule for rule in RULES if not skip & set(rule.reads) and not rule.holds(case)]
    return [f"{rule.says(case)}; {rule.fix(case)}" for rule in found]


def check(config: Config, world: int = 1) -> Config:
    """Return the configuration if every rule holds on that many ranks; otherwise refuse with all broken rules."""
    if problems := broken(Case(config, world)):
        raise Refused(*problems)
    return config
