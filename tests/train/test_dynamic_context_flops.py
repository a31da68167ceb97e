"""The largest of eight ranks computes less with dynamic sizes than with fixed ones on samples of many lengths.

FLOPs are counted in closed form from the rows that the ranks are given: products of each position, padding too, and
attention of each query with the keys that it sees. Ranks wait for the largest one of each microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from moefold.config.rules import check_config
from moefold.config.run import Config
from moefold.data.corpus import Corpus
from moefold.data.dynamic_context import context_shape
from moefold.data.flops_price import FlopsPrice
from moefold.data.packed_sequences import PackedSequences
from moefold.data.regrouped_samples import RegroupedSamples
from moefold.model.token_layout import zigzag_positions
from moefold.presets.recipe import resolve_recipe

RANKS, CP, BINS, LENGTH = 8, 4, 32, 32_768
MEDIAN, SIGMA = 2_000, 1.4
WORDS = ["--data.packing=best_fit", "--data.attend=document", "--train.micro_batch=1", f"--data.seq_len={LENGTH}"]


class Work(NamedTuple):
    """Of a rank in one microbatch: FLOPs of all products and of attention, forward."""

    all: float
    attention: float


class Row(NamedTuple):
    """What a rank has of a microbatch: the row of its group, and its place among the ranks that share it."""

    begins_S: np.ndarray
    ranks: int
    place: int


def configuration(sizes: str) -> Config:
    config = resolve_recipe("qwen3-30b-a3b", [*WORDS, f"--parallel.cp={CP}", f"--train.global_batch={BINS}"], RANKS)
    return check_config(replace(config, parallel=replace(config.parallel, context_sizes=sizes)), RANKS)


def bins(config: Config) -> PackedSequences:
    chance = np.random.default_rng(0)
    lengths = chance.lognormal(np.log(MEDIAN), SIGMA, 800).astype(int).clip(2, LENGTH)
    tokens = np.ones(lengths.sum(), np.uint8)
    starts = np.cumsum([0, *lengths[:-1]])
    corpus = Corpus(tokens, tokens, starts, starts)
    return corpus.packed_sequences(config.data, 0, BINS)


def fixed_rows(config: Config, rank: int) -> Iterator[Row]:
    packed = bins(config)
    share = BINS // (RANKS // CP)
    first = rank // CP * share
    for number in range(first, first + share):
        begins = packed.arrays(number).begins
        assert begins is not None
        yield Row(begins, CP, rank % CP)


def dynamic_rows(config: Config, rank: int) -> Iterator[Row]:
    shape = context_shape(config, RANKS)
    price = FlopsPrice(config.model, dict.fromkeys(shape.sizes, 0.0))
    regrouped = RegroupedSamples(bins(config), shape, price, rank, 1)
    for row, group in zip(regrouped.rows(0, BINS), regrouped.plan_batch(0, BINS).own, strict=True):
        begins = row.arrays.begins
        assert begins is not None
        yield Row(begins, group.size, rank - group.first)


def work_of(row: Row, price: FlopsPrice) -> Work:
    held = zigzag_positions(len(row.begins_S), row.ranks, torch.device("cpu"))[row.place].numpy()
    pairs = (held - row.begins_S[held] + 1).sum()
    attention = float(pairs * price.each_key)
    return Work(len(held) * price.each_token + attention, attention)


def works(sizes: str) -> list[list[Work]]:
    """By rank and microbatch."""
    config = configuration(sizes)
    price = FlopsPrice(config.model, {})
    rows_of = dynamic_rows if sizes == "dynamic" else fixed_rows
    return [[work_of(row, price) for row in rows_of(config, rank)] for rank in range(RANKS)]


def largest(found: list[list[Work]], what: str) -> float:
    """Of the ranks, over all microbatches."""
    return max(sum(getattr(each, what) for each in of_rank) for of_rank in found)


def all_attention(found: list[list[Work]]) -> float:
    return sum(each.attention for of_rank in found for each in of_rank)


def waited_for(found: list[list[Work]]) -> float:
    return sum(max(each.all for each in at_once) for at_once in zip(*found, strict=True))


def test_the_largest_rank_computes_less_and_less_is_waited_for_than_with_fixed_sizes():
    fixed, dynamic = works("fixed"), works("dynamic")
    same = pytest.approx(all_attention(fixed), rel=1e-5)  # but for padding, which sees itself
    assert all_attention(dynamic) == same, "every query of a sample sees the same keys"
    assert largest(dynamic, "all") < 0.9 * largest(fixed, "all")
    assert largest(dynamic, "attention") < 0.8 * largest(fixed, "attention")
    assert waited_for(dynamic) < 0.85 * waited_for(fixed)
    mean = sum(each.all for of_rank in dynamic for each in of_rank) / RANKS
    assert waited_for(dynamic) < 1.05 * mean
