"""One config.json against `transformers`: the same logits, or refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from moefold.checkpoint.hf.config_json import FAMILIES, config_json_for, describe_model
from moefold.checkpoint.hf.model_folder import ModelFolder, open_model_folder
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

Verdict = Literal["equal", "refused", "refused by both", "different", "accepted alone", "lost in export"]
WRONG = ("different", "accepted alone", "lost in export")


@dataclass(frozen=True)
class Comparison:
    verdict: Verdict
    text: str = ""  # of the refusal, or what transformers said
    difference: float = 0.0  # of the largest logit


def compare_with_transformers(
    kind: str, options: dict[str, Any], folder: Path, length: int = 24, tolerance: float = TOLERANCE
) -> Comparison:
    """`options` is config.json without model_type. "accepted alone": transformers cannot run what moefold accepts.
    "lost in export": to transformers, the config.json that moefold writes is another model."""
    ids = tokens(length=length)
    try:
        model = make_model(CLASSES[kind], options)
        expected = logits_of(model, ids)
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
    difference = share_of_largest(found, expected)
    if not difference <= tolerance:  # not a number is different
        return Comparison("different", distances_from_fp64(model, ids, found, expected), difference)
    if FAMILIES[kind].dense:
        return Comparison("equal", difference=difference)
    return compare_export(kind, folder, expected, Comparison("equal", difference=difference))


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def distances_from_fp64(model: Any, ids: torch.Tensor, found: torch.Tensor, expected: torch.Tensor) -> str:
    """Tells a difference from rounding, which both have alike."""
    exact = logits_of(model.double(), ids)
    ours = share_of_largest(found, exact)
    theirs = share_of_largest(expected, exact)
    return f"from transformers in fp64: moefold {ours:.1e}, transformers in fp32 {theirs:.1e}"


def share_of_largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    largest = float(expected.abs().max())
    return float((found - expected).abs().max()) / largest


def compare_export(kind: str, folder: Path, expected: torch.Tensor, equal: Comparison) -> Comparison:
    """`equal`, if transformers makes the same model of the config.json that moefold writes."""
    described = describe_model(open_model_folder(folder))
    try:
        written = config_json_for(described.family, described.model)
        found = logits_of_config(kind, json.dumps(without_names(written)), expected.shape[1])
    except Exception as error:
        return Comparison("lost in export", f"{type(error).__name__}: {error}")
    difference = share_of_largest(found, expected)
    return equal if difference <= TOLERANCE else Comparison("lost in export", difference=difference)


@cache
def logits_of_config(kind: str, text: str, length: int) -> torch.Tensor:
    """By transformers, with the same weights as any other model of the same tensors; once for all that are written
    alike."""
    return logits_of(make_model(CLASSES[kind], json.loads(text)), tokens(length=length))


def without_names(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in ("architectures", "model_type")}


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
