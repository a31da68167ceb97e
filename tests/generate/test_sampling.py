"""Sampling: the filters of transformers, seeds that repeat, and sequences that draw as if alone."""

from __future__ import annotations

import pytest
import torch

from moefold.config.errors import RunFailure, UserError
from moefold.generate.sampling import Draws, Sampling, filter_logits, listed_tokens, tokens_at
from tests.support.hf_models import hf


def random_logits(rows: int = 5, vocab: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits[:, 7] = logits[:, 3]  # equals
    return logits


SETTINGS = [
    Sampling(0.3),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_k=9),
    Sampling(1.0, top_k=1000),
    Sampling(1.0, top_p=0.01),
    Sampling(1.0, top_p=0.8),
    Sampling(1.0, min_p=0.1),
    Sampling(1.0, min_p=1.0),
    Sampling(0.7, top_k=12, top_p=0.9, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_filters_are_those_of_transformers(sampling: Sampling):
    generation = hf().generation
    processors = [generation.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        processors.append(generation.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(generation.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(generation.MinPLogitsWarper(sampling.min_p))
    logits = random_logits()
    expected = logits
    for process in processors:
        expected = process(None, expected)
    assert torch.equal(filter_logits(logits, sampling), expected)


def draw_often(sampling: Sampling, logits: torch.Tensor, times: int = 20) -> list[list[int]]:
    draws = Draws(sampling, len(logits), times)
    return [listed_tokens(draws.draw(logits)) for _ in range(times)]


def test_seeds_repeat_and_a_sequence_draws_as_if_alone():
    logits = random_logits()
    together = draw_often(Sampling(seed=5), logits)
    assert draw_often(Sampling(seed=5), logits) == together
    assert draw_often(Sampling(seed=6), logits) != together
    assert draw_often(Sampling(seed=5), logits, times=7) == together[:7]  # however many there may come to be
    for row in range(len(logits)):
        alone = draw_often(Sampling(seed=5 + row), logits[row : row + 1])
        assert [drawn for (drawn,) in alone] == [tokens[row] for tokens in together]


def test_draws_follow_the_probabilities_of_what_is_kept():
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0]])
    sampling = Sampling(1.0, top_k=3)
    drawn = torch.tensor(draw_often(sampling, logits, 4000)).flatten()
    found = drawn.bincount(minlength=4) / len(drawn)
    expected = filter_logits(logits, sampling).softmax(-1)[0]
    assert found[3] == 0
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


def test_tokens_without_probability_are_never_drawn():
    scores = torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert tokens_at(scores, uniform[:, None]).tolist() == [1, 1, 3, 3]


def test_temperature_0_takes_the_most_likely_token():
    logits = random_logits()
    assert draw_often(Sampling(0.0), logits, 1) == [logits.argmax(-1).tolist()]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": 2}],
    ids=str,
)
def test_illegal_settings_are_refused_by_name(wrong: dict[str, float]):
    (name,) = wrong
    with pytest.raises(UserError, match=f"{name} = .* is not legal; expected a"):
        Sampling(**wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("logits", [[0.0, torch.nan, 1.0], [torch.nan, torch.inf, 0.0]], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_that_are_not_a_number_end_the_generation(temperature: float, logits: list[float]):
    with pytest.raises(RunFailure, match="not a number"):
        draw_often(Sampling(temperature), torch.tensor([logits]))


def test_of_equally_likely_tokens_the_first_is_taken():
    logits = torch.zeros(3, 5000)
    logits[1, 2500:] = 1
    logits[2] = -torch.inf
    assert Draws(Sampling(0), 3, 1).draw(logits).tolist() == [0, 2500, 0]
