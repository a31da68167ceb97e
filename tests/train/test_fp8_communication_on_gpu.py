"""Tokens, gradients and tensor-parallel sums in FP8 between ranks that share one GPU: gloo carries CUDA tensors."""

from __future__ import annotations

import pytest
import torch

from moefold.kernels.quantise.fp8 import ScaleRule
from moefold.kernels.quantise.fp8_payload import (
    dequantised_channels,
    dequantised_rows,
    quantise_channels,
    quantise_row_blocks,
)
from tests.precision.test_fp8_scatter_sum import MOST_BYTES, TOKENS, WIDTH, numbers
from tests.support.ranks import run_ranks
from tests.support.ranks_on_card import Weights, scatter_on_card, train_on_card
from tests.train.test_fp8_communication import SUMS, assert_near
from tests.train.test_fp8_communication import TOKENS as TOKENS_IN_FP8

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_one_card_agree_and_learn_as_without_fp8(ranks: int):
    """Gradients flow: updates follow those of plain runs."""
    layout = ["--parallel.tp", "2", "--parallel.ep", str(ranks), "--parallel.dispatcher", "all_to_all"]
    cases = [
        layout,
        [*layout, *TOKENS_IN_FP8],
        [*layout, *SUMS],
        [*layout, *TOKENS_IN_FP8, *SUMS],
    ]
    by_rank = run_ranks(train_on_card, ranks, cases)
    (plain, _), *_ = by_rank[0]
    for number, case in enumerate(zip(*by_rank, strict=True)):
        weights: Weights = {}
        for losses, parts in case:
            assert losses == case[0][0]
            for name, part in parts.items():
                assert torch.equal(weights.setdefault(name, part), part), name
        if number:
            assert_near(case[0][0], plain)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_tp_on_one_card_have_the_bits_of_the_rules_and_are_off_by_less_than_3_percent(ranks: int):
    found = run_ranks(scatter_on_card, ranks)
    summands = [numbers(ranks * TOKENS, WIDTH, seed=rank).bfloat16() for rank in range(ranks)]
    total = torch.zeros(ranks * TOKENS, WIDTH)
    for summand in summands:
        total += dequantised_rows(quantise_row_blocks(summand, ScaleRule(), WIDTH), torch.float32, WIDTH)
    exact = torch.stack(summands).double().sum(0)
    outputs = [numbers(TOKENS, WIDTH, seed=100 + rank).bfloat16() for rank in range(ranks)]
    rounded = [dequantised_channels(quantise_channels(dy, ScaleRule()), dy.dtype) for dy in outputs]
    for rank, (sums, gradient, sent) in enumerate(found):
        mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
        assert torch.equal(sums, total[mine].bfloat16())
        assert torch.equal(gradient, torch.cat(rounded))
        off = (sums.double() - exact[mine]).norm() / exact[mine].norm()
        assert off < 0.03
        forward, backward, fp8_forward, fp8_backward = sent
        assert fp8_forward <= MOST_BYTES * forward
        assert fp8_backward <= MOST_BYTES * backward
