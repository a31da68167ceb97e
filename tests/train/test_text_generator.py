"""Text of published models and of runs: what transformers generates, on one rank with caches of every kind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import moefold
from moefold.data.tokenizer import load_tokenizer
from moefold.generate.decode import decode_ids
from moefold.generate.next_logits import model_logits
from moefold.generate.sampling import Sampling
from moefold.train.from_hf import from_hf
from moefold.train.text_generator import render_messages
from tests.support.hf_models import CASES, hf, make, save, tokens
from tests.support.tiny_tokenizer import ENTRIES, write_tokenizer

GREEDY = Sampling(temperature=0)
NEW = 12
FAMILIES = [  # nine, Kimi-K2 being DeepSeek-V3 to transformers; windows that end within the text
    "qwen3",
    "qwen3 dense layers, window",
    "mixtral window, head width, tied",
    "olmoe",
    "deepseek v3",
    "deepseek v3 yarn, no query latent, biased",
    "qwen2 window, normalised, dense layers",
    "gpt-oss",
    "deepseek v2",
    "glm qk-norm, biased, groups, two dense layers",
]


def greedy_tokens(model: Any, ids: torch.Tensor) -> list[list[int]]:
    """What transformers generates, without a token that ends a text."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    mask = torch.ones_like(ids)
    whole = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
    return whole[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("case", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path):
    """Prompts of one length and of different lengths in a batch."""
    kind, options = CASES[case]
    theirs = make(kind, **options).double()
    ours = from_hf(save(theirs, tmp_path / "hf"), dtype=torch.float64, seq_len=64)
    ids = tokens(sequences=2, length=9)
    expected = greedy_tokens(theirs, ids)
    source = model_logits(ours)
    assert decode_ids(source, ids.tolist(), GREEDY, NEW) == expected
    shorter = ids[1:, 4:]
    prompts = [ids[0].tolist(), shorter[0].tolist()]
    assert decode_ids(source, prompts, GREEDY, NEW) == [expected[0], *greedy_tokens(theirs, shorter)]


def published_model() -> Any:
    kind, options = CASES["mixtral"]
    return make(kind, **{**options, "vocab_size": ENTRIES, "num_hidden_layers": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with a tokenizer."""
    path = tmp_path_factory.mktemp("published")
    save(published_model(), path)
    write_tokenizer(path)
    return path


def test_prompts_and_chats_are_encoded_as_transformers_encodes_them(folder: Path):
    tokenizer = hf().PreTrainedTokenizerFast.from_pretrained(folder)
    generator = moefold.TextGenerator(folder, device="cpu")
    text = "what is the name? 日本"
    assert list(generator.text_model.encode(text)) == tokenizer(text)["input_ids"]
    message = [{"role": "user", "content": text}]
    expected = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    assert list(generator.encode_chat(text)) == expected


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("begun", ["Answer: ", "end", "", " a <|im_end|> b"])
def test_a_begun_answer_is_rendered_as_transformers_renders_it(begun: str, strips: bool, folder: Path, tmp_path: Path):
    content = "message.content | trim" if strips else "message.content"
    turn = "<|im_start|>{{ message.role }}\n{{ " + content + " }}<|im_end|>\n"
    template = "{% for message in messages %}" + turn + "{% endfor %}"
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "which?"}, {"role": "assistant", "content": begun}]
    tokenizer = hf().PreTrainedTokenizerFast.from_pretrained(copy)
    expected = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ours = load_tokenizer(str(copy / "tokenizer.json"), ENTRIES)
    assert render_messages(ours, messages, continues=True) == expected


def test_text_is_that_of_transformers_and_of_a_batch(folder: Path):
    tokenizer = hf().PreTrainedTokenizerFast.from_pretrained(folder)
    model = published_model().double()
    generator = moefold.TextGenerator(folder, device="cpu", precision="fp64")
    prompts = ["what is", "the name of the one"]
    together = generator.generate(prompts, tokens=NEW, temperature=0)
    for prompt, found in zip(prompts, together, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        whole = model.generate(ids, do_sample=False, max_new_tokens=NEW, eos_token_id=1, pad_token_id=1)
        assert prompt + found == tokenizer.decode(whole[0], skip_special_tokens=True)
        assert generator.generate(prompt, tokens=NEW, temperature=0) == [found]
    assert len(together[0]) > 2
    stop = together[0][1:3]
    assert generator.generate(prompts[0], tokens=NEW, temperature=0, stop=[stop]) == [
        together[0][: together[0].index(stop)]
    ]


def test_all_end_tokens_of_generation_config_end_a_text(folder: Path, tmp_path: Path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    assert set(moefold.TextGenerator(tmp_path, device="cpu").ends) == {1, 7}
