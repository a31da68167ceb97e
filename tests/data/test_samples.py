"""Samples with masks: chats have the tokens and the masks of transformers; malformed ones are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.config.errors import UserError
from moefold.config.run import DataConfig
from moefold.data.corpus import Corpus, load_corpus
from moefold.data.document_split import DocumentTokens
from moefold.data.samples import ChatReader, sample_reader
from moefold.data.tokenizer import ByteTokenizer, load_tokenizer
from moefold.layout.labels import IGNORE_INDEX
from tests.support.prepared import opened, prepared

VOCAB = 600
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|close|>", "<|eot|>", "[INST]", "[/INST]"]
SPECIAL += ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}{% for message in messages %}
    {{- '<|header|>' + message.role + '<|close|>\\n\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim + '<|eot|>' }}{% endgeneration %}
    {%- else %}{{ message.content | trim + '<|eot|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|close|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% set rest = messages %}{% set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}{% set system = messages[0]['content'] + '\\n\\n' %}
{%- endif %}
{%- for message in rest %}
    {%- set is_user = message['role'] == 'user' %}
    {%- if is_user != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if message['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message['content'] + '[/INST]' }}
    {%- else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""
HARMONY = """{%- for message in messages %}
    {{- '<|start|>' + message.role }}
    {%- if message.role == 'assistant' %}
        {{- '' }}{% generation %}{{ '<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endgeneration %}
    {%- else %}{{ '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
GEMMA = """{{- bos_token }}{% for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' }}
    {%- if role == 'model' %}{% generation %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endgeneration %}
    {%- else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA, "Mistral": MISTRAL, "GPT-OSS": HARMONY, "Gemma": GEMMA}
THINKING = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- set text = message.content %}
    {%- if message.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}
    {{- text + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CHANGING_PROMPT = """{% for message in messages %}{{ message.role + ':' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ 'answer now:' }}{% endif %}"""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "system", "content": "Be brief. Été 🐍 <b>&</b>"},
        {"role": "user", "content": "  one\n\ntwo  "},
        {"role": "assistant", "content": "\nthree 🐍 for\tyou "},
        {"role": "user", "content": "and <|im_end|> then?"},
        {"role": "assistant", "content": "</think>four"},
        {"role": "user", "content": "thanks"},
    ],
]


def without_marks(template: str) -> str:
    for mark in ("{% generation %}", "{% endgeneration %}"):
        template = template.replace(mark, "")
    return template


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte pairs of a little text, with special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    engine.train_from_iterator(["assistant user system what is one two three for you then thanks \n\n\n"] * 9, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    engine.save(str(folder / "tokenizer.json"))
    return folder


def reader_of(folder: Path, tmp_path: Path, template: str, end: str = "</s>") -> ChatReader:
    """A reader with that template in tokenizer_config.json, as published tokenizers have it."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    options = {"bos_token": "<s>", "eos_token": {"content": end}, "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    path = str(tmp_path / "tokenizer.json")
    data = DataConfig(source="files", format="chat", tokenizer=path)
    reader = sample_reader(data, load_tokenizer(path, VOCAB))
    assert isinstance(reader, ChatReader)
    return reader


def transformers_tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>")


def whole(document: DocumentTokens, end: int) -> tuple[list[int], list[bool]]:
    """The tokens and the mask with the end token behind the sample."""
    assert document.mask is not None
    return [*document.ids.tolist(), end], document.mask.tolist()


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("messages", CHATS, ids=["short", "long"])
def test_a_chat_has_the_tokens_and_the_mask_of_transformers(
    messages: list[dict[str, Any]], template: str, has_marks: bool, tokenizer_folder: Path, tmp_path: Path
):
    oracle = transformers_tokenizer(tokenizer_folder).apply_chat_template(
        messages, chat_template=template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    reader = reader_of(tokenizer_folder, tmp_path, template if has_marks else without_marks(template))
    assert reader.template.marks == has_marks
    (document,) = reader.documents({"messages": messages})
    end = reader.tokenizer.end.id
    ids, mask = whole(document, end)
    expected, trained = oracle["input_ids"], list(map(bool, oracle["assistant_masks"]))
    if expected[-1] != end:
        expected, trained = [*expected, end], [*trained, False]
    assert ids == expected
    assert mask == trained
    assert 0 < sum(mask) < len(mask)


def test_a_template_whose_beginnings_change_gives_a_sample_for_each_answer(tokenizer_folder: Path, tmp_path: Path):
    reader = reader_of(tokenizer_folder, tmp_path, THINKING)
    messages = [*CHATS[0][:1], {"role": "assistant", "content": "hm</think>It is 4."}, *CHATS[1][3:5]]
    oracle = transformers_tokenizer(tokenizer_folder)
    documents = reader.documents({"messages": messages})
    assert len(documents) == 2
    for document, count in zip(documents, (2, 4), strict=True):
        ids, mask = whole(document, reader.tokenizer.end.id)
        plain = {"chat_template": THINKING, "tokenize": True, "return_dict": False}
        assert ids[:-1] == oracle.apply_chat_template(messages[:count], **plain)
        asked = oracle.apply_chat_template(messages[: count - 1], **plain, add_generation_prompt=True)
        assert mask == [False] * len(asked) + [True] * (len(ids) - 1 - len(asked)) + [False]
    assert "hm</think>" in reader.tokenizer.decode(documents[0].ids.tolist())
    assert "hm</think>" not in reader.tokenizer.decode(documents[1].ids.tolist())
    (alone,) = reader.documents({"messages": messages[:2]})
    assert alone.ids.tolist() == documents[0].ids.tolist()


def test_a_template_whose_prompt_changes_is_refused_by_name(tokenizer_folder: Path, tmp_path: Path):
    reader = reader_of(tokenizer_folder, tmp_path, CHANGING_PROMPT)
    with pytest.raises(ValueError, match=r"cannot be masked: .* before message 2 differently"):
        reader.documents({"messages": CHATS[0]})


def test_a_template_beside_the_tokenizer_counts_before_one_in_its_options(tokenizer_folder: Path, tmp_path: Path):
    reader_of(tokenizer_folder, tmp_path, CHANGING_PROMPT)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    path = str(tmp_path / "tokenizer.json")
    reader = ChatReader(load_tokenizer(path, VOCAB), path)
    assert reader.template.source == CHATML
    listed = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA}]
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": listed}))
    assert ChatReader(load_tokenizer(path, VOCAB), path).template.source == LLAMA


def test_a_template_cannot_leave_its_sandbox(tokenizer_folder: Path, tmp_path: Path):
    escape = "{{ messages.__class__.__base__.__subclasses__() }}"
    with pytest.raises(ValueError, match="is refused by the chat template: access to attribute '__class__'"):
        reader_of(tokenizer_folder, tmp_path, escape).documents({"messages": CHATS[0]})
    with pytest.raises(ValueError, match="is refused by the chat template"):
        reader_of(tokenizer_folder, tmp_path, "{{ messages.append(1) }}").documents({"messages": CHATS[0]})
    with pytest.raises(UserError, match=r"tokenizer_config\.json: the chat template is not valid Jinja"):
        reader_of(tokenizer_folder, tmp_path, "{% for %}")


def test_sharegpt_says_the_same(tokenizer_folder: Path, tmp_path: Path):
    reader = reader_of(tokenizer_folder, tmp_path, CHATML)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[each["role"]], "value": each["content"]} for each in CHATS[1]]
    (one,), (other,) = reader.documents({"messages": CHATS[1]}), reader.documents({"conversations": turns})
    assert whole(one, 0) == whole(other, 0)


USER = {"role": "user", "content": "x"}
MALFORMED: dict[str, Any] = {
    r"has the fields text; expected a list in \"messages\"": {"text": "x"},
    r"has str in \"messages\"; expected a list": {"messages": "x"},
    r"has list in \"messages\"; expected a list of messages, at least one": {"messages": []},
    r"has a message 2 without a text in \"role\"": {"messages": [USER, {"content": "x"}]},
    r"has a message 2 without a text in \"content\"": {"messages": [USER, {"role": "assistant", "content": 3}]},
    r"has messages of user; expected one of assistant": {"messages": [USER]},
    r"has a turn 1 without texts in \"from\" and \"value\"": {"conversations": [{"from": "gpt"}]},
    r"has U\+FDD0 or U\+FDD1 in message 1": {"messages": [{"role": "user", "content": "\ufdd0"}]},
    r"is refused by the chat template: roles must alternate": {"messages": [USER, *CHATS[0]]},
}


def test_malformed_chats_are_named_with_file_and_line_or_counted(tokenizer_folder: Path, tmp_path: Path):
    reader_of(tokenizer_folder, tmp_path, MISTRAL)
    path = str(tmp_path / "tokenizer.json")
    tokenizer = load_tokenizer(path, VOCAB)
    file = tmp_path / "chats.jsonl"
    data = DataConfig(source="files", files=(str(file),), format="chat", tokenizer=path, seq_len=8, held_out=0.3)
    good = [json.dumps({"messages": CHATS[0]})] * 6
    for match, record in MALFORMED.items():
        file.write_text("\n".join([*good, json.dumps(record)]))
        with pytest.raises(UserError, match=rf"chats\.jsonl, line 7 {match}"):
            load_corpus(data, tokenizer, VOCAB)
    file.write_text("\n".join([*good, *map(json.dumps, MALFORMED.values())]))
    corpus = load_corpus(replace(data, skip_bad=True), tokenizer, VOCAB)
    assert len(corpus.skipped) == len(MALFORMED)
    assert len(corpus.train_starts) + len(corpus.held_out_starts) == 6


def test_chats_without_a_template_or_fields_are_refused_with_what_to_do(tokenizer_folder: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.tokenizer = byte; set data\.tokenizer to a tokenizer\.json"):
        sample_reader(DataConfig(format="chat", tokenizer="byte"), ByteTokenizer())
    path = tokenizer_folder / "tokenizer.json"
    tokenizer = load_tokenizer(str(path), VOCAB)
    with pytest.raises(UserError, match=r"has no chat_template\.jinja"):
        sample_reader(DataConfig(format="chat"), tokenizer)
    (tmp_path / "notes.txt").write_text("some text")
    data = DataConfig(source="files", files=(str(tmp_path / "notes.txt"),), format="pairs")
    with pytest.raises(UserError, match=r"notes\.txt has no fields for data\.format"):
        load_corpus(data, ByteTokenizer(), 256)


def write_pairs(path: Path, count: int) -> Path:
    pairs = [{"prompt": f"{n} plus one is ", "response": str(n + 1) * (n % 4 + 1)} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    return path


def labelled_texts(corpus: Any, data: DataConfig) -> set[str]:
    """The trained tokens of the samples of some epochs."""
    sequences = corpus.packed_sequences(data, 1, 4)
    found: set[str] = set()
    for number in range(3 * sequences.windows):
        _, labels, begins, filled = sequences.arrays(number)
        for begin in np.unique(begins[:filled]):
            trained = labels[(begins == begin) & (labels != IGNORE_INDEX)]
            found.add(bytes(trained.astype(np.uint8)).decode())
    return found


def test_the_response_and_the_end_of_a_pair_are_trained_from_files_and_from_shards(tmp_path: Path):
    file = write_pairs(tmp_path / "pairs.jsonl", 200)
    settings: dict[str, Any] = {"seq_len": 32, "attend": "document", "packing": "best_fit", "held_out": 0.1}
    data = DataConfig(source="files", files=(str(file),), format="pairs", tokenizer="byte", **settings)
    in_memory = load_corpus(data, ByteTokenizer(), 256)
    assert isinstance(in_memory, Corpus)
    index = prepared(tmp_path / "out", file, format="pairs", held_out=0.1)
    assert index.has_masks
    from_shards, _ = opened(tmp_path / "out", **settings)
    found = labelled_texts(in_memory, data)
    assert found <= {str(n + 1) * (n % 4 + 1) + "\0" for n in range(200)}
    assert len(found) == len(in_memory.train_starts)
    assert labelled_texts(from_shards, data) == found


def test_rows_of_a_table_are_samples_too(tmp_path: Path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    pairs = [{"prompt": f"{n} plus one is ", "response": str(n + 1)} for n in range(80)]
    parquet.write_table(pyarrow.Table.from_pylist([*pairs, {"prompt": "x"}]), tmp_path / "pairs.parquet")
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    prepared(tmp_path / "lines", tmp_path / "pairs.jsonl", format="pairs")
    prepared(tmp_path / "rows", tmp_path / "pairs.parquet", format="pairs", skip_bad=True)
    found = [(tmp_path / name / "train" / "00000-000.mask").read_bytes() for name in ("lines", "rows")]
    assert found[0] == found[1]
    skipped = (tmp_path / "rows" / "skipped.txt").read_text()
    assert 'pairs.parquet, row 81 has the fields prompt, response; expected a text in "response"' in skipped


@pytest.mark.parametrize("record", [{"prompt": "x"}, {"prompt": 1, "response": "y"}, {"prompt": "x", "response": ""}])
def test_a_malformed_pair_is_named(record: dict[str, Any], tmp_path: Path):
    file = write_pairs(tmp_path / "pairs.jsonl", 3)
    file.write_text(file.read_text() + "\n" + json.dumps(record))
    with pytest.raises(UserError, match=r"pairs\.jsonl, line 4 has .*; expected a text"):
        prepared(tmp_path / "out", file, format="pairs")


def test_a_pair_that_is_longer_than_a_bin_is_cut_and_its_rest_left_out(tmp_path: Path):
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "abc", "response": "d" * 20 + "e" * 20 + f"{n:02}"} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, pairs)))
    prepared(tmp_path / "out", file, format="pairs", held_out=0.1)
    settings: dict[str, Any] = {"seq_len": 16, "attend": "document", "packing": "best_fit", "held_out": 0.1}
    corpus, data = opened(tmp_path / "out", **settings)
    assert labelled_texts(corpus, data) == {"d" * 14}
