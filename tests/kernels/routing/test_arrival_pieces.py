"""Pieces of arriving tokens, and where results return to, against a plain count of tokens."""

from __future__ import annotations

import random

import pytest
import torch

from moefold.anatomy.announced_choices import BLOCK_TOKENS, blocks_of_tokens
from moefold.kernels.routing.arrival_pieces import arrange_pieces

TOKENS, EXPERTS = 300, 5


def drawn_receivers(senders: int, etp: int) -> list[list[list[int]]]:
    """For each sender and each of its tokens, the ranks that it goes to; the second sender has no tokens."""
    draw = random.Random(senders)
    groups = range(senders // etp)
    drawn = [[[g for g in groups if draw.random() < 0.6] for _ in range(TOKENS)] for _ in range(senders)]
    drawn[1] = []
    return [[[g * etp + i for g in token for i in range(etp)] for token in tokens] for tokens in drawn]


@pytest.mark.parametrize(("senders", "etp", "arriving"), [(2, 1, 600), (3, 1, 400), (4, 2, 1200)])
def test_pieces_and_returns_are_those_of_a_plain_count(senders: int, etp: int, arriving: int):
    receivers = drawn_receivers(senders, etp)
    ranks = senders // etp
    blocks = blocks_of_tokens(TOKENS)
    counts = torch.zeros(senders, blocks, EXPERTS + ranks + 1, dtype=torch.int32)
    for sender, tokens in enumerate(receivers):
        for t, going in enumerate(tokens):
            for rank in going[::etp]:
                counts[sender, t // BLOCK_TOKENS, EXPERTS + rank // etp] += 1
    # rows that arrive on each rank, and rows of results that return to each, in order
    arrives = [
        [(s, t) for s, ts in enumerate(receivers) for t, going in enumerate(ts) if r in going] for r in range(senders)
    ]
    returns = [
        [(r, t) for r in range(senders) for t, going in enumerate(receivers[s]) if r in going] for s in range(senders)
    ]
    for me in range(senders):
        slots = torch.full((len(receivers[me]), senders), -1, dtype=torch.int32)
        for t, going in enumerate(receivers[me]):
            for rank in going:
                slots[t, rank] = arrives[rank].index((me, t))
        ends, shift, back = arrange_pieces(counts, slots, me, etp, arriving)
        expected = [
            sum((s, t // BLOCK_TOKENS) <= (sender, block) for s, t in arrives[me])
            for sender in range(senders)
            for block in range(blocks)
        ]
        assert ends.tolist() == [min(end, arriving) for end in expected]
        for n, (sender, t) in enumerate(arrives[me]):
            assert returns[sender][n + int(shift[sender])] == (me, t)
        for t, going in enumerate(receivers[me]):
            assert [returns[me][int(back[t, rank])] for rank in going] == [(rank, t) for rank in going]
            assert all(back[t, rank] == -1 for rank in range(senders) if rank not in going)


def test_nothing_arrives_from_counts_of_a_lost_rank():
    counts = torch.full((2, 1, EXPERTS + 3), 10**6, dtype=torch.int32)
    slots = torch.full((4, 2), -1, dtype=torch.int32)
    ends, shift, _ = arrange_pieces(counts, slots, 0, 1, 8, lost=torch.ones(1, dtype=torch.int64))
    assert ends.tolist() == [0, 0]
    assert shift.tolist() == [0, 0]
