"""Lengths of documents in a plan: FLOPs are those of the documents, and ranks wait for the busiest one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moefold.config.errors import UserError
from moefold.data.packing import PackingShape, PackingState, Sample, TakenSample, pack_next
from moefold.plan.answer import answer_request
from moefold.plan.length_histogram import (
    BatchShape,
    LengthShare,
    attention_imbalance,
    bin_costs,
    cut_lengths,
    mean_over_tokens,
    parse_lengths,
)

SEQ = 131_072
TAIL = ["2000:0.8", "20000:0.15", "131072:0.05"]
RUN = {"model": "qwen3-30b-a3b", "gpus": 64, "gpu": "h200", "seq": SEQ, "mbs": 1, "gbs": 64, "parallel.ep": 8}
RUN |= {"parallel.cp": 2, "recompute": "layer", "data.attend": "document"}


def planned(*lengths: str, **settings: Any) -> dict[str, Any]:
    return answer_request({**RUN, "lengths": ",".join(lengths), **settings})


def test_long_documents_are_cut_and_tokens_attend_within_them():
    lengths = parse_lengths(["10:1", "25:1"])
    assert cut_lengths(lengths, 10) == ((5, 0.25), (10, 0.75))
    assert cut_lengths(lengths, 100) == ((10, 0.5), (25, 0.5))
    attended = mean_over_tokens(lambda length: length / 2, lengths, 100)
    assert attended == pytest.approx((10**2 + 25**2) / 2 / 35)
    assert mean_over_tokens(float, (), 100) == 100, "without lengths a token sees its sequence"


def test_bins_cost_what_those_of_the_packer_cost():
    """The spread of a bin's attention, beside bins that the trainer's own packer fills."""
    chance = np.random.default_rng(5)
    values, shares = zip(*parse_lengths(TAIL), strict=True)
    sizes = chance.choice(values, p=shares, size=20_000)
    state, costs = PackingState(), []
    for _ in range(6):
        plan, state = pack_next(state, lambda n: TakenSample(Sample(n, int(sizes[n])), n + 1), PackingShape(64, SEQ))
        costs += [sum(float(sample.length) ** 2 for sample in samples) for samples in plan.bins]
    expected = np.std(costs) / np.mean(costs)
    assert np.std(bin_costs(parse_lengths(TAIL), SEQ)) == pytest.approx(expected, rel=0.15)


def test_more_ranks_wait_longer_and_more_microbatches_even_out():
    lengths = parse_lengths(TAIL)
    found = [attention_imbalance(lengths, SEQ, BatchShape(*shape)) for shape in ((1, 1, 4), (4, 1, 4), (64, 1, 4))]
    assert found[0] == 1 < found[1] < found[2]
    assert attention_imbalance(lengths, SEQ, BatchShape(64, 1, 64)) < found[2]
    sharing = attention_imbalance(lengths, SEQ, BatchShape(64, 8, 64))
    assert sharing > attention_imbalance(lengths, SEQ, BatchShape(64, 1, 64)), "experts wait in every microbatch"
    alike = (LengthShare(4096, 1.0),)
    assert attention_imbalance(alike, SEQ, BatchShape(64, 8, 4)) == pytest.approx(1, abs=0.01)


def test_a_plan_with_lengths_counts_documents_and_prices_the_busiest_rank():
    whole, short, tail = planned(), planned("2000:1"), planned(*TAIL)
    assert whole["attention_imbalance"] == 1
    assert whole["flops_per_token"] > tail["flops_per_token"] > short["flops_per_token"]
    assert tail["step_s"] > short["step_s"]
    even = planned(*TAIL, gbs=64 * 64)
    assert tail["attention_imbalance"] > even["attention_imbalance"] > 1
    assert tail["mfu"] < even["mfu"]
    lines = planned(*TAIL, explain=True)["explained"]
    assert any("attention of the busiest ranks" in line for line in lines)
    one_length = planned(f"{SEQ}:1")
    assert one_length["step_s"] == pytest.approx(whole["step_s"]), "documents as long as sequences are sequences"


@pytest.mark.parametrize("entry", ["700", "0:1", "700:0", "700:-1", "a:1", "700:nan"])
def test_lengths_that_cannot_be_read_are_refused(entry: str):
    with pytest.raises(UserError, match=r"such as 700:0\.9"):
        planned(entry)


def test_lengths_are_refused_where_tokens_attend_to_whole_sequences():
    with pytest.raises(UserError, match=r"add --data\.attend document"):
        planned("700:1", **{"data.attend": "sequence"})
