"""Folders of adapters that cannot be loaded are refused with what they have and what was expected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moefold.checkpoint.hf.adapted_products import lora_of_folder
from moefold.checkpoint.hf.adapter_folder import open_adapter_folder
from moefold.config.errors import UserError
from moefold.presets.zoo import PRESETS

ROOT = "base_model.model.model.layers.0."
PRESET = PRESETS["qwen3-30b-a3b"]().model
MODEL = replace(PRESET, layers=2, moe=replace(PRESET.moe, experts=4, top_k=2))
HIDDEN = MODEL.hidden


def write(folder: Path, tensors: dict[str, tuple[int, ...]], **options: Any) -> Path:
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", **options}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, inputs: int, outputs: int, rank: int = 2) -> dict[str, tuple[int, ...]]:
    return {f"{ROOT}{module}.lora_A.weight": (rank, inputs), f"{ROOT}{module}.lora_B.weight": (outputs, rank)}


OUT = pair("self_attn.o_proj", 4096, HIDDEN)
REFUSED: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "dora": (OUT, {"use_dora": True}, "use_dora = True is not supported"),
    "bias": (OUT, {"bias": "all"}, "bias = all: biases of the base are frozen here"),
    "kind": (OUT, {"peft_type": "IA3"}, "peft_type = IA3; expected LORA"),
    "changed base": (OUT, {"init_lora_weights": "pissa"}, "init_lora_weights = pissa changes the base too"),
    "saved modules": (OUT, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "pattern": (OUT, {"rank_pattern": {".*_proj": 4}}, r'the regular expression ".\*_proj"; expected names'),
    "rank": (OUT, {"r": 0}, "r = 0; expected a whole number"),
    "other rank": (OUT, {"r": 3}, r"has lora_A \[2, 4096\] and lora_B \[2048, 2\]; expected \[3, 4096\]"),
    "unknown": (pair("self_attn.qkv_proj", HIDDEN, 8), {}, "the model has no such linear layer"),
    "head": (
        {"base_model.model.lm_head.lora_A.weight": (2, 8), "base_model.model.lm_head.lora_B.weight": (8, 2)},
        {},
        '"lm_head" has an adapter; embedding, head and norms have none here',
    ),
    "stack": (pair("mlp.experts", HIDDEN, 8), {}, "which fit no parameter of its experts"),
    "half": ({f"{ROOT}self_attn.o_proj.lora_A.weight": (2, 4096)}, {}, "has lora_A alone"),
    "embedding": ({"base_model.model.model.embed_tokens.lora_embedding_A": (2, 8)}, {}, "is no lora_A or lora_B"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path):
    tensors, options, message = REFUSED[case]
    folder = write(tmp_path, tensors, **options)
    with pytest.raises(UserError, match=message):
        lora_of_folder(open_adapter_folder(folder), MODEL)


def test_a_pickled_adapter_is_never_opened(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(UserError, match=r"adapter_model\.bin, a pickled file, which is never opened"):
        open_adapter_folder(tmp_path)


def test_ranks_scales_and_targets_are_those_of_the_folder(tmp_path: Path):
    tensors = OUT | pair("self_attn.q_proj", HIDDEN, 4096, rank=8)
    folder = write(tmp_path, tensors, rank_pattern={"q_proj": 8}, alpha_pattern={"layers.0.self_attn.q_proj": 5})
    lora = lora_of_folder(open_adapter_folder(folder), MODEL)
    assert {lora.rank, lora.alpha} in ({2, 4.0}, {8, 5.0})
    assert set(lora.targets) in (
        {"blocks.0.attention.query: rank=8 alpha=5.0", "blocks.0.attention.out"},
        {"blocks.0.attention.query", "blocks.0.attention.out: rank=2 alpha=4.0"},
    )
