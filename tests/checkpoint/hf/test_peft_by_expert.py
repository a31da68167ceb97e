"""Adapters with a pair for each expert's matrix: the sums that merged weights have, under names that vLLM's rule takes,
and PEFT itself, which knows this form of two families, gives our logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moefold.checkpoint.hf.config_json import family_for_model
from moefold.checkpoint.hf.export import GatheredBoxes, iterate_hf_tensors
from moefold.checkpoint.hf.merged_weights import MergedWeights, weight_adapters
from moefold.checkpoint.hf.peft_by_expert import peft_adapter_by_expert
from moefold.checkpoint.hf.peft_folder import peft_adapter, write_adapter
from moefold.checkpoint.hf.read_weights import local_tensors
from moefold.config.errors import UserError
from moefold.config.run import Config, LoraConfig
from moefold.layout.axes import single_rank_world
from moefold.presets.zoo import PRESETS
from tests.checkpoint.hf.test_peft_folder import LORA, UNEVEN, adapted_model, close
from tests.support.hf_models import CASES, make, save, tokens

CHOSEN = {
    "qwen3": replace(LORA, targets=("*.attention.*", "*.experts.*: rank=2 alpha=7")),
    "mixtral": replace(LORA, rs=True, targets=("*.attention.query", "*.experts.down_product")),
    "deepseek v3": UNEVEN,
}


def vllm_module(tensor: str) -> tuple[str, str]:
    """vLLM's rule, restated: the module between PEFT's prefix and `.lora_A.weight` or `.lora_B.weight`."""
    parts = tensor.split(".")
    assert parts[:2] == ["base_model", "model"]
    assert parts[-1] == "weight"
    return ".".join(parts[2:-2]), parts[-2]


@pytest.mark.parametrize("case", CHOSEN)
def test_pairs_are_the_change_of_merged_weights_and_experts_have_names_of_their_own(case: str, tmp_path: Path):
    kind, options = CASES[case]
    theirs = make(kind, **options)
    ours, config, described = adapted_model(save(theirs, tmp_path / "hf"), CHOSEN[case])
    fetch = GatheredBoxes(local_tensors(ours), single_rank_world()).fetch_box
    table = described.family.name_table(config.model)
    adapters = weight_adapters(config)
    write_adapter(tmp_path / "adapter", peft_adapter_by_expert(table, adapters, fetch), overwrite=False)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    base = dict(iterate_hf_tensors(table, fetch))
    merged = dict(iterate_hf_tensors(table, MergedWeights(fetch, adapters).fetch_box))
    modules = {vllm_module(name)[0] for name in written}
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        change = merged[name] - weight
        assert (module in modules) or not change.any(), name
        if module not in modules:
            continue
        a, b = (written[f"base_model.model.{module}.lora_{part}.weight"] for part in "AB")
        assert a.shape == (settings["r"], weight.shape[1])
        assert b.shape == (weight.shape[0], settings["r"])
        torch.testing.assert_close(scale * b @ a, change, rtol=0, atol=1e-5)
    of_experts = [name for name in base if ".experts." in name]
    assert len(of_experts) % 3 == 0
    assert modules >= {name.removesuffix(".weight") for name in of_experts}  # vLLM stacks all three of every expert
    assert {module.rpartition(".")[2] for module in modules} == set(settings["target_modules"])
    assert not any(settings[key] for key in ("target_parameters", "rank_pattern", "alpha_pattern", "use_rslora"))
    if case != "deepseek v3":
        peft_gives_our_logits(theirs, tmp_path / "adapter", ours)


def peft_gives_our_logits(theirs: torch.nn.Module, adapter: Path, ours: torch.nn.Module) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens()
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    with torch.no_grad():
        close(wrapped(ids).logits, ours.logits(ids))


def test_magnitudes_are_refused_where_readers_have_none():
    model = replace(PRESETS["qwen3-30b-a3b"]().model, layers=1)
    config = Config(model=model, lora=LoraConfig(rank=2, dora=True))
    table = family_for_model(model).name_table(model)
    adapters = weight_adapters(config)
    with pytest.raises(UserError, match="which vLLM and SGLang do not read; merge them"):
        peft_adapter_by_expert(table, adapters, lambda name, box: torch.zeros(()))
    with pytest.raises(UserError, match="PEFT has DoRA for all targets or for none"):
        peft_adapter(table, adapters, config.lora, lambda name, box: torch.zeros(()))


def test_a_family_without_names_of_experts_is_refused(tmp_path: Path):
    kind, options = CASES["gpt-oss"]
    _, config, described = adapted_model(save(make(kind, **options), tmp_path / "hf"), LoraConfig(rank=2))
    table = described.family.name_table(config.model)
    with pytest.raises(UserError, match="write the adapters with --to peft"):
        peft_adapter_by_expert(table, weight_adapters(config), lambda name, box: torch.zeros([n for _, n in box]))
