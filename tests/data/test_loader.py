"""The order of the data depends on the seed; where one is in it is a single number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefold.data.loader import Batch, BatchLoader
from moefold.data.sequences import RowSequences, epoch_permutation
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX

CPU = torch.device("cpu")
SEQ, WINDOWS = 8, 21
TOKENS = np.arange(SEQ * WINDOWS + 5, dtype=np.uint16)  # a token is its own position


def loader(batch: int = 4, seed: int = 1, ranks: int = 1, index: int = 0, tokens: np.ndarray = TOKENS) -> BatchLoader:
    """As in a process of its own: no order is remembered from the loader before."""
    epoch_permutation.cache_clear()
    return BatchLoader(RowSequences(tokens, SEQ, seed), batch, Axis("dp", tuple(range(ranks)), index), CPU)


def windows_of(batch: Batch) -> list[int]:
    return [int(row[0]) // SEQ for row in batch.tokens_BS]


def take(source: BatchLoader, batches: int) -> list[int]:
    return [window for _ in range(batches) for window in windows_of(source.next_batch())]


def test_labels_are_the_tokens_one_place_on_and_windows_do_not_overlap():
    batch = loader(batch=WINDOWS).next_batch()
    assert torch.equal(batch.labels_BS, batch.tokens_BS + 1)
    assert torch.equal(batch.tokens_BS, batch.tokens_BS[:, :1] + torch.arange(SEQ))
    assert (batch.tokens_BS[:, 0] % SEQ == 0).all()
    assert batch.tokens_BS.dtype == torch.int64


@pytest.mark.parametrize("batch", [1, 3, 4, 7, WINDOWS])
def test_every_window_is_seen_exactly_once_an_epoch(batch: int):
    seen = take(loader(batch=batch), batches=3 * WINDOWS)
    for epoch in range(3):
        assert sorted(seen[epoch * WINDOWS : (epoch + 1) * WINDOWS]) == list(range(WINDOWS))


def test_every_epoch_has_its_own_order_and_every_seed_too():
    seen = take(loader(batch=WINDOWS), batches=3)
    first, second, third = (seen[i * WINDOWS : (i + 1) * WINDOWS] for i in range(3))
    assert first != second != third != first
    assert take(loader(seed=1), 5) != take(loader(seed=2), 5)
    assert first != list(range(WINDOWS)), "the first epoch is shuffled, too"


def test_the_order_depends_on_the_seed_and_not_on_batch_size_or_global_randomness():
    np.random.seed(1)
    torch.manual_seed(1)
    first = take(loader(batch=2), 30)
    np.random.seed(2)
    torch.manual_seed(2)
    assert take(loader(batch=6), 10) == first


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(0, 100))
def test_the_shares_of_all_ranks_in_order_are_the_batch_of_one_rank(ranks: int, count: int, consumed: int):
    """All shares are of one size: a rank with fewer would leave others waiting in a collective. What fills them up has
    no labels, so it counts for nothing."""
    whole = loader().batch_at(consumed, count)
    shares = [loader(ranks=ranks, index=index).batch_at(consumed, count) for index in range(ranks)]
    assert len({len(share.tokens_BS) for share in shares}) == 1
    tokens, labels = (torch.cat([getattr(s, name) for s in shares]) for name in ("tokens_BS", "labels_BS"))
    assert torch.equal(tokens[:count], whole.tokens_BS)
    assert torch.equal(labels[:count], whole.labels_BS)
    assert (labels[count:] == IGNORE_INDEX).all()
    assert len(labels) - count < ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_steps_of_many_ranks_walk_the_same_sequences_as_one_rank(ranks: int):
    alone = loader(batch=12)
    together = [loader(batch=12, ranks=ranks, index=index) for index in range(ranks)]
    for _ in range(6):
        whole = alone.next_batch().tokens_BS
        assert torch.equal(torch.cat([each.next_batch().tokens_BS for each in together]), whole)


@settings(deadline=None)
@given(st.integers(0, 12), st.integers(1, 7), st.integers(1, 3))
def test_from_any_position_a_new_loader_goes_on_as_the_old_one_would(steps: int, batch: int, ranks: int):
    """12 batches of up to 7 cross the borders of three epochs."""
    old = loader(batch=batch, ranks=ranks, index=ranks - 1)
    for _ in range(steps):
        old.next_batch()
    new = loader(batch=batch, ranks=ranks, index=ranks - 1)
    new.consumed = old.consumed
    assert old.consumed == steps * batch, "the position counts sequences of the whole run, not of this rank"
    for _ in range(5):
        a, b = old.next_batch(), new.next_batch()
        assert torch.equal(a.tokens_BS, b.tokens_BS)
        assert torch.equal(a.labels_BS, b.labels_BS)


def test_a_batch_across_the_border_of_an_epoch_ends_one_and_begins_the_next():
    source = loader()
    across = windows_of(source.batch_at(WINDOWS - 2, 5))
    assert across == windows_of(source.batch_at(WINDOWS - 2, 2)) + windows_of(source.batch_at(WINDOWS, 3))


def test_looking_ahead_does_not_move_the_loader():
    source = loader()
    source.batch_at(17, 4)
    assert source.consumed == 0
    assert take(source, 3) == take(loader(), 3)


def test_the_last_token_is_a_label_and_what_does_not_fill_a_window_is_left_out():
    assert loader(tokens=TOKENS[: 2 * SEQ + 1]).sequences.windows == 2
    assert loader(tokens=TOKENS[: 2 * SEQ]).sequences.windows == 1
    assert loader(tokens=TOKENS[: SEQ + 1], batch=1).next_batch().labels_BS[0, -1] == SEQ


@pytest.mark.parametrize(("size", "parts"), [(1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_microbatches_are_the_batch_in_order(size: int, parts: list[int]):
    batch = loader(batch=5).next_batch()
    found = list(batch.microbatches(size))
    assert [len(part.tokens_BS) for part in found] == parts
    assert torch.equal(torch.cat([part.tokens_BS for part in found]), batch.tokens_BS)
    assert torch.equal(torch.cat([part.labels_BS for part in found]), batch.labels_BS)


STARTS = np.array([0, 3, 4, 8, 21, 24, 40, 41, 42, 47, 48, 100])


def within(batch: int = WINDOWS, ranks: int = 1, index: int = 0) -> BatchLoader:
    epoch_permutation.cache_clear()
    return BatchLoader(RowSequences(TOKENS, SEQ, 1, STARTS), batch, Axis("dp", tuple(range(ranks)), index), CPU)


def test_every_token_is_told_where_its_document_begins_and_the_last_of_one_has_no_label():
    batch, plain = within().next_batch(), loader(batch=WINDOWS).next_batch()
    assert batch.begins_BS is not None
    assert torch.equal(batch.tokens_BS, plain.tokens_BS)
    for tokens, labels, begins in zip(batch.tokens_BS, batch.labels_BS, batch.begins_BS, strict=True):
        window = int(tokens[0])  # a token is its own position
        for position, token in enumerate(tokens.tolist()):
            start = max(s for s in STARTS.tolist() if s <= token)
            assert begins[position] == max(start - window, 0)
            assert labels[position] == (IGNORE_INDEX if token + 1 in STARTS else token + 1)


def test_without_documents_nothing_is_said_of_them():
    assert loader().next_batch().begins_BS is None
    assert all(part.begins_BS is None for part in loader().next_batch().microbatches(2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shares_and_microbatches_have_the_documents_of_their_sequences(ranks: int):
    whole = within().batch_at(5, 12).begins_BS
    assert whole is not None
    shares = [within(ranks=ranks, index=index).batch_at(5, 12) for index in range(ranks)]
    parts = [part.begins_BS for share in shares for part in share.microbatches(3)]
    assert torch.equal(torch.cat([part for part in parts if part is not None]), whole)
