"""The corpus of a run as its configuration names it, and what `data.seq_len` cuts of its samples. Torch-free."""

from __future__ import annotations

from moefold.config.errors import UserError
from moefold.config.run import Config, DataConfig
from moefold.data.corpus import Corpus, load_corpus
from moefold.data.cut_samples import CutSamples, cut_text
from moefold.data.documents import named_files
from moefold.data.packed_sequences import PackedSequences
from moefold.data.prepared_corpus import PreparedCorpus, open_prepared, tokenizer_of_prepared
from moefold.data.tokenizer import Tokenizer, choose_tokenizer, load_tokenizer

COUNTED_BYTES = 1 << 22  # of files whose samples are counted before a run; encoding more takes seconds


def tokenizer_of_run(data: DataConfig, vocab: int) -> str:
    """`data.tokenizer`; auto means that of the prepared data, or the one that suits the text."""
    if data.tokenizer == "auto" and data.source == "prepared":
        return tokenizer_of_prepared(data)
    return choose_tokenizer(data, vocab)


def open_corpus(data: DataConfig, tokenizer: Tokenizer, vocab: int) -> Corpus | PreparedCorpus:
    if data.source == "prepared":
        return open_prepared(data, tokenizer, vocab)
    return load_corpus(data, tokenizer, vocab)


def cut_samples_of(packed: PackedSequences | None, data: DataConfig) -> CutSamples:
    """What `data.seq_len` cuts, where packing leaves out the rest of samples. Preferences are never cut."""
    if packed is None or data.format == "preferences":
        return CutSamples()
    return packed.cut_samples()


def foretold_cuts(config: Config) -> str | None:
    """What a run would tell of the samples that `data.seq_len` cuts, or why that is not known; None where samples are
    not cut."""
    data = config.data
    has_samples = data.source == "prepared" or (data.source == "files" and data.format in ("chat", "pairs"))
    if not has_samples or data.packing == "windows" or data.format == "preferences":
        return None
    try:
        cuts = count_before_run(config)
    except (UserError, OSError) as reason:
        return f"what data.seq_len = {data.seq_len} cuts is not known: {reason}"
    return cut_text(cuts, data.seq_len) if cuts.samples else None


def count_before_run(config: Config) -> CutSamples:
    data = config.data
    if data.source == "files":
        refuse_to_wait(data)
    vocab = config.model.vocab
    name = tokenizer_of_run(data, vocab)
    tokenizer = load_tokenizer(name, vocab, data.end_token)
    corpus = open_corpus(data, tokenizer, vocab)
    packed = corpus.packed_sequences(data, config.train.seed, config.train.global_batch)
    return cut_samples_of(packed, data)


def refuse_to_wait(data: DataConfig) -> None:
    files = [file for name in data.files for file in named_files(name)]
    size = sum(file.stat().st_size for file in files)
    if size > COUNTED_BYTES:
        raise UserError(
            f"data.files have {size / 1e6:,.0f} MB, which a run reads at its start; "
            f"moefold data show counts them with --data.seq_len {data.seq_len}"
        )
