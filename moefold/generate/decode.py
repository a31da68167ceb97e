"""Decoding: the one loop that makes text, of prompts in a batch, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from moefold.config.errors import UserError
from moefold.generate.next_logits import CachedLogits, NextLogits, TokenIds
from moefold.generate.replayed_steps import DecodeStep, replay_tokens
from moefold.generate.sampling import Draws, Sampling, listed_tokens


def decode_tokens(
    source: NextLogits,
    prompts: Sequence[TokenIds],
    sampling: Sampling,
    count: int,
    vocab: int | None = None,
) -> Iterator[list[int]]:
    """`count` times a new token of each sequence. `vocab`: tokens from there on are never drawn, if given."""
    draws = Draws(sampling, len(prompts), count, source.device)
    most = max(map(len, prompts)) + count
    with torch.no_grad():
        logits_BV = source.begin(prompts, most)
        tokens_B = draws.draw(logits_BV[:, :vocab])
    if isinstance(source, CachedLogits) and source.recorder is not None:
        step = DecodeStep(source, draws, tokens_B, count, vocab)
        yield from replay_tokens(step, source.recorder)
        return
    tokens = listed_tokens(tokens_B)
    yield tokens
    for _ in range(count - 1):
        with torch.no_grad():
            logits_BV = source.follow(tokens)
            tokens = listed_tokens(draws.draw(logits_BV[:, :vocab]))
        yield tokens


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; afterwards in its mode of before."""
    trains = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(trains)


def check_prompts(prompts: Sequence[TokenIds], longest: int, vocab: int) -> None:
    """Refuse prompts that leave no room for a token, and ids that the model does not have."""
    problems: list[str] = []
    if not prompts:
        problems.append("no prompt is given; expected at least one")
    for number, prompt in enumerate(prompts, start=1):
        name = "the prompt" if len(prompts) == 1 else f"prompt {number}"
        if len(prompt) == 0:
            problems.append(f"{name} has no tokens; expected at least one")
        elif len(prompt) >= longest:
            problems.append(
                f"{name} has {len(prompt)} tokens; expected fewer than {longest}, the longest sequence here; shorten it"
            )
        elif not 0 <= min(prompt) <= max(prompt) < vocab:
            found = f"tokens from {min(prompt)} to {max(prompt)}"
            problems.append(f"{name} has {found}; expected ids from 0 to {vocab - 1}")
    if problems:
        raise UserError(*problems)


def tokens_that_fit(prompts: Sequence[TokenIds], longest: int, count: int) -> int:
    """`count`, or fewer where the longest sequence ends before."""
    room = longest - max(map(len, prompts))
    return min(count, room)


def decode_ids(
    source: NextLogits,
    prompts: Sequence[TokenIds],
    sampling: Sampling,
    count: int,
    ends: Sequence[int] = (),
) -> list[list[int]]:
    """New tokens of each sequence, up to `count` or the first of `ends`, which is the last."""
    rows: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    for tokens in decode_tokens(source, prompts, sampling, count):
        for number in sorted(open_rows):
            token = tokens[number]
            rows[number].append(token)
            if token in ends:
                open_rows.remove(number)
        if not open_rows:
            break
    return rows
