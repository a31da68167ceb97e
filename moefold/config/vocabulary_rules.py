"""Rules of `data.tokenizer trained`: a vocabulary that a run trains on its own text, and keeps in its folder."""

from __future__ import annotations

from moefold.config.rule import ConfigOnRanks, RuleList
from moefold.config.run import TRAINED

TOKENIZER = "data.tokenizer"
SMALLEST_VOCABULARY = 257  # all bytes, and the end token

VOCABULARY_RULES = RuleList()


def trains_vocabulary(c: ConfigOnRanks) -> bool:
    return c.data.tokenizer == TRAINED


@VOCABULARY_RULES.rule(
    "a vocabulary is trained on text",
    (TOKENIZER, "data.source", "data.format"),
    why="a vocabulary is trained on plain text",
    fix="set data.tokenizer to auto",
)
def vocabulary_is_trained_on_text(c: ConfigOnRanks) -> bool:
    has_text = c.data.source not in ("zipf", "prepared") and c.data.format == "text"
    return has_text or not trains_vocabulary(c)


@VOCABULARY_RULES.rule(
    "a trained vocabulary has all bytes",
    (TOKENIZER, "model.vocab"),
    says="<model.vocab> cannot hold a trained vocabulary, which begins with an end token and 256 bytes",
    fix=f"set model.vocab to {SMALLEST_VOCABULARY} or more",
)
def trained_vocabulary_has_all_bytes(c: ConfigOnRanks) -> bool:
    return c.model.vocab >= SMALLEST_VOCABULARY or not trains_vocabulary(c)


@VOCABULARY_RULES.rule(
    "a trained vocabulary lies above its checkpoints",
    (TOKENIZER, "checkpoint.path"),
    why="a trained vocabulary lies in the run's folder, where a checkpoint elsewhere would not find it",
    fix="set data.tokenizer to auto",
)
def trained_vocabulary_lies_above_checkpoints(c: ConfigOnRanks) -> bool:
    return not c.checkpoint.path or not trains_vocabulary(c)
