"""A tokenizer.json of byte pairs for tiny models, with special tokens, a chat template and a token before each text."""

from __future__ import annotations

import json
from pathlib import Path

ENTRIES = 280
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=ENTRIES, special_tokens=SPECIAL, initial_alphabet=alphabet)
    engine.train_from_iterator(["what is the name of the one that is here "] * 9, trainer)
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    engine.save(str(folder / "tokenizer.json"))
    options = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(options))


def write_words(folder: Path, entries: int) -> None:
    """A tokenizer.json of so many words, each one token, for vocabularies too small for bytes. The last ends texts."""
    from tokenizers import Tokenizer, models

    words = {f"w{number}": number for number in range(entries - 1)}
    words["</s>"] = entries - 1
    engine = Tokenizer(models.WordLevel(words, unk_token="w0"))
    engine.save(str(folder / "tokenizer.json"))
