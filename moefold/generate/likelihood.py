"""Log-likelihoods: how likely a model finds given tokens behind given ones. Logits are computed for chunks of
positions, so that those of a whole batch are never held.

B sequences, S positions, T = B x S, D width, C positions of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moefold.generate.next_logits import PADDING, TokenIds
from moefold.generate.rank_batches import ALONE, Numbers, compute_batches, cut_batches
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.transformer import Transformer

CHUNK = 512  # positions whose logits are held at once


class Continuation(NamedTuple):
    """Tokens to be scored, behind at least one token of context."""

    context: TokenIds
    tokens: TokenIds


class Likelihood(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the most likely one."""

    log_p: float
    is_greedy: bool


class LabelScores(NamedTuple):
    """(B, S) each: the log-probability of each label, and whether the label is the most likely token; 0 and true where
    there is no label."""

    log_p_BS: Tensor
    is_best_BS: Tensor


def score_continuations(
    model: Transformer, continuations: Sequence[Continuation], longest: int, batch: int, ranks: Axis = ALONE
) -> list[Likelihood]:
    """One for each, computed in batches of similar lengths, in turn by the ranks. A context that does not fit into
    `longest` tokens loses its first tokens."""

    def length_of(number: int) -> int:
        context, tokens = continuations[number]
        return len(context) + len(tokens)

    def score_some(some: Numbers) -> list[Likelihood]:
        return score_batch(model, [continuations[number] for number in some], longest)

    numbers = sorted(range(len(continuations)), key=length_of, reverse=True)
    return compute_batches(cut_batches(numbers, batch), score_some, ranks)


@torch.no_grad()
def score_batch(model: Transformer, continuations: Sequence[Continuation], longest: int) -> list[Likelihood]:
    rows = [fit_continuation(each, longest) for each in continuations]
    width = max(len(each.context) + len(each.tokens) for each in rows) - 1
    shape = (len(rows), width)
    tokens_BS = torch.full(shape, PADDING)
    labels_BS = torch.full(shape, IGNORE_INDEX)
    for number, (context, tokens) in enumerate(rows):
        whole = torch.tensor([*context, *tokens])
        first = len(context) - 1  # the position whose label is the first token
        end = len(whole) - 1
        tokens_BS[number, :end] = whole[:-1]
        labels_BS[number, first:end] = whole[first + 1 :]
    device = next(model.parameters()).device
    scores = score_labels(model, tokens_BS.to(device), labels_BS.to(device))
    log_p_B = scores.log_p_BS.sum(1).tolist()
    is_greedy_B = scores.is_best_BS.all(1).tolist()
    return [Likelihood(*each) for each in zip(log_p_B, is_greedy_B, strict=True)]


def fit_continuation(continuation: Continuation, longest: int) -> Continuation:
    """The continuation with as much of its context as fits: the last token is no input."""
    context, tokens = continuation
    room = longest + 1 - len(tokens)
    assert room > 0, f"{len(tokens)} tokens to score; expected at most {longest}"
    return Continuation(context[-room:], tokens)


@torch.no_grad()
def score_labels(model: Transformer, tokens_BS: Tensor, labels_BS: Tensor) -> LabelScores:
    """On a rank that holds the whole model."""
    carry = model.begin(tokens_BS)
    carry = model.run_bodies(carry)
    h_TD = model.head_input(carry)
    labels_T = labels_BS.flatten()
    pairs = zip(h_TD.split(CHUNK), labels_T.split(CHUNK), strict=True)
    chunks = [score_chunk(model.head(h_CD), labels_C) for h_CD, labels_C in pairs]
    log_p, is_best = zip(*chunks, strict=True)
    return LabelScores(torch.cat(log_p).view_as(labels_BS), torch.cat(is_best).view_as(labels_BS))


def score_chunk(logits_CV: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64: sums over long texts keep their digits."""
    has_none_C = labels_C == IGNORE_INDEX
    index_C1 = labels_C.masked_fill(has_none_C, 0)[:, None]
    logits_CV = logits_CV.double()
    label_C = logits_CV.gather(1, index_C1)[:, 0]
    log_p_C = label_C - logits_CV.logsumexp(1)
    is_best_C = logits_CV.argmax(1) == index_C1[:, 0]
    return log_p_C.masked_fill(has_none_C, 0), is_best_C | has_none_C
