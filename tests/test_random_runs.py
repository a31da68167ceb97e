"""Random settings of whole runs keep what every run promises; tests/support/fuzz_runs.py draws more of them."""

from __future__ import annotations

import random

import pytest

from tests.support.fuzz_runs import judge_parity, try_case


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", ["parity", "explain"])
def test_a_drawn_case_is_refused_or_sound(kind: str, number: int):
    _, wrong = try_case(kind, 4, number)
    assert wrong is None


def test_adapters_beside_a_base_in_blocks_agree_with_one_rank_at_sizes_that_have_no_blocks():
    words = ["--parallel.tp=2", "--parallel.etp=2", "--lora.rank=4", "--lora.base=nf4"]
    assert judge_parity("mixtral-8x22b-tiny", words, 4, random.Random(1)) is None
    assert judge_parity("olmoe-1b-7b-tiny", ["--parallel.ep=2", *words[2:]], 2, random.Random(1)) is None
