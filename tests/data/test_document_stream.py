"""The order of prepared data: every token once an epoch, on any number of ranks and after any resume."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.data import document_stream
from moefold.data.folder_actions import side_documents
from moefold.data.loader import BatchLoader
from moefold.data.prepared_folder import read_index
from moefold.data.sequences import MixedSequences
from moefold.data.shuffle import shuffled_order
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX
from tests.support.prepared import opened, prepared, small_sizes, varied_texts, write_jsonl

SEQ = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        small_sizes(patch)
        for name, count in {"web": 400, "code": 120}.items():
            prepared(root / name, write_jsonl(root / f"{name}.jsonl", varied_texts(count, name)))
    return root / "web", root / "code"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_sizes(monkeypatch)


def sequences_of(*folders: Path, batch: int = 8, **settings: object) -> MixedSequences:
    corpus, data = opened(*folders, seq_len=SEQ, **settings)
    return corpus.train_sequences(data, 1, batch)


def take_steps(make: Callable[[], MixedSequences], ranks: int, batch: int, begin: int, steps: int) -> torch.Tensor:
    """The tokens of some steps, from all ranks, each with sequences of its own as in a process of its own."""
    loaders: list[BatchLoader] = []
    for rank in range(ranks):
        loader = BatchLoader(make(), batch, Axis("dp", tuple(range(ranks)), rank), torch.device("cpu"))
        loader.consumed = begin
        loaders.append(loader)
    return torch.cat([loader.next_batch().tokens_BS for _ in range(steps) for loader in loaders])


def tokens_of_two_epochs(folder: Path) -> tuple[int, np.ndarray]:
    """The number of windows that begin in the first two epochs, and all tokens of the source, sorted."""
    corpus, data = opened(folder, seq_len=SEQ)
    stream = corpus.train_sequences(data, 1, 8).sources[0].stream
    tokens = [np.asarray(stream.shards.get(number).ids) for number in range(len(stream.places))]
    return -(-2 * stream.tokens // SEQ), np.sort(np.concatenate(tokens))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_every_token_is_read_once_an_epoch_on_any_number_of_ranks(ranks: int, folders: tuple[Path, Path]):
    sequences = sequences_of(folders[0])
    total = sequences.tokens
    windows, tokens = tokens_of_two_epochs(folders[0])
    batch = 8
    rows = take_steps(lambda: sequences_of(folders[0]), ranks, batch, 0, -(-windows // batch)).numpy()
    # Windows are in random order within a chapter: sort them back to the row.
    places = [sequences.sources[0].stream.window_place(number) for number in range(windows)]
    assert sorted(places) == list(range(windows))
    row = rows[:windows][np.argsort(places)].reshape(-1)
    for epoch in range(2):
        part = row[epoch * total : (epoch + 1) * total]
        assert np.array_equal(np.sort(part), tokens)
    assert not np.array_equal(row[:total], row[total : 2 * total]), "every epoch has its own order"


def test_five_resumes_with_changed_rank_counts_go_on_with_the_same_sequences(folders: tuple[Path, Path]):
    batch, steps = 8, 12
    weights = ("0.6/0.4", "20:0.2/0.8")
    make = partial(sequences_of, *folders, weights=weights)
    whole = take_steps(make, 1, batch, 0, 6 * steps)
    parts: list[torch.Tensor] = []
    for resume, ranks in enumerate((1, 8, 2, 4, 1, 2)):
        parts.append(take_steps(make, ranks, batch, resume * steps * batch, steps))
    assert torch.equal(torch.cat(parts), whole)


def test_each_source_of_a_mixture_gives_its_own_sequences_in_order_and_epochs_are_told(folders: tuple[Path, Path]):
    mixed = sequences_of(*folders, weights=("3/1",))
    alone = [sequences_of(folder) for folder in folders]
    given = [0, 0]
    for number in range(200):
        place = mixed.mixture.place(number)
        expected = alone[place.source].window(given[place.source]).ids
        assert np.array_equal(mixed.window(number).ids, expected)
        given[place.source] += 1
    assert given == [150, 50]
    assert list(mixed.source_counts(200).values()) == given
    assert mixed.epochs(200) == {
        "web": pytest.approx(150 * SEQ / alone[0].tokens),
        "code": pytest.approx(50 * SEQ / alone[1].tokens),
    }


def test_documents_are_whole_in_the_row_and_shuffled_across_files(folders: tuple[Path, Path]):
    stream = sequences_of(folders[0]).sources[0].stream
    row = stream.read(0, stream.tokens).ids
    texts = bytes(row.astype(np.uint8)).decode().split("\0")
    assert texts.pop() == ""
    assert len(set(texts)) == len(texts)
    assert set(texts) <= set(varied_texts(400, "web"))
    numbers = [int(text.split()[2]) for text in texts]
    followers = np.mean(np.diff(numbers) == 1)
    assert followers < 0.05, "neighbours of the file are apart"
    chapters = stream.plan_epoch(0).chapters
    assert len(chapters) > 2
    assert chapters[-1].end == stream.tokens


def test_documents_of_a_sequence_are_named_by_folder_and_number_and_hold_its_tokens(folders: tuple[Path, Path]):
    contents = {str(folder / "train"): texts_of(folder) for folder in folders}
    length = 400
    corpus, data = opened(*folders, seq_len=length, weights=("3/1",))
    sequences = corpus.train_sequences(data, 1, 8)
    several = 0
    for number in range(2 * sequences.windows):
        found = sequences.documents(number)
        several += len(found) > 2
        texts = [contents[document.source][document.number] for document in found]
        joined = np.concatenate(texts)
        window = sequences.window(number).ids[:length]
        at = [start for start in range(len(texts[0])) if np.array_equal(joined[start : start + length], window)]
        assert any(start + length > len(joined) - len(texts[-1]) for start in at), "from the first to the last of them"
    assert several


def texts_of(folder: Path) -> list[np.ndarray]:
    """The documents to train on of a folder, in its order."""
    return list(side_documents(folder, read_index(folder), "train"))


def test_document_begins_are_those_of_the_row(folders: tuple[Path, Path]):
    corpus, data = opened(folders[0], seq_len=SEQ, attend="document")
    sequences = corpus.train_sequences(data, 1, 8)
    loader = BatchLoader(sequences, 64, Axis("dp", (0,), 0), torch.device("cpu"))
    batch = loader.next_batch()
    assert batch.begins_BS is not None
    for tokens, labels, begins in zip(
        batch.tokens_BS.tolist(), batch.labels_BS.tolist(), batch.begins_BS.tolist(), strict=True
    ):
        begin = 0
        for position, token in enumerate(tokens):
            assert begins[position] == begin
            assert (labels[position] == IGNORE_INDEX) == (token == 0)
            begin = position + 1 if token == 0 else begin


def test_memory_holds_a_few_chapters_and_mapped_shards_whatever_was_read(folders: tuple[Path, Path]):
    sequences = sequences_of(folders[0])
    stream = sequences.sources[0].stream
    for number in range(0, 5 * sequences.windows, 3):
        sequences.window(number)
        assert stream.shards.bytes <= document_stream.MAPPED_BYTES
        assert (
            max(len(kept.kept) for kept in (stream.orders, stream.windows, stream.epochs))
            <= document_stream.KEPT_CHAPTERS
        )


def test_orders_are_permutations_that_depend_on_every_key_and_never_change():
    assert shuffled_order(8, 1, 2, 3).tolist() == [5, 0, 7, 3, 6, 1, 4, 2]
    assert sorted(shuffled_order(1000, 5).tolist()) == list(range(1000))
    orders = {tuple(shuffled_order(20, *keys).tolist()) for keys in ((1, 2), (2, 1), (1, 3), (0, 2), (1, 2, 0))}
    assert len(orders) == 5


def test_the_next_batch_is_assembled_while_this_one_is_used(folders: tuple[Path, Path]):
    loader = BatchLoader(sequences_of(folders[0]), 8, Axis("dp", (0,), 0), torch.device("cpu"))
    loader.next_batch()
    assert loader.assembled is not None
    position, ahead = loader.assembled
    assert position == loader.consumed
    expected = ahead.result()[0]
    assert np.array_equal(loader.next_batch().tokens_BS.numpy(), expected)
