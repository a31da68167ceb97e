"""Batches of a number of samples: as many in every batch, each once an epoch, on any ranks, after any resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moefold.config.run import DataConfig
from moefold.data.corpus import Corpus
from moefold.data.loader import Batch
from moefold.data.look_ahead import MOST_BATCHES_AHEAD
from moefold.data.packed_sequences import PackedSequences
from moefold.data.packing import LONGEST_WAIT, fill_bins
from tests.data.test_packed_sequences import SEQ, documents, samples_of, saved_state, take
from tests.support.prepared import opened, prepared, small_sizes, varied_texts, write_jsonl

BATCH = 16
Make = Callable[..., PackedSequences]


def in_memory(batch: int = BATCH, batch_of: str = "samples") -> PackedSequences:
    parts = documents()
    starts = np.cumsum([0, *map(len, parts[:-1])])
    tokens = np.concatenate(parts).astype(np.uint8)
    data = DataConfig(seq_len=SEQ, attend="document", packing="best_fit", batch_of=batch_of)
    return Corpus(tokens, tokens, starts, starts).packed_sequences(data, 1, batch)


def expected_samples() -> Counter[tuple[int, ...]]:
    """Those of an epoch: documents, and parts of long ones, each with the token behind it."""
    found: Counter[tuple[int, ...]] = Counter()
    for document in documents():
        for start in range(0, len(document) - 1, SEQ):
            found[tuple(document[start : start + SEQ + 1].tolist())] += 1
    return found


def test_every_batch_has_as_many_samples_and_an_epoch_every_sample_once():
    epoch = expected_samples()
    batch = epoch.total() // 10
    steps = -(-epoch.total() // batch) + LONGEST_WAIT + MOST_BATCHES_AHEAD
    found: list[tuple[int, ...]] = []
    for step in take(in_memory, 1, steps, batch=batch):
        samples = samples_of([step])
        assert len(samples) == batch
        found += samples
    counted = Counter(found)
    assert not epoch - counted, "the samples of an epoch are in its first batches"
    assert not counted - epoch - epoch, "those of the next epoch follow"


def rows_of(batches: list[Batch], name: str) -> torch.Tensor:
    """The rows of bins: those that hold a sample."""
    rows: list[torch.Tensor] = []
    for batch in batches:
        assert batch.filled_B is not None
        rows.append(getattr(batch, name)[batch.filled_B > 0])
    return torch.cat(rows)


@pytest.mark.parametrize("source", ["memory", "prepared"])
def test_ranks_and_resumes_with_other_rank_counts_go_on_with_the_same_bins(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    small_sizes(monkeypatch)
    make: Make = in_memory
    if source == "prepared":
        for name, count in {"web": 200, "code": 60}.items():
            prepared(tmp_path / name, write_jsonl(tmp_path / f"{name}.jsonl", varied_texts(count, name)))

        def make(**settings: int) -> PackedSequences:
            folders = (tmp_path / "web", tmp_path / "code")
            weights = ("0.75/0.25", "4:0.25/0.75")
            packing = {"attend": "document", "packing": "first_fit", "batch_of": "samples"}
            corpus, data = opened(*folders, seq_len=SEQ, weights=weights, **packing)
            return corpus.packed_sequences(data, 1, BATCH)

    whole = take(make, 1, 9)
    parts: list[Batch] = []
    for resume, ranks in enumerate((1, 2, 4)):
        begin = 3 * resume * BATCH
        parts += take(make, ranks, 3, begin, saved_state(make, begin))
    for name in ("tokens_BS", "labels_BS", "begins_BS", "filled_B"):
        assert torch.equal(rows_of(parts, name), rows_of(whole, name)), name
    counts = {len(batch.tokens_BS) for batch in whole}
    assert len(counts) > 1, "steps have as many bins as their samples fill"
    assert min(counts) < BATCH
    assert len({len(batch.tokens_BS) for batch in parts[-4:]}) == 1, "ranks have as many microbatches as each other"
    wastes = [
        1 - batch.filled_B.sum().item() / batch.tokens_BS.numel() for batch in whole if batch.filled_B is not None
    ]
    assert [batch.waste for batch in whole] == pytest.approx(wastes)


def test_sources_give_their_shares_of_samples_and_tell_their_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small_sizes(monkeypatch)
    for name, count in {"web": 200, "code": 60}.items():
        prepared(tmp_path / name, write_jsonl(tmp_path / f"{name}.jsonl", varied_texts(count, name)))
    packing = {"attend": "document", "packing": "best_fit", "batch_of": "samples"}
    corpus, data = opened(tmp_path / "web", tmp_path / "code", seq_len=SEQ, weights=("3/1",), **packing)
    sequences = corpus.packed_sequences(data, 1, BATCH)
    samples = samples_of(take(lambda: sequences, 1, 4))
    rows = [row for batch in range(4) for placed in sequences.plan_at(batch * BATCH).bins for row, _ in placed]
    by_source = Counter(rows)
    assert [by_source[source.row] for source in sequences.sources] == [48, 16]
    assert len(samples) == 64
    read = sequences.epochs(4 * BATCH)
    states = sequences.states_at(4 * BATCH)
    for source, state in zip(sequences.sources, states, strict=True):
        waiting = sum(sample.length for sample in state.waiting)
        assert read[source.name] == (state.following - waiting) / source.tokens > 0
    assert sequences.epochs(400 * BATCH) == {}, "not planned yet"


def test_a_run_may_go_from_counting_bins_to_counting_samples_and_back():
    """Every token is predicted once, in either count."""
    bins, samples, again = in_memory(8, "sequences"), in_memory(), in_memory(4, "sequences")
    samples.restore(24, json.loads(json.dumps(bins.packing_state(24))))
    assert samples.states_at(24)[0].waiting
    again.restore(56, json.loads(json.dumps(samples.packing_state(56))))
    planned = [bins.plan_at(number) for number in range(0, 24, 8)]
    planned += [samples.plan_at(number) for number in range(24, 56, BATCH)]
    planned += [again.plan_at(number) for number in range(56, 76, 4)]
    taken = [sample for batch in planned for placed in batch.bins for _, sample in placed]
    state = again.states_at(76)[0]
    inputs: list[int] = []
    for start, length, _ in [*taken, *state.waiting]:
        inputs += range(start, start + length)
    ends = {bins.sources[0].row.document_end(place) - 1 for place in range(state.following)}
    assert sorted(inputs) == sorted(set(range(state.following)) - ends)


@pytest.mark.parametrize("fit", ["first_fit", "best_fit"])
def test_samples_fill_few_bins(fit: str):
    """Longest first, first-fit and best-fit open at most 11/9 of the fewest bins that could do, and one more."""
    chance = np.random.default_rng(3)
    for count in (1, 7, 64, 500):
        lengths = np.clip(chance.lognormal(6, 1.2, count), 1, 4096).astype(int).tolist()
        bins = fill_bins(lengths, 4096, fit)
        assert sorted(number for numbers in bins for number in numbers) == list(range(count))
        assert max(sum(lengths[number] for number in numbers) for numbers in bins) <= 4096
        fewest = -(-sum(lengths) // 4096)
        assert len(bins) <= 11 / 9 * fewest + 1
    with pytest.raises(ValueError, match="cut it"):
        fill_bins([5], 4, fit)
