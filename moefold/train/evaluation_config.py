"""The configuration of a model that is evaluated or generates text, on one rank or cut over several. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moefold.config.errors import UserError
from moefold.config.read import parse_overrides, with_values
from moefold.config.rule import ConfigOnRanks
from moefold.config.rules import broken_rules, sequence_multiple
from moefold.config.run import CapacityConfig, Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig


def evaluation_config(model: ModelConfig, parallel: ParallelConfig, seq_len: int, ranks: int) -> Config:
    """As a run would have it, so that kernels are chosen and rules checked in the same way. Sequences are padded to a
    length that splits over the ranks."""
    missing = -seq_len % sequence_multiple(parallel)
    padded = seq_len + missing
    data = DataConfig(seq_len=padded, tokenizer="tokenizer.json")  # not opened here
    train = TrainConfig(global_batch=ranks, micro_batch=1)
    return Config(model=model, data=data, train=train, parallel=parallel)


def require_evaluation(config: Config, ranks: int) -> None:
    """Refuse a layout that breaks a rule, and models whose results would depend on the number of ranks."""
    case = ConfigOnRanks(config, ranks)
    problems = broken_rules(case)
    if ranks > 1:
        problems += padding_problems(config.model)
    if problems:
        raise UserError(*problems)


def padding_problems(model: ModelConfig) -> list[str]:
    """Why padding, of which there is more on several ranks, would change what a model computes; empty if it does
    not."""
    router = model.moe.router
    if router.kind == "token_choice" and not router.force_balance:
        return []
    name = "force_balance" if router.force_balance else router.kind
    return [
        f"model.moe.router: {name} chooses experts by all tokens of a batch, padding among them, and several ranks pad "
        "in other ways than one; expected token_choice without force_balance; evaluate on one rank"
    ]


def without_capacity(model: ModelConfig) -> ModelConfig:
    """The model with experts that drop nothing: a capacity is counted over a batch, which a generated token has not."""
    moe = replace(model.moe, capacity=CapacityConfig())
    return replace(model, moe=moe)


def degrees_of(parallel: ParallelConfig) -> ParallelConfig:
    """The degrees of a run's layout; how it sends tokens in training is its own matter."""
    return ParallelConfig(
        tp=parallel.tp,
        cp=parallel.cp,
        pp=parallel.pp,
        ep=parallel.ep,
        etp=parallel.etp,
    )


def with_layout_overrides(parallel: ParallelConfig, overrides: Sequence[str]) -> ParallelConfig:
    """The layout with `--parallel.key value`."""
    problems: dict[str, str] = {}
    values = parse_overrides(overrides)
    config = Config(parallel=parallel)
    config = with_values(config, values, problems)
    if problems:
        raise UserError(*problems.values())
    return config.parallel
