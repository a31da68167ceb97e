"""Whole models of transformers with moefold's experts, attention, norms, rotary positions and head."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moefold.transformers
from moefold.config.errors import UserError

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": None,
    "bos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": None},
    "qwen3_moe": {},
    "olmoe": {"num_key_value_heads": 4},
    "gpt_oss": {"sliding_window": 4},
    "deepseek_v3": LATENT,
    "deepseek_v2": LATENT,
    "glm4_moe": {},
    "qwen2_moe": {},
    "minimax_m2": {},
    "hunyuan_v1_moe": {},
    "ernie4_5_moe": {},
    "granitemoe": {},
    "flex_olmo": {"num_key_value_heads": 4},
}
WITHOUT_BALANCE_LOSS = {"deepseek_v2", "deepseek_v3", "glm4_moe", "hunyuan_v1_moe"}
KEPT = {  # what of a family computes otherwise than moefold's op, and stays
    "gpt_oss": {"rope"},
    "deepseek_v2": {"rope"},
    "glm4_moe": {"rope"},
    "minimax_m2": {"rope"},
    "ernie4_5_moe": {"rope"},
    "granitemoe": {"head"},
    "flex_olmo": {"norms", "rope"},
}
REPLACED = {"norms": True, "rope": True, "head": True}


@pytest.fixture(autouse=True)
def disabled_behind() -> Iterator[None]:
    yield
    moefold.transformers.disable()


def make_model(family: str, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(family, **(SIZES | FAMILIES[family] | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.set_experts_implementation("eager")
    return model.train()


def use_moefold(model: Any) -> Any:
    model.set_experts_implementation("moefold")
    model.set_attn_implementation("moefold")
    return model


def batch(padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 96, (2, 12), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100
    inputs = {"input_ids": ids, "labels": labels}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, 8:] = 0
        inputs["attention_mask"] = mask
    return inputs


def loss_and_gradients(model: Any, **inputs: Any) -> list[Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.requires_grad)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_eager(family: str):
    model = make_model(family)
    further = {} if family in WITHOUT_BALANCE_LOSS else {"output_router_logits": True}
    batches = (batch(), batch(padded=True), batch() | {"num_items_in_batch": 7} | further)
    expected = [loss_and_gradients(model, **inputs) for inputs in batches]
    moefold.transformers.enable()
    use_moefold(model)
    for inputs, eager in zip(batches, expected, strict=True):
        assert_equal(loss_and_gradients(model, **inputs), eager)
    moefold.transformers.enable(**REPLACED)
    for inputs, eager in zip(batches, expected, strict=True):
        assert_equal(loss_and_gradients(model, **inputs), eager)
    kept = KEPT.get(family, set())
    assert replaced_parts(model) == set(REPLACED) - kept
    holds_logits = model(**batch()).logits is not None
    assert holds_logits == ("head" in kept), "the fused head holds no logits"
    assert model.eval()(**batch()).logits.shape == (2, 12, 96)


def replaced_parts(model: Any) -> set[str]:
    """What of the modeling file of a model is moefold's."""
    family = sys.modules[type(model).__module__]
    norms = [value.forward for name, value in vars(family).items() if name.endswith("RMSNorm")]
    ropes = [value for name, value in vars(family).items() if name == "apply_rotary_pos_emb"]
    parts = {"head": [type(model).forward], "rope": ropes, "norms": norms}
    return {name for name, functions in parts.items() if any(map(is_moefolds, functions))}


def is_moefolds(function: Any) -> bool:
    return function.__code__.co_filename.startswith(str(Path(moefold.transformers.__file__).parent))


def test_what_is_replaced_is_taken_back():
    model = make_model("mixtral")
    modeling = sys.modules[type(model).__module__]
    norm = type(model.model.norm)

    def current() -> list[Any]:
        return [type(model).forward, norm.forward, modeling.apply_rotary_pos_emb]

    before = current()
    moefold.transformers.enable(**REPLACED)
    replaced = current()
    assert all(new is not old for new, old in zip(replaced, before, strict=True))
    moefold.transformers.disable()
    assert current() == before
    with pytest.raises(ValueError, match="not supported"):
        model.set_experts_implementation("moefold")


def test_greedy_generation_is_that_of_eager():
    model = make_model("gpt_oss").eval()
    prompt = batch()["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, **options)
    moefold.transformers.enable(**REPLACED)
    assert torch.equal(use_moefold(model).generate(prompt, **options), expected)


def test_gradient_checkpointing_gives_the_same():
    model = make_model("qwen3_moe")
    expected = loss_and_gradients(model, **batch())
    moefold.transformers.enable(**REPLACED)
    use_moefold(model).gradient_checkpointing_enable()
    assert_equal(loss_and_gradients(model, **batch()), expected)


@pytest.mark.extended
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_model_compiled_as_one_graph_gives_the_same(family: str):
    model = make_model(family)
    expected = loss_and_gradients(model, **batch())
    moefold.transformers.enable(**REPLACED)
    use_moefold(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_equal(loss_and_gradients(compiled, **batch()), expected)


def test_lora_adapters_of_peft_train_as_with_eager():
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(make_model("qwen3_moe"), adapters)
    expected = loss_and_gradients(model, **batch())
    moefold.transformers.enable(**REPLACED)
    use_moefold(model.base_model.model)
    assert_equal(loss_and_gradients(model, **batch()), expected)


def test_attention_with_a_soft_cap_is_refused_by_name():
    moefold.transformers.enable()
    attend = transformers.AttentionInterface()["moefold"]
    heads = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UserError, match=r"softcap=30\.0 is not supported"):
        attend(torch.nn.Module(), heads, heads, heads, None, softcap=30.0)
