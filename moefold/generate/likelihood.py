"""Log-likelihoods: how likely a model finds given tokens behind given ones. Logits are computed for chunks of
positions, so that those of a whole batch are never held, and on a tensor-parallel rank for its own words alone.

B sequences, S positions, C positions of a cp rank or of a chunk of them, D width, v words of a rank's vocabulary shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from moefold.comm.collectives import all_gather
from moefold.generate.next_logits import PADDING, TokenIds
from moefold.generate.rank_batches import cut_batches
from moefold.kernels.vocabulary.cross_entropy import label_columns, largest_of_shards, log_sum_of_shards
from moefold.kernels.vocabulary.vocab_shard import VocabShard
from moefold.layout.labels import IGNORE_INDEX
from moefold.model.head import Head
from moefold.model.steps import Carry
from moefold.model.transformer import Transformer

CHUNK = 512  # positions whose logits are held at once
NO_WORD = 1 << 62  # behind every vocabulary

# tokens_BS, labels_BS -> (B, 2): the log-probability of a sequence's labels, and how many are not the likeliest token
ScoreRows = Callable[[Tensor, Tensor], Tensor]


class Continuation(NamedTuple):
    """Tokens to be scored, behind at least one token of context."""

    context: TokenIds
    tokens: TokenIds


class Likelihood(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the most likely one."""

    log_p: float
    is_greedy: bool


def score_continuations(
    score_rows: ScoreRows, continuations: Sequence[Continuation], longest: int, batch: int
) -> list[Likelihood]:
    """One for each, computed in batches of similar lengths. A context that does not fit into `longest` tokens loses its
    first tokens."""

    def length_of(number: int) -> int:
        context, tokens = continuations[number]
        return len(context) + len(tokens)

    every = range(len(continuations))
    numbers = sorted(every, key=length_of, reverse=True)
    found: dict[int, Likelihood] = {}
    for some in cut_batches(numbers, batch):
        rows = [fit_continuation(continuations[number], longest) for number in some]
        tokens_BS, labels_BS = labelled_rows(rows)
        sums_B2 = score_rows(tokens_BS, labels_BS)
        scores = map(likelihood_of_sums, sums_B2.tolist())
        pairs = zip(some, scores, strict=True)
        found.update(pairs)
    return [found[number] for number in every]


def likelihood_of_sums(sums: list[float]) -> Likelihood:
    log_p, misses = sums
    is_greedy = misses == 0
    return Likelihood(log_p, is_greedy)


def fit_continuation(continuation: Continuation, longest: int) -> Continuation:
    """The continuation with as much of its context as fits: the last token is no input."""
    context, tokens = continuation
    room = longest + 1 - len(tokens)
    assert room > 0, f"{len(tokens)} tokens to score; expected at most {longest}"
    return Continuation(context[-room:], tokens)


def labelled_rows(rows: Sequence[Continuation]) -> tuple[Tensor, Tensor]:
    """(B, S) each: the tokens with padding behind them, and the labels where there are any."""
    tokens: list[Tensor] = []
    labels: list[Tensor] = []
    for row in rows:
        inputs, wanted = labelled_row(row)
        tokens.append(inputs)
        labels.append(wanted)
    tokens_BS = pad_sequence(tokens, True, PADDING)
    labels_BS = pad_sequence(labels, True, IGNORE_INDEX)
    return tokens_BS, labels_BS


def labelled_row(row: Continuation) -> tuple[Tensor, Tensor]:
    context, tokens = row
    whole = torch.tensor([*context, *tokens])
    labels = whole[1:].clone()
    first = len(context) - 1  # the position whose label is the first token
    labels[:first] = IGNORE_INDEX
    return whole[:-1], labels


def score_labels(model: Transformer, carry: Carry) -> Tensor:
    """(B, 2): what `ScoreRows` gives, of the positions of this cp rank; the same on its tp ranks. `carry`: of the end
    of the last stage's body."""
    shard = carry["token_shard"]
    head = model.head
    assert isinstance(head, Head), "the last stage is elsewhere"
    labels_BS = carry["labels_BS"]
    labels_C = shard.slice_for_cp_rank(labels_BS)
    h_TD = model.head_input(carry)
    h_CD = all_gather(h_TD, head.tp)
    score = partial(score_chunk, head)
    chunks = map(score, h_CD.split(CHUNK), labels_C.split(CHUNK))
    scores_C2 = torch.cat(list(chunks))
    by_sequence = (shard.sequences, -1)
    scores_BS2 = scores_C2.unflatten(0, by_sequence)
    return scores_BS2.sum(1)


def score_chunk(head: Head, h_CD: Tensor, labels_C: Tensor) -> Tensor:
    """(C, 2): the log-probability of each label, and whether another token is likelier; zeros where there is no label.
    In fp64: sums over long texts keep their digits."""
    words = head.words()
    logits_Cv = head.logits_of_words(h_CD)
    logits_Cv = logits_Cv.double()
    held_C1, column_C1 = label_columns(labels_C, logits_Cv, words)
    found_C1 = logits_Cv.gather(1, column_C1)
    label_C1 = words.total(found_C1 * held_C1)
    log_sum_C1 = log_sum_of_shards(logits_Cv, words)
    log_p_C1 = label_C1 - log_sum_C1
    labels_C1 = labels_C[:, None]
    is_other_C1 = likeliest_words(logits_Cv, words) != labels_C1
    scores_C2 = torch.cat((log_p_C1, is_other_C1), 1)
    has_none_C1 = labels_C1 == IGNORE_INDEX
    return scores_C2.masked_fill(has_none_C1, 0)


def likeliest_words(logits_Cv: Tensor, words: VocabShard) -> Tensor:
    """(C, 1): the first of equals, over the shards of all ranks."""
    largest_C1 = largest_of_shards(logits_Cv, words)
    own = logits_Cv.max(1, keepdim=True)
    is_largest_C1 = own.values == largest_C1
    word_C1 = own.indices + words.first
    word_C1 = word_C1.where(is_largest_C1, NO_WORD)
    return -words.largest(-word_C1)
