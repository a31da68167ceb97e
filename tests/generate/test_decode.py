"""Decoding: a batch gives what its prompts give alone; ends and lengths are kept to."""

from __future__ import annotations

import pytest
import torch

import moefold
from moefold.config.errors import UserError

PROMPTS = [[5, 17, 3, 200, 9, 14, 77], [8, 2], [1, 4, 4, 90]]


@pytest.fixture(scope="module")
def model() -> moefold.Model:
    return moefold.Model("tiny", dtype=torch.float64, seq_len=40, layers=1)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_batch_gives_what_its_prompts_give_alone(model: moefold.Model, temperature: float):
    together = model.generate(PROMPTS, tokens=8, temperature=temperature, seed=3)
    for number, prompt in enumerate(PROMPTS):
        assert model.generate([prompt], tokens=8, temperature=temperature, seed=3 + number) == [together[number]]
    assert all(len(row) == 8 for row in together)
    assert model.training  # as before


def test_greedy_tokens_are_the_most_likely_ones_of_the_whole_sequence(model: moefold.Model):
    (new,) = model.generate([PROMPTS[0]], tokens=5, temperature=0)
    row = list(PROMPTS[0])
    for token in new:
        with torch.no_grad():
            assert token == int(model(torch.tensor([row])).logits[0, -1].argmax())
        row.append(token)


def test_a_sequence_ends_with_its_end_token_and_the_others_go_on(model: moefold.Model):
    free = model.generate(PROMPTS, tokens=8, temperature=1.5)
    end = free[1][2]
    for row, whole in zip(model.generate(PROMPTS, tokens=8, ends=[end], temperature=1.5), free, strict=True):
        count = whole.index(end) + 1 if end in whole else 8
        assert row == whole[:count]


def test_text_ends_at_the_longest_sequence(model: moefold.Model):
    assert [len(row) for row in model.generate([[1] * 35, [2]], tokens=100)] == [5, 5]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt is given"),
        ([[1], []], "prompt 2 has no tokens"),
        ([[1] * 40], "the prompt has 40 tokens; expected fewer than 40"),
        ([[1, 5000]], "tokens from 1 to 5000; expected ids from 0 to"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(model: moefold.Model, prompts: list[list[int]], message: str):
    with pytest.raises(UserError, match=message):
        model.generate(prompts, tokens=1)
