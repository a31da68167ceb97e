"""Training loops of others around transformers' models with moefold inside: losses are those of "eager"."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import moefold.transformers
from tests.support.ranks import run_ranks
from tests.transformers.test_models import (
    REPLACED,
    assert_equal,
    batch,
    loss_and_gradients,
    make_model,
    use_moefold,
)
from tests.transformers.test_models import disabled_behind as disabled_behind

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
STEPS = 3
LENGTHS = (12, 9, 5, 12, 7, 12)  # some are padded
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
ADAPTERS = {
    "r": 4,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


def token_rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in LENGTHS]


def word_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(96)}
    words_only = tokenizers.models.WordLevel(words, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words_only), pad_token="w1", eos_token="w2", unk_token="w0"
    )


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def losses_of(trainer: Any) -> list[float]:
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS
    return losses


def test_trainer_has_the_losses_of_eager_with_accumulation_and_checkpointing(tmp_path: Path):
    collate = transformers.DataCollatorForSeq2Seq(word_tokenizer())
    rows = [{"input_ids": row, "labels": row} for row in token_rows()]
    options = arguments(tmp_path) | CHECKPOINTING | {"gradient_accumulation_steps": 2}

    def train(model: Any) -> list[float]:
        settings = transformers.TrainingArguments(**options)
        return losses_of(transformers.Trainer(model, settings, train_dataset=rows, data_collator=collate))

    expected = train(make_model("qwen3_moe"))
    moefold.transformers.enable(**REPLACED)
    found = train(use_moefold(make_model("qwen3_moe")))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(found)) == STEPS, "the weights move"


@pytest.mark.parametrize("adapted", [False, True])
def test_trl_fine_tunes_packed_sequences_with_the_losses_of_eager(tmp_path: Path, adapted: bool):
    trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
    datasets = pytest.importorskip("datasets")
    peft = pytest.importorskip("peft")
    rows = datasets.Dataset.from_list([{"input_ids": row} for row in token_rows()])
    options = arguments(tmp_path) | {"packing": True, "max_length": 16, "bf16": False}
    adapters = peft.LoraConfig(**ADAPTERS) if adapted else None

    def train(model: Any) -> list[float]:
        settings = trl.SFTConfig(**options)
        further = {"processing_class": word_tokenizer(), "peft_config": adapters}
        return losses_of(trl.SFTTrainer(model, settings, train_dataset=rows, **further))

    expected = train(make_model("qwen3_moe"))
    moefold.transformers.enable(**REPLACED)
    found = train(use_moefold(make_model("qwen3_moe")))
    assert found == pytest.approx(expected, rel=1e-5)


def test_adapters_of_peft_on_the_weights_of_experts_train_as_with_eager():
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(**ADAPTERS, init_lora_weights=False)
    model = peft.get_peft_model(make_model("qwen3_moe"), adapters)
    expected = loss_and_gradients(model, **batch())
    moefold.transformers.enable(**REPLACED)
    use_moefold(model.base_model.model)
    assert_equal(loss_and_gradients(model, **batch()), expected)


def test_offloaded_weights_are_fetched_before_they_are_read():
    expected = make_model("qwen3_moe")(**batch()).loss
    moefold.transformers.enable(**REPLACED)
    model = use_moefold(make_model("qwen3_moe"))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    torch.testing.assert_close(model(**batch()).loss, expected)


def wrapped_losses(wrap: str, rank: int, **inside: bool) -> list[float]:
    model = make_model("qwen3_moe")
    if inside:
        moefold.transformers.enable(**inside)
        use_moefold(model)
    layers = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=layers if wrap == "fsdp" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    inputs = batch()
    inputs["input_ids"] = (inputs["input_ids"] + rank) % 96
    losses = []
    for _ in range(STEPS):
        loss = model(**inputs).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    moefold.transformers.disable()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    return losses


def losses_of_a_rank(world: Any) -> dict[str, list[list[float]]]:
    """Of each wrapper: losses without moefold, and with it."""
    rank = world.everyone.index
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # asked for, unused: the group is there
    return {wrap: [wrapped_losses(wrap, rank), wrapped_losses(wrap, rank, **REPLACED)] for wrap in ("ddp", "fsdp")}


def test_accelerate_on_two_ranks_has_the_losses_of_eager():
    for losses in run_ranks(losses_of_a_rank, 2):
        expected = losses["ddp"][0]
        assert len(set(expected)) == STEPS, "the weights move"
        for found in (*losses["ddp"], *losses["fsdp"]):
            assert found == pytest.approx(expected, rel=1e-5)
