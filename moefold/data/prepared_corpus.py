"""The corpus of prepared folders: opened by their indexes alone, read by memory map. Torch-free.

Without `data.weights` all shards of all folders are one source. With them each folder is a source of its own, and a
mixture says which of them gives each sequence. Held-out shards of all folders are one source, in the order of seed 0.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from moefold.config.errors import UserError
from moefold.config.mixture_weights import parse_weights
from moefold.config.run import DataConfig
from moefold.data.corpus import refuse_large_tokenizer
from moefold.data.cut_samples import cut_text
from moefold.data.document_stream import DocumentStream, ShardPlace, shard_places
from moefold.data.mixture import WHOLE, Mixture
from moefold.data.packed_sequences import PackedSequences, PackedSource
from moefold.data.preferences import PreferenceStream
from moefold.data.prepared_folder import SIDES, PreparedIndex, read_index, saved_tokenizer, vocabulary_digest
from moefold.data.sample_batches import packing_kind
from moefold.data.sequences import MixedSequences, NamedStream
from moefold.data.shards import mask_bytes, require_size
from moefold.data.shuffle import mix_keys
from moefold.data.tokenizer import Tokenizer


class PreparedSource(NamedTuple):
    """A prepared folder; `name` is for people."""

    name: str
    folder: Path
    index: PreparedIndex

    def places(self, side: str) -> list[ShardPlace]:
        return shard_places(self.folder, self.index, side)


class PreparedCorpus:
    """Prepared folders as the data of a run."""

    def __init__(self, sources: list[PreparedSource]):
        self.sources = sources
        self.skipped: tuple[str, ...] = ()

    def train_sequences(self, data: DataConfig, seed: int, batch: int) -> MixedSequences:
        """The sequences to train on; steps of `data.weights` have `batch` sequences."""
        phases = WHOLE
        groups = [self.sources]
        if data.weights:
            phases = parse_weights(data.weights, len(self.sources))
            groups = [[source] for source in self.sources]
        streams: list[NamedStream] = []
        for group in groups:
            stream = make_stream(group, "train", data, seed)
            streams.append(stream)
        mixture = Mixture(phases, batch)
        return mix_streams(streams, mixture, data)

    def packed_sequences(self, data: DataConfig, seed: int, batch: int) -> PackedSequences:
        windows = self.train_sequences(data, seed, batch)
        return pack_streams(windows, data, batch)

    def held_out_sequences(self, data: DataConfig) -> MixedSequences | PackedSequences:
        """Preferences are packed, never cut."""
        stream = make_stream(self.sources, "held_out", data, seed=0)
        mixture = Mixture(WHOLE, batch=1)
        windows = mix_streams([stream], mixture, data)
        if data.format != "preferences":
            return windows
        in_bins = replace(data, batch_of="sequences")
        return pack_streams(windows, in_bins, windows.windows)

    def fingerprint(self) -> str:
        """The digests of the folders' tokens, in order."""
        digests = [source.index.digest[:16] for source in self.sources]
        return " ".join(digests)


def mix_streams(streams: list[NamedStream], mixture: Mixture, data: DataConfig) -> MixedSequences:
    has_documents = data.attend == "document"
    return MixedSequences(streams, mixture, data.seq_len, has_documents)


def pack_streams(windows: MixedSequences, data: DataConfig, batch: int) -> PackedSequences:
    """Bins of documents in place of windows."""
    sources: list[PackedSource] = []
    for name, digest, stream in windows.sources:
        sources.append(PackedSource(digest, stream, name, stream.tokens))
    packed = packing_kind(data)(windows, sources, windows.mixture, batch, data.packing)
    if data.format == "preferences":
        refuse_cuts(packed)
    return packed


def refuse_cuts(packed: PackedSequences) -> None:
    """Refuse preferences that are longer than a bin: half of one would be compared with nothing."""
    cuts = packed.cut_samples()
    if cuts.cut:
        raise UserError(
            f"{cut_text(cuts, packed.seq_len)}, since preferences are never cut, or prepare them again with "
            f"--data.seq_len {packed.seq_len} --data.skip_bad true, which leaves those out"
        )


def make_stream(
    sources: list[PreparedSource],
    side: str,
    data: DataConfig,
    seed: int,
) -> NamedStream:
    """The stream of one side of some folders, as one source."""
    places: list[ShardPlace] = []
    keys: list[int] = []
    names: list[str] = []
    for source in sources:
        places += source.places(side)
        names.append(source.name)
        key = int(source.index.digest[:16], 16)
        keys.append(key)
    identity = mix_keys(*keys)
    name = "+".join(names)
    digest = f"{identity:016x}"
    kind = PreferenceStream if data.format == "preferences" else DocumentStream
    stream = kind(places, data.seq_len, seed, identity)
    return NamedStream(name, digest, stream)


def open_prepared(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> PreparedCorpus:
    """Open the folders of `data.files`. Refuses files of other sizes than written, another tokenizer or share held
    out, and too little text."""
    refuse_large_tokenizer(data, tokenizer, vocab)
    folders = [Path(name).expanduser() for name in data.files]
    base_names = Counter(folder.name for folder in folders)
    sources: list[PreparedSource] = []
    for folder in folders:
        index = read_index(folder)
        name = folder.name if base_names[folder.name] == 1 else str(folder)
        source = PreparedSource(name, folder, index)
        refuse_misfit(source, data, tokenizer)
        require_shards(source)
        sources.append(source)
    for side in SIDES:
        counts = [source.index.tokens(side) for source in sources]
        tokens = sum(counts)
        if tokens <= data.seq_len:
            raise UserError(
                f"data.files: {', '.join(data.files)} hold {tokens} tokens of side {side}; expected more than "
                f"data.seq_len = {data.seq_len}; prepare more text, or set data.seq_len below {max(tokens, 2)}"
            )
    return PreparedCorpus(sources)


def refuse_misfit(source: PreparedSource, data: DataConfig, tokenizer: Tokenizer) -> None:
    index = source.index
    if index.vocabulary != vocabulary_digest(tokenizer):
        raise UserError(
            f"data.tokenizer = {data.tokenizer} is not the tokenizer of {source.folder}; "
            "set data.tokenizer to auto, or prepare the data with this one"
        )
    if index.held_out != data.held_out:
        raise UserError(
            f"data.held_out = {data.held_out:g}, but {source.folder} was prepared with {index.held_out:g}; "
            f"set data.held_out to {index.held_out:g}, or prepare the data again"
        )
    refuse_other_samples(source, data)
    if not index.shards["train"]:
        raise UserError(f"{source.folder} holds no tokens to train on; expected a prepared text")


def refuse_other_samples(source: PreparedSource, data: DataConfig) -> None:
    """Refuse preferences for an objective that would learn rejected responses, and others for one that compares."""
    holds = source.index.holds
    if data.format == "preferences" and holds != "preferences":
        raise UserError(
            f"data.format = preferences, but {source.folder} was prepared of {holds}; "
            "prepare it again with --data.format preferences"
        )
    if holds == "preferences" and data.format != "preferences":
        raise UserError(
            f"{source.folder} holds preferences, but data.format = {data.format}; "
            "set data.format to preferences and train.objective to dpo"
        )


def require_shards(source: PreparedSource) -> None:
    """Refuse shards that are absent or cut, before the first step."""
    for side in SIDES:
        for place in source.places(side):
            facts = place.facts
            size = facts.tokens * place.dtype.itemsize
            path = place.folder / f"{facts.name}.tokens"
            require_size(path, size)
            if place.has_mask:
                require_size(path.with_suffix(".mask"), mask_bytes(facts.tokens))


def tokenizer_of_prepared(data: DataConfig) -> str:
    """The tokenizer of the first folder of `data.files`."""
    folder = Path(data.files[0]).expanduser()
    read_index(folder)
    return saved_tokenizer(folder)
