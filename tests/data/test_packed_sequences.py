"""Packed sequences: every token is predicted once an epoch, from any source, on any ranks and after any resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import Corpus
from moefold.data.loader import Batch, BatchLoader
from moefold.data.packed_sequences import PackedSequences
from moefold.data.packing import Sample
from moefold.layout.axes import Axis
from moefold.layout.labels import IGNORE_INDEX
from tests.data.test_document_stream import texts_of
from tests.support.prepared import opened, prepared, small_sizes, varied_texts, write_jsonl

SEQ, BATCH, LAST = 64, 8, 255
DATA = DataConfig(seq_len=SEQ, attend="document", packing="best_fit")
Make = Callable[..., PackedSequences]


def documents(count: int = 150) -> list[np.ndarray]:
    """Documents that all differ, some empty and some longer than two bins; the last token of each ends it."""
    chance = np.random.default_rng(2)
    lengths = np.clip(chance.lognormal(3, 1, count), 1, 170).astype(int)
    return [np.append(chance.integers(0, LAST, length - 1), LAST) for length in lengths]


def in_memory(batch: int = BATCH, seq_len: int = SEQ) -> PackedSequences:
    parts = documents()
    starts = np.cumsum([0, *map(len, parts[:-1])])
    tokens = np.concatenate(parts).astype(np.uint8)
    data = DataConfig(seq_len=seq_len, attend="document", packing="best_fit")
    return Corpus(tokens, tokens, starts, starts).packed_sequences(data, 1, batch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        small_sizes(patch)
        for name, count in {"web": 200, "code": 60}.items():
            prepared(root / name, write_jsonl(root / f"{name}.jsonl", varied_texts(count, name)))
    return root / "web", root / "code"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_sizes(monkeypatch)


def from_folders(*folders: Path, batch: int = BATCH, **settings: object) -> PackedSequences:
    corpus, data = opened(*folders, seq_len=SEQ, attend="document", packing="first_fit", **settings)
    return corpus.packed_sequences(data, 1, batch)


def take(make: Make, ranks: int, steps: int, begin: int = 0, saved: str = "", **settings: int) -> list[Batch]:
    """The batches of some steps, rank after rank, each rank as in a process of its own."""
    batches: list[list[Batch]] = []
    for rank in range(ranks):
        sequences = make(**settings)
        if saved:
            sequences.restore(begin, json.loads(saved))
        loader = BatchLoader(sequences, sequences.batch, Axis("dp", tuple(range(ranks)), rank), torch.device("cpu"))
        loader.consumed = begin
        batches.append([loader.next_batch() for _ in range(steps)])
    return [share for step in zip(*batches, strict=True) for share in step]


def joined(batches: list[Batch], name: str) -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


def saved_state(make: Make, consumed: int, **settings: int) -> str:
    return json.dumps(make(**settings).packing_state(consumed))


def samples_of(batches: list[Batch]) -> list[tuple[int, ...]]:
    """The tokens of all samples, with the label of the last one."""
    found: list[tuple[int, ...]] = []
    for batch in batches:
        assert batch.begins_BS is not None
        assert batch.filled_B is not None
        for tokens, labels, begins, filled in zip(
            batch.tokens_BS, batch.labels_BS, batch.begins_BS, batch.filled_B.tolist(), strict=True
        ):
            assert (labels[filled:] == IGNORE_INDEX).all(), "padding has no label"
            assert (begins[filled:] == filled).all(), "padding sees no sample"
            for begin in begins[:filled].unique().tolist():
                is_own = begins[:filled] == begin
                sample = tokens[:filled][is_own].tolist()
                own_labels = labels[:filled][is_own].tolist()
                assert own_labels[:-1] == sample[1:]
                found.append((*sample, own_labels[-1]))
    return found


def samples_of_epochs(sequences: PackedSequences, epochs: int) -> list[list[Sample]]:
    """The samples that batches take of each epoch, until none of these epochs waits."""
    found: list[list[Sample]] = [[] for _ in range(epochs)]
    first = 0
    while True:
        for placed in sequences.plan_at(first).bins:
            for _, sample in placed:
                epoch = sample.start // sequences.tokens
                if epoch < epochs:
                    found[epoch].append(sample)
        first += BATCH
        following, waiting = sequences.states_at(first)[0]
        if min([following, *(sample.start for sample in waiting)]) >= epochs * sequences.tokens:
            return found


def test_an_epoch_has_every_sample_once_and_long_documents_are_cut():
    assert any(len(document) > 2 * SEQ for document in documents())
    assert any(len(document) == 1 for document in documents())
    expected: Counter[tuple[int, ...]] = Counter()
    for document in documents():
        for start in range(0, len(document) - 1, SEQ):
            expected[tuple(document[start : start + SEQ + 1].tolist())] += 1
    sequences = in_memory()
    row = sequences.sources[0].row
    orders: list[list[tuple[int, ...]]] = []
    for samples in samples_of_epochs(sequences, 2):
        ids = [row.read(sample.start, sample.start + sample.length + 1).ids.tolist() for sample in samples]
        orders.append([tuple(each) for each in ids])
        assert Counter(orders[-1]) == expected
    assert orders[0] != orders[1], "every epoch has its own order"


@pytest.mark.parametrize("source", ["memory", "prepared"])
def test_ranks_and_resumes_with_other_rank_counts_go_on_with_the_same_sequences(
    source: str, folders: tuple[Path, Path]
):
    def make(**settings: int) -> PackedSequences:
        if source == "memory":
            return in_memory(**settings)
        return from_folders(*folders, weights=("0.6/0.4", "4:0.2/0.8"), **settings)

    whole = take(make, 1, 9)
    parts: list[Batch] = []
    for resume, ranks in enumerate((1, 2, 4)):
        begin = 3 * resume * BATCH
        parts += take(make, ranks, 3, begin, saved_state(make, begin))
    for name in ("tokens_BS", "labels_BS", "begins_BS", "filled_B"):
        assert torch.equal(joined(parts, name), joined(whole, name)), name
    again = take(make, 1, 3, 6 * BATCH)
    assert torch.equal(joined(again, "tokens_BS"), joined(whole[6:], "tokens_BS")), "without a saved state"
    wastes = [batch.waste for batch in whole]
    filled = [1 - batch.filled_B.sum().item() / (SEQ * BATCH) for batch in whole if batch.filled_B is not None]
    assert wastes == pytest.approx(filled)
    assert 0 < float(np.mean(filled)) < 0.1


def test_no_token_is_lost_or_repeated_where_batches_and_bins_change_on_a_resume():
    begin = 5 * BATCH
    first, second = in_memory(), in_memory(batch=4, seq_len=40)
    second.restore(begin, json.loads(saved_state(in_memory, begin)))
    planned = [first.plan_at(number) for number in range(0, begin, BATCH)]
    planned += [second.plan_at(number) for number in range(begin, begin + 40, 4)]
    taken = [sample for batch in planned for placed in batch.bins for _, sample in placed]
    state = second.states_at(begin + 40)[0]
    assert state.following > first.states_at(begin)[0].following
    assert any(sample.length > 40 for sample in first.states_at(begin)[0].waiting), "a sample to cut"
    inputs: list[int] = []
    for start, length, _ in [*taken, *state.waiting]:
        inputs += range(start, start + length)
    ends = {first.sources[0].row.document_end(place) - 1 for place in range(state.following)}
    assert sorted(inputs) == sorted(set(range(state.following)) - ends)


def test_bins_of_a_mixture_come_from_the_sources_of_the_windows_in_their_place(folders: tuple[Path, Path]):
    packed = from_folders(*folders, weights=("3/1",))
    web, code = 0, 0
    for number in range(4 * BATCH):
        arrays = packed.arrays(number)
        text = bytes(arrays.tokens[: arrays.filled].astype(np.uint8)).decode()
        source = packed.mixture.place(number).source
        web += source == 0
        code += source == 1
        assert ("code text" in text) <= (source == 1)
        assert ("web text" in text) <= (source == 0)
    assert (web, code) == (24, 8)
    assert list(packed.source_counts(32).values()) == [24, 8]


@pytest.mark.parametrize("source", ["memory", "prepared"])
def test_documents_of_a_bin_are_named_and_hold_its_samples(source: str, folders: tuple[Path, Path]):
    contents = {str(folder / "train"): texts_of(folder) for folder in folders} | {"stdlib": documents()}
    sequences = in_memory() if source == "memory" else from_folders(*folders, weights=("1/1",))
    for number in range(8 * BATCH):
        arrays = sequences.arrays(number)
        assert arrays.begins is not None
        begins = np.unique(arrays.begins[: arrays.filled]).tolist()
        for begin, document in zip(begins, sequences.documents(number), strict=True):
            text = contents[document.source][document.number]
            sample = arrays.tokens[: arrays.filled][arrays.begins[: arrays.filled] == begin]
            parts = [text[start : start + SEQ] for start in range(0, len(text) - 1, SEQ)]
            assert any(np.array_equal(part[: len(sample)], sample) for part in parts)


def test_every_token_of_a_prepared_folder_is_predicted_once_an_epoch(folders: tuple[Path, Path]):
    sequences = from_folders(folders[1])
    tokens = sequences.tokens
    row = sequences.sources[0].row
    ids = row.read(0, 2 * tokens).ids
    for epoch, samples in enumerate(samples_of_epochs(sequences, 2)):
        predicted = [place + 1 for sample in samples for place in range(sample.start, sample.start + sample.length)]
        begins = {place + 1 for place in range(2 * tokens) if ids[place] == 0} | {0}
        places = range(epoch * tokens, (epoch + 1) * tokens)
        assert sorted(predicted) == [place for place in places if place not in begins]
        assert len(predicted) == row.predicted


def test_text_without_anything_to_predict_is_refused():
    ends = np.zeros(100, dtype=np.uint8)
    corpus = Corpus(ends, ends, np.arange(100), np.arange(100))
    with pytest.raises(UserError, match="empty documents alone"):
        corpus.packed_sequences(DATA, 1, 2)
