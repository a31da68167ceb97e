"""One config.json against `transformers`: the same logits, or refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.model_folder import ModelFolder
from moefold.config.errors import UserError
from moefold.config.rules import check_config
from moefold.config.run import Config, DataConfig, TrainConfig
from moefold.train.from_hf import from_hf
from tests.support.hf_models import make_model, save, tokens

CLASSES = {  # names in transformers; Kimi-K2 is DeepSeek-V3 there
    "mixtral": "Mixtral",
    "olmoe": "Olmoe",
    "qwen3_moe": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
    "deepseek_v2": "DeepseekV2",
    "gpt_oss": "GptOss",
    "glm4_moe": "Glm4Moe",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
TOLERANCE = 1e-5  # of the largest logit
MANY_TENSORS = 10_000_000  # as many as any config.json may tell of

Verdict = Literal["equal", "different", "refused", "refused by both", "accepted alone"]


@dataclass(frozen=True)
class Comparison:
    verdict: Verdict
    text: str = ""  # of the refusal, or what transformers said
    difference: float = 0.0  # of the largest logit


def compare_with_transformers(
    kind: str, options: dict[str, Any], folder: Path, length: int = 24, tolerance: float = TOLERANCE
) -> Comparison:
    """`options` is config.json without model_type. "accepted alone": transformers cannot run what moefold accepts."""
    ids = tokens(length=length)
    try:
        model = make_model(CLASSES[kind], options)
        with torch.no_grad():
            expected = model(ids).logits
    except Exception as error:
        return compare_refusals(kind, options, f"{type(error).__name__}: {error}")
    save(model, folder)
    text = json.dumps({"model_type": kind, **options})
    (folder / "config.json").write_text(text)
    try:
        with torch.no_grad():
            found = from_hf(folder, seq_len=length).logits(ids)
    except UserError as refused:
        return Comparison("refused", str(refused))
    largest = float(expected.abs().max())
    difference = float((found - expected).abs().max()) / largest
    verdict = "equal" if difference <= tolerance else "different"  # not a number is different
    return Comparison(verdict, difference=difference)


def compare_refusals(kind: str, options: dict[str, Any], theirs: str) -> Comparison:
    """What transformers cannot run must be refused by config.json alone."""
    folder = ModelFolder(Path("folder"), {"model_type": kind, **options}, ManyTensors())
    data = DataConfig(tokenizer="tokenizer.json")  # whose vocabulary is not checked
    train = TrainConfig(device="cpu", precision="fp32")
    try:
        model = describe_model(folder).model
        check_config(Config(model=model, data=data, train=train), 1)
    except UserError as refused:
        return Comparison("refused by both", str(refused))
    return Comparison("accepted alone", theirs)


class ManyTensors(dict[str, Any]):
    """The tensors of a folder that is not there."""

    def __len__(self) -> int:
        return MANY_TENSORS
