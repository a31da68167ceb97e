"""Adapters of others as the start of ours: what PEFT saved gives PEFT's logits, and what we wrote gives ours back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moefold.checkpoint.hf.adapted_products import lora_of_folder
from moefold.checkpoint.hf.adapter_folder import open_adapter_folder
from moefold.checkpoint.hf.config_json import describe_model
from moefold.checkpoint.hf.export import GatheredBoxes
from moefold.checkpoint.hf.merged_weights import weight_adapters
from moefold.checkpoint.hf.model_folder import open_model_folder
from moefold.checkpoint.hf.peft_by_expert import peft_adapter_by_expert
from moefold.checkpoint.hf.peft_folder import peft_adapter, write_adapter
from moefold.checkpoint.hf.read_weights import local_tensors
from moefold.config.run import Config, DataConfig, LoraConfig, TrainConfig
from moefold.layout.axes import single_rank_world
from moefold.model.transformer import Transformer
from moefold.observe.printer import print_nothing
from moefold.train.assemble import build_model, choose_kernels
from moefold.train.from_hf import starting_weights
from moefold.train.lora_from import starting_adapters
from tests.checkpoint.hf.test_peft_folder import LORA, UNEVEN, adapted_model, close
from tests.support.hf_models import CASES, make, save, tokens


def model_from(folder: Path, adapter: Path) -> tuple[Transformer, Config]:
    """Our model of a folder with the adapters of another."""
    described = describe_model(open_model_folder(folder))
    moe = described.model.moe
    model = replace(described.model, moe=replace(moe, balance=replace(moe.balance, bias_rate=0.0)), mtp=0)
    lora = lora_of_folder(open_adapter_folder(adapter), model)
    train = TrainConfig(device="cpu", precision="fp32")
    config = Config(model=model, data=DataConfig(seq_len=32, tokenizer="byte"), train=train, lora=lora)
    world = single_rank_world()
    weights = starting_weights(folder, config, world, print_nothing)
    adapters = starting_adapters(adapter, config, world, print_nothing)
    return build_model(config, world, choose_kernels(config, world), weights, adapters).eval(), config


PEFT_CASES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "r": 2,
        "lora_alpha": 5,
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "alpha_pattern": {"self_attn.o_proj": 3},
    },
    "mixtral": {
        "r": 3,
        "use_rslora": True,
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj", "mlp.gate.weight"],
    },
    "deepseek v3": {  # two of ours in one of theirs; two of theirs in one of ours, each with its A; some layers
        "r": 2,
        "target_modules": ["kv_b_proj", "q_b_proj", "kv_a_proj_with_mqa"],
        "target_parameters": ["shared_experts.gate_proj.weight", "shared_experts.up_proj.weight"],
        "rank_pattern": {"layers.1.self_attn.q_b_proj": 4},
        "alpha_pattern": {"shared_experts.up_proj.weight": 3},
        "layers_to_transform": [0, 1],
    },
    "gpt-oss": {"r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


@pytest.mark.parametrize("case", PEFT_CASES)
def test_what_peft_saved_gives_its_logits(case: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    kind, options = CASES[case]
    theirs = make(kind, **options)
    folder = save(theirs, tmp_path / "hf")
    ids = tokens()
    with torch.no_grad():
        base = theirs(ids).logits
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(init_lora_weights=False, **PEFT_CASES[case])).eval()
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.3)
    wrapped.save_pretrained(tmp_path / "peft")
    ours, _ = model_from(folder, tmp_path / "peft")
    with torch.no_grad():
        expected = wrapped(ids).logits
        close(ours.logits(ids), expected)
        assert float((expected - base).abs().max()) > 1e-2 * float(expected.abs().max())


def by_expert(table: Any, config: Config, fetch: Any) -> Any:
    return peft_adapter_by_expert(table, weight_adapters(config), fetch)


def by_stack(table: Any, config: Config, fetch: Any) -> Any:
    return peft_adapter(table, weight_adapters(config), config.lora, fetch)


FORMS: dict[str, tuple[str, LoraConfig, Callable[..., Any]]] = {
    "all experts as one": ("deepseek v3", UNEVEN, by_stack),
    "by expert": ("qwen3", replace(LORA, targets=("*.experts.*", "blocks.1.attention.out: rank=1 alpha=8")), by_expert),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_we_wrote_gives_ours_back(form: str, tmp_path: Path):
    """Ranks are those that were written: gate and up of an expert have one A again."""
    case, lora, write = FORMS[form]
    kind, options = CASES[case]
    folder = save(make(kind, **options), tmp_path / "hf")
    ours, config, described = adapted_model(folder, lora)
    table = described.family.name_table(config.model)
    fetch = GatheredBoxes(local_tensors(ours), single_rank_world()).fetch_box
    adapter = tmp_path / "adapter"
    write_adapter(adapter, write(table, config, fetch), overwrite=False)
    again, read = model_from(folder, adapter)
    ids = tokens()
    with torch.no_grad():
        close(again.logits(ids), ours.logits(ids))
    experts = again.blocks[1].moe.experts
    assert experts.up_product.lora.a.shape == ours.blocks[1].moe.experts.up_product.lora.a.shape
    if form == "all experts as one":
        return
    assert set(read.lora.targets) == {"blocks.*.moe.experts.up_product", "blocks.*.moe.experts.down_product",
                                      "blocks.1.attention.out"}  # fmt: skip
    # Rows of zeros, which only make ranks equal, are drawn anew: else they would never move.
    out = again.blocks[1].attention.out.lora
    assert bool(out.a.any(-1).all())
    assert not out.b[:, 1:].any()
    an_a_of_its_own(adapter)
    other, config = model_from(folder, adapter)
    assert other.blocks[0].moe.experts.up_product.lora.a.shape[1] == 2 * LORA.rank
    theirs = make(kind, **options)
    peft = pytest.importorskip("peft")
    wrapped = peft.PeftModel.from_pretrained(theirs, adapter).eval()
    with torch.no_grad():
        close(other.logits(ids), wrapped(ids).logits)


def an_a_of_its_own(adapter: Path) -> None:
    """Change lora_A of one up projection, as adapters of others have it."""
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"] *= -2
    save_file(tensors, file)


def test_a_stack_with_inputs_and_outputs_swapped_is_read_as_such(tmp_path: Path):
    """Some versions of PEFT took the dims of (experts, outputs, inputs) for (experts, inputs, outputs)."""
    kind, options = CASES["qwen3"]
    folder = save(make(kind, **options), tmp_path / "hf")
    ours, config, described = adapted_model(folder, replace(LORA, targets=("*.experts.*",)))
    table = described.family.name_table(config.model)
    fetch = GatheredBoxes(local_tensors(ours), single_rank_world()).fetch_box
    written = by_stack(table, config, fetch)
    experts, rank = config.model.moe.experts, config.lora.rank
    for name in [name for name in written.tensors if ".lora_A." in name]:
        other = name.replace(".lora_A.", ".lora_B.")
        a_eri = written.tensors[name].unflatten(0, (experts, rank))
        b_ore = written.tensors[other].unflatten(1, (rank, experts))
        written.tensors[name] = b_ore.permute(2, 1, 0).flatten(0, 1).contiguous()
        written.tensors[other] = a_eri.permute(2, 1, 0).flatten(1).contiguous()
    write_adapter(tmp_path / "adapter", written, overwrite=False)
    again, _ = model_from(folder, tmp_path / "adapter")
    ids = tokens()
    with torch.no_grad():
        close(again.logits(ids), ours.logits(ids))
