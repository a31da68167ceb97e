"""Replayed steps of generation: the step from one token to the next is recorded once, and replayed for each token.

    host      begins   step 1   records   replays 8   replays 8   reads 8   replays 8   reads 8
    device    prompts  step 1             8 steps ------- 8 steps ------- 8 steps -------

Tokens stay on the device, where the next step reads them; the host reads them some steps behind. So nothing waits for
the host, which launches one graph a step instead of every kernel. Where tokens end a text, the steps ahead of the host
are for nothing.

B sequences, N steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moefold.comm.host_copies import ToHost
from moefold.config.errors import RunFailure
from moefold.generate.next_logits import CachedLogits
from moefold.generate.sampling import Draws, listed_tokens
from moefold.memory.graphs import Recorder, Replay, record_for_replay

READ_TOGETHER = 8  # steps
LEAST_REPLAYS = 8  # for which a recording is worth its time


class DecodeStep:
    """A token of each sequence from the token before. All that the step reads and writes stays at its address.
    `made_NB`: all tokens, of which `first_B` are the first."""

    def __init__(self, source: CachedLogits, draws: Draws, first_B: Tensor, count: int, vocab: int | None = None):
        self.source = source
        self.draws = draws
        self.vocab = vocab
        self.made_NB = first_B.new_zeros(count, len(first_B))
        self.made_NB[0] = first_B
        self.token_B = first_B.clamp(min=0)

    @torch.no_grad()
    def take(self) -> None:
        place = self.draws.number.clone()
        logits_BV = self.source.follow_on_device(self.token_B)
        drawn_B = self.draws.draw(logits_BV[:, : self.vocab])
        self.made_NB.index_copy_(0, place, drawn_B[None])
        self.token_B.copy_(drawn_B.clamp(min=0))  # a token even where there is none, until the host refuses it


def replay_tokens(step: DecodeStep, recorder: Recorder) -> Iterator[list[int]]:
    """All tokens of a step, a list for each. The first two are made without a recording: kernels are compiled then."""
    count = len(step.made_NB)
    eager = min(2, count)
    if count > 1:
        recorder.run(step.take)
    unread = ToHost(step.made_NB[:eager])
    take = step.take
    if count - eager >= LEAST_REPLAYS:
        take = recorded_step(step, recorder)
    for first in range(eager, count, READ_TOGETHER):
        last = min(first + READ_TOGETHER, count)
        for _ in range(first, last):
            take()
        ahead = ToHost(step.made_NB[first:last])
        yield from tokens_of_steps(unread)
        unread = ahead
    yield from tokens_of_steps(unread)


def recorded_step(step: DecodeStep, recorder: Recorder) -> Replay:
    """The replay of a step; or the step itself where it cannot be recorded, such as with experts that the host
    counts rows for."""
    try:
        _, replay = record_for_replay(recorder, step.take)
    except RunFailure:
        return step.take
    return replay


def tokens_of_steps(copied: ToHost) -> Iterator[list[int]]:
    for tokens_B in copied.read():
        yield listed_tokens(tokens_B)
