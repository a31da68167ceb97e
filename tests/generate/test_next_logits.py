"""Next logits: token by token with a cache equals the whole sequence without one, for caches of every kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

import moefold
from moefold.config.errors import UserError
from moefold.generate.next_logits import WindowLogits, cache_problems, model_logits

PROMPTS = [[5, 17, 3, 200, 9, 14, 77], [8, 2], [1, 4, 4, 90]]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("tiny", {}),
    "gqa with a window": ("tiny", {"attention__window": 3}),
    "gqa with a window on some layers and sinks": ("gpt-oss-20b-tiny", {"attention__window": 3}),
    "mla": ("deepseek-v3-tiny", {}),
    "mla with a window": ("deepseek-v3-tiny", {"attention__window": 3}),
    "norms of queries and keys": ("qwen3-30b-a3b-tiny", {}),
}


@cache
def make_model(case: str) -> moefold.Model:
    preset, keys = CASES[case]
    model = moefold.Model(preset, dtype=torch.float64, seq_len=64, layers=2, **keys)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # far from even, so that all that is attended to matters
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.eval()


def whole_logits(model: moefold.Model, rows: list[list[int]]) -> torch.Tensor:
    """The logits behind the last token of each row, each computed alone and without a cache."""
    with torch.no_grad():
        return torch.stack([model(torch.tensor([row])).logits[0, -1] for row in rows])


def assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_a_cache_gives_the_logits_of_the_whole_sequences(case: str):
    """Prompts of different lengths in one batch, as well as alone."""
    model = make_model(case)
    for prompts in (PROMPTS, PROMPTS[:1]):
        rows = [list(prompt) for prompt in prompts]
        source = model_logits(model.transformer)
        with torch.no_grad():
            logits = source.begin(rows, most=20)
            for step in range(6):
                assert_exact(logits, whole_logits(model, rows))
                tokens = [(31 * step + 7 * number) % 256 for number in range(len(rows))]
                logits = source.follow(tokens)
                for row, token in zip(rows, tokens, strict=True):
                    row.append(token)


def test_windows_without_a_cache_give_the_same():
    model = make_model("gqa")

    def last_logits(tokens: Sequence[int]) -> torch.Tensor:
        return whole_logits(model, [list(tokens)])[0]

    cached, windows = model_logits(model.transformer), WindowLogits(last_logits, torch.device("cpu"))
    with torch.no_grad():
        assert_exact(windows.begin(PROMPTS, 20), cached.begin(PROMPTS, 20))
        assert_exact(windows.follow([1, 2, 3]), cached.follow([1, 2, 3]))


def test_layers_with_a_window_keep_the_window_alone_and_latents_are_narrow():
    source = model_logits(make_model("gqa with a window").transformer)
    with torch.no_grad():
        source.begin([[1] * 20], most=30)
    assert source.past is not None
    assert {kept.shape[1] for layer in source.past.by_layer.values() for kept in layer} == {3}
    model = make_model("mla")
    source = model_logits(model.transformer)
    with torch.no_grad():
        source.begin([[1] * 20], most=30)
    attention = model.config.model.attention
    assert source.past is not None
    for kept in source.past.by_layer.values():
        assert sum(x[0, 0].numel() for x in kept) == attention.kv_rank + attention.rope_dim


def test_a_capacity_drops_nothing_of_generated_text():
    plain = moefold.Model("tiny", dtype=torch.float64, layers=1)
    full = moefold.Model("tiny", dtype=torch.float64, layers=1, moe__capacity__factor=0.25)
    full.load_state_dict(plain.state_dict())
    ids = [[1, 2, 3, 4, 5, 6, 7, 8]]
    with torch.no_grad():
        found = model_logits(full.eval().transformer).begin(ids, 9)
    expected = whole_logits(plain.eval(), ids)
    assert_exact(found, expected)
    assert not torch.allclose(whole_logits(full, ids), expected)  # where a whole batch shares a capacity


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"moe__router__kind": "expert_choice", "moe__router__looks_ahead": True}, "expert_choice"),
        ({"moe__router__force_balance": True}, "round robin"),
        ({"moe__capacity__factor": 1.0, "moe__capacity__pad": True}, "capacity.pad"),
    ],
)
def test_models_that_need_whole_sequences_are_refused(keys: dict[str, Any], message: str):
    more: dict[str, Any] = {"moe__balance__aux_loss": 0.0, "moe__balance__bias_rate": 0.0}
    model = moefold.Model("tiny", layers=1, **more, **keys)
    assert cache_problems(model.config.model)
    with pytest.raises(UserError, match=message):
        model.generate([[1, 2]], tokens=1)
